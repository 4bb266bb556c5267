"""One contract, three places: this process, a child process, and an engine in a process of its own. The numbers are the same."""

import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from world import config_of, random_batch

from postgrad.cluster import child_process as process
from postgrad.cluster import place
from postgrad.cluster.child_process import Child, RemoteEngine, receive
from postgrad.cluster.host import build_host
from postgrad.cluster.worker import attempt
from postgrad.errors import ConfigError, RunError
from postgrad.model.views import after
from postgrad.rollout.engine import Request, Sampling, trajectory_seed
from postgrad.types import Batch

PLACES = {
    "local": [],
    "process": ["cluster.backend=process"],
    "apart": ["cluster.backend=process", "cluster.engine_apart=true"],
}
REQUESTS = [
    Request(prompt, [trajectory_seed(3, 1, str(i), j) for j in range(3)])
    for i, prompt in enumerate([[1, 2, 3], [4, 15], [9, 8, 7, 6]])
]
SAMPLING = Sampling(1.0, 10)
WORDS = ("optimizer.lr=2e-2", "training.updates_per_step=2", "cluster.wait_s=60")


def provenance(policy, engine, folder) -> dict:
    """Everything the ports can do, in an order in which each step sees what the ones before did."""
    told = {"shares_weights": engine.shares_weights}
    batch = random_batch(31)
    told["logprobs"] = policy.logprobs(batch)
    told["inside"] = policy.logprobs(batch, after(1))
    told["generated"] = engine.generate(REQUESTS, SAMPLING)
    told["greedy"] = engine.generate(REQUESTS, Sampling(0.0, 10))
    given = random_batch(32)
    told["metrics"] = {
        name: value for name, value in policy.update(given, 1).items() if name != "memory_gib"
    }
    told["columns"] = set(given.tokens)
    told["token_stats"] = {
        name: column.nan_to_num(-1.0) for name, column in policy.token_stats().items()
    }  # NaN equals nothing
    told["before publish"] = engine.generate(REQUESTS, SAMPLING)
    if not engine.shares_weights:
        engine.publish(policy.weights())
    told["after publish"] = engine.generate(REQUESTS, SAMPLING)
    policy.save(str(folder))
    told["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    told["bytes"] = (
        (folder / "policy" / "model.safetensors").read_bytes(),
        (folder / "optimizer.safetensors").read_bytes(),
    )
    policy.update(random_batch(33), 2)
    told["further"] = policy.logprobs(batch)["logprobs"]
    policy.load(str(folder))
    told["back"] = policy.logprobs(batch)["logprobs"]
    policy.update(random_batch(33), 2)
    told["weights"] = policy.weights()
    try:
        policy.logprobs(batch, after(99))
    except ConfigError as error:
        told["refused"] = str(error)
    try:
        engine.generate([Request([1] * 600, [0])], SAMPLING)
    except RunError as error:
        told["failed"] = str(error)
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
        told["broken"] = str(error)
    told["alive"] = policy.logprobs(batch)["logprobs"]
    return told


@pytest.fixture(scope="module")
def stories(tiny, tmp_path_factory) -> dict:
    configs = {
        name: config_of("grpo", tiny, *WORDS, *overrides) for name, overrides in PLACES.items()
    }

    def tell(name: str) -> dict:
        with place(configs[name]) as placed:
            children = {
                port.child for port in (placed.policy, placed.engine) if hasattr(port, "child")
            }
            assert len(children) == {"local": 0, "process": 1, "apart": 2}[name]
            told = provenance(placed.policy, placed.engine, tmp_path_factory.mktemp(name))
        return told | {"exit codes": [child.process.returncode for child in children]}

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:  # children take seconds to start: two places at a time
        remote = {name: pool.submit(tell, name) for name in ("process", "apart")}
        told = {name: future.result() for name, future in remote.items()}
    return {"local": tell("local")} | told


REMOTE = pytest.mark.parametrize("where", ["process", "apart"])


@pytest.mark.slow
@REMOTE
@pytest.mark.parametrize("what", ["logprobs", "inside", "token_stats", "weights"])
def test_tensors_are_bit_equal(stories, where, what):
    mine, there = stories["local"][what], stories[where][what]
    assert mine.keys() == there.keys() and len(mine) > 0
    assert all(torch.equal(mine[name], there[name]) for name in mine)


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
def test_everything_else_is_equal_too(stories, where, what):
    assert stories["local"][what] == stories[where][what]


def test_the_update_shows_in_what_is_sampled(stories):
    local = stories["local"]
    assert local["generated"] != local["after publish"]
    assert local["metrics"]["grad_norm"] > 0 and not torch.equal(
        local["further"], local["logprobs"]["logprobs"]
    )


def test_an_engine_apart_samples_from_the_old_weights_until_they_are_published(stories):
    assert (
        stories["local"]["shares_weights"]
        and stories["process"]["shares_weights"]
        and not stories["apart"]["shares_weights"]
    )
    assert stories["apart"]["before publish"] == stories["local"]["generated"]
    assert stories["process"]["before publish"] == stories["local"]["after publish"]


@pytest.mark.parametrize("where", PLACES)
def test_load_goes_back_and_the_next_update_repeats(stories, where):
    told = stories[where]
    assert not torch.equal(told["further"], told["back"])
    assert torch.equal(told["back"], stories["local"]["back"])


@pytest.mark.parametrize("where", PLACES)
def test_columns_set_beside_the_model_do_not_reach_the_driver(stories, where):
    assert "loss_weight" not in stories[where]["columns"]


@REMOTE
def test_a_failing_call_names_its_error_and_the_child_lives_on(stories, where):
    assert "advantages" in stories[where]["broken"]
    assert torch.isfinite(stories[where]["alive"]).all()


@REMOTE
def test_children_end_by_themselves_when_the_driver_closes(stories, where):
    assert set(stories[where]["exit codes"]) == {0}


def test_a_host_computes_on_the_configured_threads(tiny):
    """The same bits in every place need the same threads in every place."""
    before = torch.get_num_threads()
    try:
        build_host(config_of("grpo", tiny, f"model.threads={before + 1}"))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


# ---- children that die or hang


@pytest.mark.slow
def test_a_child_writes_no_file_and_leaves_signals_to_the_driver(tiny, tmp_path, monkeypatch):
    """A terminal, Slurm and systemd send them to every process of a run: the driver then ends its step and saves, and needs the child."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = set()

    def interrupted(connection, limit_s):
        seen.update(tmp_path.iterdir())
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if b"postgrad.cluster.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGINT)
                os.kill(int(pid), signal.SIGTERM)
        return receive(connection, limit_s)

    monkeypatch.setattr(process, "receive", interrupted)
    with place(config_of("grpo", tiny, "cluster.backend=process", "cluster.wait_s=60")) as placed:
        assert placed.policy.logprobs(random_batch(1))["logprobs"].isfinite().all()
    assert not seen and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_child_is_noticed_at_once_and_named(tiny):
    with place(config_of("grpo", tiny, "cluster.backend=process", "cluster.wait_s=60")) as placed:
        child = placed.policy.child
        child.process.send_signal(signal.SIGSTOP)  # it is at work on our call ...
        threading.Timer(
            0.5, lambda: os.kill(child.process.pid, signal.SIGKILL)
        ).start()  # ... when it is killed
        start = time.monotonic()
        with pytest.raises(
            RunError,
            match=r"the policy process died during policy\.logprobs \(exit code -9\); the same command continues",
        ):
            placed.policy.logprobs(random_batch(1))
        assert time.monotonic() - start < 60, "before cluster.wait_s"
        with pytest.raises(RunError, match=r"died during engine\.generate"):
            placed.engine.generate(REQUESTS, SAMPLING)


@contextmanager
def silent_child(wait_s: float, command: list[str]):
    """A Child whose process never answers: cheaper than a model that is stopped."""
    ours, theirs = socket.socketpair()
    child = object.__new__(Child)
    child.label, child.wait_s, child.socket, child.lock = "engine", wait_s, ours, threading.RLock()
    child.process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL)
    theirs.close()
    ours.settimeout(300.0)  # what the start left behind
    try:
        yield child
    finally:
        child.process.kill()
        child.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "tokens"),
    [
        (["cat"], 1),
        (["sleep", "600"], 300_000),
    ],  # one that reads and says nothing, one that does not even read
    ids=["silent", "deaf to a message larger than the socket's buffer"],
)
def test_a_hung_child_is_named_with_the_time_limit_and_stopped(command, tokens):
    with silent_child(0.5, command) as child:
        with pytest.raises(
            RunError,
            match=r"the engine process did not answer engine\.generate within 0\.5 s \(cluster\.wait_s\)",
        ):
            RemoteEngine(child, True).generate([Request([1] * tokens, [1])], SAMPLING)
        assert child.process.poll() is not None, "a hung child must not stay behind"


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_the_users_error_in_a_child_too(tiny):
    config = config_of("grpo", tiny, "cluster.backend=process", "model.path=/no/such/folder")
    with (
        pytest.raises(ConfigError, match=r"model\.path=/no/such/folder: no such folder"),
        place(config),
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
def test_what_the_world_did_needs_no_traceback_and_a_bug_does(capsys, error):
    def fails():
        raise error

    kind, overrides = attempt(fails)
    assert kind == "error" and overrides == f"{type(error).__name__}: {error}"
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, ValueError)
