"""The ports of all backends that need no cluster give equal numbers; lost child processes."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tiny_runs import config_of, random_batch

from postgrad.cluster.backends import open_models
from postgrad.cluster.child_process import ChildProcess
from postgrad.cluster.engines import engine_config
from postgrad.cluster.host import build_host
from postgrad.cluster.ports import attempt
from postgrad.cluster.remote_ports import RemoteEngine
from postgrad.cluster.wire import encode
from postgrad.errors import ConfigError, RunError
from postgrad.model.port import after
from postgrad.processes import child
from postgrad.processes.channel import Channel
from postgrad.rollout.engine import Request, Sampling, make_sampling, trajectory_seed
from postgrad.types import Batch

BACKENDS = {
    "local": [],
    "process": ["cluster.backend=process"],
    "apart": ["cluster.backend=process", "cluster.engine_apart=true"],
}
REQUESTS = [
    Request(prompt, [trajectory_seed(3, 1, str(i), j) for j in range(3)])
    for i, prompt in enumerate([[1, 2, 3], [4, 15], [9, 8, 7, 6]])
]
SAMPLING = Sampling(1.0, 10)
OVERRIDES = ("optimizer.lr=2e-2", "training.updates_per_step=2", "cluster.wait_s=300")


def use_ports(policy, engine, folder) -> dict:
    """Calls every method of the ports; returns the results.

    The order matters: each call depends on the updates before it.
    """
    results = {"shares_weights": engine.shares_weights}
    batch = random_batch(31)
    results["logprobs"] = policy.logprobs(batch)
    results["inside"] = policy.logprobs(batch, after(1))
    results["generated"] = engine.generate(REQUESTS, SAMPLING)
    results["greedy"] = engine.generate(REQUESTS, Sampling(0.0, 10))
    batch_to_update = random_batch(32)
    results["metrics"] = {
        name: value
        for name, value in policy.update(batch_to_update, 1).items()
        if name != "memory_gib"
    }
    results["columns"] = set(batch_to_update.tokens)
    results["token_stats"] = {
        name: column.nan_to_num(-1.0) for name, column in policy.token_stats().items()
    }  # NaN equals nothing
    results["before publish"] = engine.generate(REQUESTS, SAMPLING)
    if not engine.shares_weights:
        engine.publish(policy.weights())
    results["after publish"] = engine.generate(REQUESTS, SAMPLING)
    policy.save(str(folder))
    results["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    results["bytes"] = (
        (folder / "policy" / "model.safetensors").read_bytes(),
        (folder / "optimizer.safetensors").read_bytes(),
    )
    policy.update(random_batch(33), 2)
    results["after second update"] = policy.logprobs(batch)["logprobs"]
    policy.load(str(folder))
    results["after load"] = policy.logprobs(batch)["logprobs"]
    policy.update(random_batch(33), 2)
    results["weights"] = policy.weights()
    try:
        policy.logprobs(batch, after(99))
    except ConfigError as error:
        results["refused"] = str(error)
    try:
        engine.generate([Request([1] * 600, [0])], SAMPLING)
    except RunError as error:
        results["failed"] = str(error)
    try:
        policy.update(
            Batch(
                batch.prompt,
                batch.response,
                {"loss_mask": batch.tokens["loss_mask"]},
                dict(batch.rows),
            ),
            3,
        )
    except Exception as error:
        results["broken"] = str(error)
    results["alive"] = policy.logprobs(batch)["logprobs"]
    return results


@pytest.fixture(scope="module")
def results_of(tiny, tmp_path_factory) -> dict:
    configs = {
        name: config_of("grpo", tiny, *OVERRIDES, *overrides)
        for name, overrides in BACKENDS.items()
    }

    def run_backend(name: str) -> dict:
        with open_models(configs[name]) as models:
            ports = (models.policy, models.engine)
            children = {port.caller for port in ports if hasattr(port, "caller")}
            assert len(children) == {"local": 0, "process": 1, "apart": 2}[name]
            results = use_ports(models.policy, models.engine, tmp_path_factory.mktemp(name))
        return results | {"exit codes": [one.child.process.returncode for one in children]}

    return {name: run_backend(name) for name in BACKENDS}


REMOTE = pytest.mark.parametrize("backend", ["process", "apart"])


@pytest.mark.slow
@REMOTE
@pytest.mark.parametrize("what", ["logprobs", "inside", "token_stats", "weights"])
def test_tensors_are_bit_equal_on_all_backends(results_of, backend, what):
    local = results_of["local"][what]
    remote = results_of[backend][what]
    assert local.keys() == remote.keys()
    assert len(local) > 0
    assert all(torch.equal(local[name], remote[name]) for name in local)


@pytest.mark.slow
@REMOTE
@pytest.mark.parametrize(
    "what",
    [
        "generated",
        "greedy",
        "after publish",
        "metrics",
        "columns",
        "files",
        "bytes",
        "refused",
        "failed",
    ],
)
def test_other_results_are_equal_on_all_backends(results_of, backend, what):
    assert results_of["local"][what] == results_of[backend][what]


@pytest.mark.slow
def test_update_changes_the_samples(results_of):
    local = results_of["local"]
    assert local["generated"] != local["after publish"]
    assert local["metrics"]["grad_norm"] > 0
    assert not torch.equal(local["after second update"], local["logprobs"]["logprobs"])


@pytest.mark.slow
def test_separate_engine_samples_from_old_weights_until_publish(results_of):
    assert results_of["local"]["shares_weights"]
    assert results_of["process"]["shares_weights"]
    assert not results_of["apart"]["shares_weights"]
    assert results_of["apart"]["before publish"] == results_of["local"]["generated"]
    assert results_of["process"]["before publish"] == results_of["local"]["after publish"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_load_restores_the_saved_state(results_of, backend):
    results = results_of[backend]
    assert not torch.equal(results["after second update"], results["after load"])
    assert torch.equal(results["after load"], results_of["local"]["after load"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_added_by_the_worker_do_not_reach_the_driver(results_of, backend):
    assert "loss_weight" not in results_of[backend]["columns"]


@pytest.mark.slow
@REMOTE
def test_child_process_survives_a_failing_call(results_of, backend):
    assert "advantages" in results_of[backend]["broken"]
    assert torch.isfinite(results_of[backend]["alive"]).all()


@pytest.mark.slow
@REMOTE
def test_child_processes_exit_when_the_driver_closes(results_of, backend):
    assert set(results_of[backend]["exit codes"]) == {0}


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
            RunError,
            match=r"policy process died during policy\.logprobs \(SIGKILL\)",
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
        RunError,
        match=r"engine process .* engine\.generate within 1 s \(cluster\.wait_s\)",
    ):
        RemoteEngine(process, True).generate([Request([1] * tokens, [1])], SAMPLING)
    assert process.child.process.poll() is not None


@pytest.mark.slow
def test_model_that_cannot_be_loaded_raises_config_error(tiny):
    config = config_of("grpo", tiny, "cluster.backend=process", "model.path=/no/such/folder")
    with (
        pytest.raises(ConfigError, match=r"model\.path=/no/such/folder"),
        open_models(config),
    ):
        pass


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("header too large"),
        ValueError("a bug"),
    ],
)
def test_only_unexpected_errors_print_a_traceback(capsys, error):
    def fails():
        raise error

    kind, message = attempt(fails)
    assert kind == "error"
    assert message == f"{type(error).__name__}: {error}"
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, ValueError)


@pytest.mark.slow
def test_engine_process_decodes_a_stream_between_calls(tiny):
    stream = ("rollout.stream=true", "rollout.staleness=1", "rollout.max_response_tokens=10")
    config = config_of("grpo", tiny, *BACKENDS["apart"], *OVERRIDES, *stream)
    process = ChildProcess(engine_config(config), "engine")
    try:
        engine = RemoteEngine(process, shares_weights=False)
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
