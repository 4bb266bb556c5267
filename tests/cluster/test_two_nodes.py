"""Two nodes on one machine: network namespaces joined by a cable of their own (veth).

Each has a Ray node with one CPU core, so a run with two ranks uses both nodes. Needs root and `ip`.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tiny_runs import metrics_without_timing, overrides_of, toy_run
from waiting import wait_for

pytest.importorskip("ray", reason="Ray is not installed: pip install 'postgrad[cluster]'")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and ip (Debian: apt-get install iproute2)",
    ),
]
NUM_ROWS = 16  # per step of toy_run()
SMALL = (*toy_run(steps=4, response_tokens=4), "optimizer.lr=2e-3", "training.checkpoint_every=1")
# The verifier of step 3 waits for the test, which kills a node meanwhile.
VERIFIER = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def odd(response, problem):
    if (HERE / "hold").exists():
        with (HERE / "scored").open("a") as file:
            file.write(".")
        while (HERE / "scored").stat().st_size > {held_after} and (HERE / "hold").exists():
            time.sleep(0.05)
    return sum(map(ord, response)) % 11 / 10
"""


class Nodes:
    """Two namespaces with addresses in one network, and the Ray nodes in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        suffix = secrets.token_hex(3)
        self.names = (f"pg0{suffix}", f"pg1{suffix}")
        self.addresses = ("10.213.77.1", "10.213.77.2")
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        try:
            self._connect()
        except subprocess.CalledProcessError as error:
            self.close()
            reason = error.stderr.strip() or error.stdout.strip()
            pytest.skip(f"network namespaces cannot be made here: {reason}")

    def _connect(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        first, second = self.names
        _ip("link", "add", first, "netns", first, "type", "veth", "peer", "name", second)
        _ip("link", "set", second, "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    @property
    def address(self) -> str:
        """host:port of the cluster."""
        return f"{self.addresses[0]}:6379"

    def command(self, number: int, *words: str) -> list[str]:
        """Returns the command line of a Python program on a node."""
        return ["ip", "netns", "exec", self.names[number], sys.executable, *words]

    def start_ray(self, number: int) -> None:
        """Starts the Ray node with one core; returns when it has joined the cluster."""
        place = ["--head", "--port=6379", "--include-dashboard=false"]
        if number > 0:
            place = [f"--address={self.address}"]
        words = (
            *("-m", "ray.scripts.scripts", "start", *place),
            *(
                f"--node-ip-address={self.addresses[number]}",
                "--num-cpus=1",
                "--disable-usage-stats",
            ),
            *("--object-store-memory=80000000", f"--temp-dir={self.folder}/ray{number}"),
        )
        done = subprocess.run(
            self.command(number, *words),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def kill(self, number: int) -> int:
        """Kills every process of a node at once; returns how many there were."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.names[number]], capture_output=True, text=True
        )
        processes = [int(word) for word in found.stdout.split()]
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return len(processes)

    def close(self) -> None:
        for number, name in enumerate(self.names):
            self.kill(number)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    folder = Path("/tmp") / f"pg-{secrets.token_hex(3)}"  # Ray's socket paths must be short
    folder.mkdir(mode=0o700)
    made = Nodes(folder)
    try:
        made.start_ray(0)
        made.start_ray(1)
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def checkpoint_of(folder: Path) -> dict[str, bytes]:
    """Returns the files of the last checkpoint."""
    latest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    files = [path for path in sorted(latest.rglob("*")) if path.is_file()]
    return {str(path.relative_to(latest)): path.read_bytes() for path in files}


def test_lost_node_is_one_line_and_the_run_ends_bit_exact_on_a_new_node(nodes, tiny, tmp_path):
    (tmp_path / "own.py").write_text(VERIFIER.format(held_after=2 * NUM_ROWS))

    def command(name: str) -> list[str]:
        settings = (
            *SMALL,
            "cluster=ray",
            "cluster.workers=2",
            f"cluster.address={nodes.address}",
            "cluster.wait_s=300",
            f"reward.verifier={tmp_path}/own.py:odd",
            "reward.timeout_s=120",
            f"runs={tmp_path}",
            f"name={name}",
        )
        words = ("-m", "postgrad.cli.main", "train", "grpo", *overrides_of(tiny, *settings))
        return nodes.command(0, *words)

    def run(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(name), env=nodes.environment, capture_output=True, text=True, timeout=600
        )

    complete = run("complete")
    assert complete.returncode == 0, complete.stderr

    (tmp_path / "hold").touch()
    process = subprocess.Popen(
        command("lost"), env=nodes.environment, stderr=subprocess.PIPE, text=True
    )
    scored = tmp_path / "scored"
    wait_for(
        lambda: (
            process.poll() is not None or (scored.exists() and scored.stat().st_size > 2 * NUM_ROWS)
        ),
        "third step",
    )
    assert process.poll() is None, process.stderr and process.stderr.read()
    assert nodes.kill(1) > 0
    killed = time.monotonic()
    (tmp_path / "hold").unlink()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1, errors
    lines = [line for line in errors.splitlines() if line.startswith("postgrad: ")]
    assert len(lines) == 1, errors
    assert "step 3, stage" in lines[0] and "worker died during policy." in lines[0], lines
    assert "the same command continues the run" in lines[0]
    assert "Traceback" not in errors
    assert time.monotonic() - killed < 300, "before cluster.wait_s"

    alone = run("lost")
    assert alone.returncode == 2, alone.stderr
    assert "need 2 CPU cores, the Ray cluster has 1" in alone.stderr

    nodes.start_ray(1)
    continued = run("lost")
    assert continued.returncode == 0, continued.stderr
    assert checkpoint_of(tmp_path / "lost") == checkpoint_of(tmp_path / "complete")
    assert metrics_without_timing(tmp_path / "lost") == metrics_without_timing(
        tmp_path / "complete"
    )
