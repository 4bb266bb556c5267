"""The ports of all backends that need no cluster give equal numbers; lost child processes."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from refused import refused
from safetensors import SafetensorError
from tiny_runs import config_of, random_batch
from used_ports import REQUESTS, SAMPLING, use_ports

from postgrad.cluster.backends import open_models
from postgrad.cluster.child_process import ChildProcess
from postgrad.cluster.engines import engine_config
from postgrad.cluster.host import build_host
from postgrad.cluster.ports import RemotePort, attempt
from postgrad.cluster.wire import encode
from postgrad.errors import ConfigError, RunError
from postgrad.processes import child
from postgrad.processes.channel import Channel
from postgrad.rollout.engine import Request, make_sampling

BACKENDS = {
    "local": [],
    "process": ["cluster.backend=process"],
    "apart": ["cluster.backend=process", "cluster.engines=1"],
}
OVERRIDES = ("optimizer.lr=2e-2", "training.updates_per_step=2", "cluster.wait_s=300")


@pytest.fixture(scope="module")
def results_of(tiny, tmp_path_factory) -> dict:
    configs = {
        name: config_of("grpo", tiny, *OVERRIDES, *overrides)
        for name, overrides in BACKENDS.items()
    }

    def run_backend(name: str) -> dict:
        folder = tmp_path_factory.mktemp(name)
        with open_models(configs[name]) as models:
            ports = (models.policy, models.engine)
            children = {port.caller for port in ports if hasattr(port, "caller")}
            assert len(children) == {"local": 0, "process": 1, "apart": 2}[name]
            results = use_ports(models.policy, models.engine, folder)
        files = {name: (folder / name).read_bytes() for name in results["files"]}
        exit_codes = {one.child.process.returncode for one in children}
        return results | {"bytes": files, "exit codes": exit_codes}

    return {name: run_backend(name) for name in BACKENDS}


def assert_equal(one, two) -> None:
    """Compare two results, tensors bit by bit."""
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys() and one
        for name in one:
            assert_equal(one[name], two[name])
    else:
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "apart"])
def test_every_port_gives_what_a_local_model_gives(results_of, backend):
    """Bit by bit; an engine apart samples from the old weights until it gets the new ones."""
    local, remote = dict(results_of["local"]), dict(results_of[backend])
    shares_weights = backend == "process"
    assert remote.pop("shares_weights") is shares_weights
    expected = "after publish" if shares_weights else "generated"
    assert_equal(remote.pop("before publish"), local[expected])
    assert remote.pop("exit codes") == {0}, "they end by themselves when the driver closes"
    for name, result in remote.items():
        assert_equal(result, local[name])


@pytest.mark.slow
def test_the_calls_of_the_contract_do_something(results_of):
    local = results_of["local"]
    assert local["shares_weights"] and local["metrics"]["grad_norm"] > 0
    assert local["generated"] != local["after publish"] == local["before publish"]
    assert issubclass(local["refused"][0], ConfigError) and local["failed"][0] is RunError
    assert local["broken"][0] is RunError and "advantages" in local["broken"][1]
    first, second, loaded = (
        local[name]["logprobs"] for name in ("logprobs", "after second update", "after load")
    )
    assert not torch.equal(first, second) and not torch.equal(second, loaded)
    assert "loss_weight" not in local["columns"], "of the worker's own copy"
    assert torch.isfinite(local["alive"]["logprobs"]).all()


def test_host_uses_the_configured_threads(tiny):
    """Equal results on all backends need equal numbers of threads."""
    before = torch.get_num_threads()
    try:
        build_host(config_of("grpo", tiny, f"model.threads={before + 1}"))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


# ---- child processes that die or hang


@pytest.mark.slow
def test_child_process_writes_no_file_and_ignores_signals(
    tiny, tmp_path, monkeypatch, real_children
):
    """A terminal, Slurm and systemd signal every process of a run.

    The driver then ends its step and saves, and needs the child process for that.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    new_files = set()

    receive = Channel.receive

    def receive_with_signals(channel):
        new_files.update(tmp_path.iterdir())
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if b"postgrad.cluster.child_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGINT)
                os.kill(int(pid), signal.SIGTERM)
        return receive(channel)

    monkeypatch.setattr(Channel, "receive", receive_with_signals)
    with open_models(
        config_of("grpo", tiny, "cluster.backend=process", "cluster.wait_s=300")
    ) as models:
        assert models.policy.logprobs(random_batch(1))["logprobs"].isfinite().all()
    assert not new_files
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_killed_child_process_is_named_at_once(tiny, real_children):
    with open_models(
        config_of("grpo", tiny, "cluster.backend=process", "cluster.wait_s=300")
    ) as models:
        child = models.policy.caller.child
        # Stopped, it cannot finish the call before it is killed.
        child.process.send_signal(signal.SIGSTOP)
        threading.Timer(0.5, lambda: os.kill(child.process.pid, signal.SIGKILL)).start()
        start = time.monotonic()
        with pytest.raises(
            RunError, match=r"policy process died during policy\.logprobs \(SIGKILL\)"
        ):
            models.policy.logprobs(random_batch(1))
        assert time.monotonic() - start < 300, "before cluster.wait_s"
        with pytest.raises(RunError, match=r"died during engine\.generate"):
            models.engine.generate(REQUESTS, SAMPLING)


SILENT_CHILD = """if True:
    import os, sys, time
    channel, reads, message = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
    os.write(channel, len(message).to_bytes(8, "little") + message)
    while reads == "reads" and os.read(channel, 1 << 16):
        pass
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reads", "tokens"),
    [("reads", 1), ("does not read", 300_000)],
    ids=["reads but does not answer", "does not read a message larger than the buffer"],
)
def test_hung_child_process_is_named_and_stopped(tiny, monkeypatch, reads, tokens):
    """It has started, without loading a model, and answers no call."""

    def start(module, arguments, child_end, env):
        command = [sys.executable, "-c", SILENT_CHILD, str(child_end.fileno()), reads]
        return subprocess.Popen(
            [*command, encode(["ok", None]).hex()],
            pass_fds=[child_end.fileno()],
            start_new_session=True,
        )

    monkeypatch.setattr(child, "start_process", start)
    process = ChildProcess(config_of("grpo", tiny, "cluster.wait_s=1"), "engine")
    with pytest.raises(
        RunError, match=r"engine process .* engine\.generate within 1 s \(cluster\.wait_s\)"
    ):
        RemotePort(process, "engine", "engine").generate([Request([1] * tokens, [1])], SAMPLING)
    assert process.child.process.poll() is not None


@pytest.mark.slow
def test_model_that_cannot_be_loaded_raises_config_error(tiny):
    config = config_of("grpo", tiny, "cluster.backend=process", "model.path=/no/such/folder")
    with refused("unreadable", "model.path"), open_models(config):
        pass


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("header too large")]
)
def test_an_error_of_a_file_prints_no_traceback(capsys, error):
    def fails():
        raise error

    assert attempt(fails) == ("error", f"{type(error).__name__}: {error}")
    assert "Traceback" not in capsys.readouterr().err


def test_only_an_error_outside_of_the_users_code_prints_a_traceback(capsys):
    kind, message = attempt(partial(int, "a bug"))
    assert kind == "error" and message.startswith("ValueError: invalid literal")
    assert "Traceback" in capsys.readouterr().err
    kind, message = attempt(lambda: int("a bug"))
    assert kind == "error" and "(test_backends.py, line " in message
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_engine_process_decodes_a_stream_between_calls(tiny):
    stream = ("rollout.stream=true", "rollout.staleness=1", "rollout.max_response_tokens=10")
    config = config_of("grpo", tiny, *BACKENDS["apart"], *OVERRIDES, *stream)
    process = ChildProcess(engine_config(config), "engine")
    try:
        engine = RemotePort(process, "engine", "engine")
        added = {str(i): request for i, request in enumerate(REQUESTS)}
        rows = {}
        while len(rows) < 9:
            names = [name for name in "012" if not rows.keys() >= {(name, j) for j in range(3)}]
            result = engine.poll(4, names, added)
            added = {}
            for name, index, completion in result["finished"]:
                rows[name, index] = completion
        expected = engine.generate(REQUESTS, make_sampling(config.rollout))
    finally:
        process.close()
    for i, group in enumerate(expected):
        for j, completion in enumerate(group):
            row = rows[str(i), j]
            assert row.tokens == completion.tokens
            assert row.versions == [4] * len(row.tokens)
