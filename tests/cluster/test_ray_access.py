"""`cluster=ray` that cannot work is refused in one line; starting and joining a cluster."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile

import preloaded
import pytest
from refused import refused
from tiny_runs import config_of, overrides_of, toy_run, tree
from waiting import wait_for

from postgrad.cluster import ray_connection
from postgrad.training.resolve import check_cluster

OVERRIDES = toy_run(steps=1)


def refusal_of(tmp_path, tiny, *overrides: str, **environment: str) -> str:
    """Returns the one line that `postgrad train` prints; checks that nothing is written."""
    runs = tmp_path / "runs"
    arguments = overrides_of(tiny, *OVERRIDES, f"runs={runs}", *overrides)
    done = preloaded.run(
        preloaded.COMMAND, "train", "grpo", *arguments, env={**os.environ, **environment}
    )
    assert done.returncode == 2, done.stderr
    assert tree(runs) == {} if runs.exists() else True
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.slow
def test_cluster_is_short_for_cluster_backend(tiny):
    for overrides in (
        ("cluster=ray",),
        ("cluster.backend=ray",),
        ("cluster=ray", "cluster.workers=3"),
    ):
        assert config_of("grpo", tiny, *overrides).cluster.backend == "ray"
    assert config_of("grpo", tiny, "cluster=process", "cluster.engines=1").cluster.engines == 1
    with refused("unknown_name", "cluster.backend"):
        config_of("grpo", tiny, "cluster=rray")


def test_a_pool_without_workers_is_refused(tiny):
    with refused("wrong_value", "cluster.pools.critic"):
        check_cluster(config_of("grpo", tiny, "cluster=ray", "cluster.pools.critic=0").cluster)


@pytest.mark.slow
def test_missing_ray_names_the_package(tiny, tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "ray.py").write_text("raise ImportError('hidden by the test')\n")
    path = os.pathsep.join([str(tmp_path / "hidden"), *sys.path])
    line = refusal_of(tmp_path, tiny, "cluster=ray", PYTHONPATH=path)
    assert "pip install 'postgrad[cluster]'" in line


@pytest.mark.slow
def test_address_without_a_cluster_is_refused(tiny, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'postgrad[cluster]'")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    line = refusal_of(tmp_path, tiny, "cluster=ray", f"cluster.address=127.0.0.1:{port}")
    assert f"cluster.address=127.0.0.1:{port}" in line


def test_malformed_address_is_refused(tiny):
    for wrong in ("10.0.0.1", "here", "ray://x", ":"):
        with refused("wrong_value", "cluster.address"):
            ray_connection.join(None, wrong)


@pytest.mark.nightly
def test_train_command_starts_and_stops_its_clusters(tiny, tmp_path):
    """A warmup and a run: two clusters, one after the other; no process is left."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'postgrad[cluster]'")
    import psutil

    more = (
        "cluster=ray",
        "cluster.workers=1",
        f"runs={tmp_path}",
        "warmup.recipe=sft",
        'warmup.overrides=["training.steps=1"]',
    )
    # All processes of the command inherit this variable; other tests have clusters too.
    mark = {"POSTGRAD_TEST_CLUSTER": str(tmp_path)}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "postgrad.cli.main",
            "train",
            "grpo",
            *overrides_of(tiny, *OVERRIDES, *more),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        | mark,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "test" / "checkpoints" / "step-1" / "policy" / "config.json").is_file()
    assert "ray" not in done.stderr.lower(), done.stderr

    def remaining() -> list[str]:
        return [
            p.info["name"]
            for p in psutil.process_iter(["name", "environ", "status"])
            if mark.items() <= (p.info["environ"] or {}).items()
            and p.info["status"] != psutil.STATUS_ZOMBIE
        ]

    wait_for(lambda: not remaining(), "the processes of the clusters to end")


def test_sigterm_while_ray_starts_acts_like_ctrl_c():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), ray_connection.keep_sigterm_handler():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_only_tokens_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = {}
    for name in ("stale", "locked", "new"):
        folders[name] = tmp_path / f"{ray_connection.TOKEN_PREFIX}{name}"
        folders[name].mkdir()
        (folders[name] / "token").write_text(name)
    for name in ("stale", "locked"):
        os.utime(folders[name] / "token", (1, 1))
    with (folders["locked"] / "token").open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        own_token = ray_connection.token_file.__wrapped__()
    assert set(tmp_path.iterdir()) == {folders["locked"], folders["new"], own_token.parent}
    assert own_token.stat().st_mode & 0o777 == 0o600
    assert len(own_token.read_text()) == 64
