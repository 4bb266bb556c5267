"""Rollouts as a stream, without models: versions, the bound, dropped groups, resume, errors."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from fake_stream import FakeStreamingEngine
from tiny_runs import config_of

from postgrad.cluster.engine_pool import EnginePool
from postgrad.cluster.wire import decode, encode
from postgrad.config.schema import RolloutConfig
from postgrad.data.problem_queue import ProblemQueue
from postgrad.errors import RunError
from postgrad.methods import find_method
from postgrad.methods.ports import Ports
from postgrad.problem import Problem
from postgrad.rollout.continuous import ContinuousEngine
from postgrad.training import stream as stream_module
from postgrad.training.stream import GroupQueue, RolloutStream

SEPARATE = ("cluster.backend=process", "cluster.engines=1")
NUM_PROBLEMS = 64
BATCH = 4
SAMPLES = 2
SHORT = 2
LONG = 60  # tokens of every fourth problem, at one token per poll


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch):
    monkeypatch.setattr(stream_module, "BETWEEN_POLLS_S", 0.0005)


def length(prompt: list[int], seed: int) -> int:
    """Tokens of a row; the prompt is the number of its problem."""
    return LONG if prompt[0] % 4 == 0 else SHORT + seed % 3


class CheckedEngine(ContinuousEngine):
    """Fails if the weights change during a poll."""

    def __init__(self, row_length=length) -> None:
        self.is_busy = threading.Lock()
        super().__init__(FakeStreamingEngine(row_length), RolloutConfig(), poll_s=0.0)

    def publish(self, weights):
        assert self.is_busy.acquire(blocking=False), "the engine is being polled"
        super().publish(weights)
        self.is_busy.release()

    def poll(self, *arguments):
        with self.is_busy:
            return decode(encode(super().poll(*arguments)))


class FakePolicy:
    """Its weights are its version."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def weights(self):
        return {"version": torch.tensor(self.version)}


def make_stream(tiny, bound: int, steps: int, engine=None, version: int = 0) -> RolloutStream:
    config = config_of(
        "grpo",
        tiny,
        *SEPARATE,
        "rollout.stream=true",
        f"rollout.staleness={bound}",
        f"rollout.samples={SAMPLES}",
        "rollout.max_rows=256",
        f"training.problems_per_step={BATCH}",
        f"training.steps={steps}",
    )
    method = find_method("grpo")(config)
    method.check()
    prompts = SimpleNamespace(prompt=lambda problem: [int(problem.uid)])
    engine = engine or CheckedEngine()
    method.bind(Ports(FakePolicy(version), engine, None, prompts))  # type: ignore[arg-type]
    method.sync_weights()
    message = ({"role": "user", "content": "?"},)
    problems = [Problem(str(i), message, "", "math") for i in range(NUM_PROBLEMS)]
    return RolloutStream(config, method, ProblemQueue(problems, shuffle=False))


def run_steps(stream: RolloutStream, numbers) -> list:
    """Run the steps with an update that only counts; return (metrics, batch) of each."""
    done = []
    for number in numbers:
        step, batch = stream.next_step(number)
        publish = stream.method.learning_stages()[-1]
        assert publish.__name__ == "publish"
        stream.method.ports.policy.version = number  # type: ignore[attr-defined]
        with stream.pausing(publish, step):
            publish(batch, step)
        done.append((step.metrics, batch))
    return done


def trained_uids(done) -> list[str]:
    uids = []
    for _, batch in done:
        assert len(batch) == BATCH * SAMPLES
        uids += batch.rows["uid"][::SAMPLES]
    return uids


def largest_age(done) -> float:
    """The age of the oldest token, from the log-probs, which are minus the version."""
    ages = [number + batch.tokens["behavior_logprobs"] for number, (_, batch) in enumerate(done)]
    return max(float(age.max()) for age in ages)


@pytest.mark.parametrize("bound", [1, 3])
def test_tokens_have_their_versions_and_none_is_older_than_the_bound(tiny, bound):
    stream = make_stream(tiny, bound, steps=12)
    done = run_steps(stream, range(1, 13))
    stream.close()
    for number, (metrics, batch) in enumerate(done):
        versions = batch.tokens["version"]
        assert torch.equal(versions, -batch.tokens["behavior_logprobs"])
        age = number - versions
        assert metrics["staleness/mean"] == pytest.approx(float(age.mean()))
        assert metrics["staleness/max"] == float(age.max()) <= bound
        assert float(age.min()) >= 0.0
    assert any(metrics["staleness/mixed"] > 0 for metrics, _ in done), "weights changed in flight"
    assert sum(metrics["staleness/dropped"] for metrics, _ in done) > 0
    assert largest_age(done) == bound
    # Slow groups were overtaken and dropped, and yet every problem was trained on exactly once.
    assert Counter(trained_uids(done)) == Counter(str(i) for i in range(12 * BATCH))
    assert len(stream.queue) == 0, "nothing is sampled that no step trains on"
    assert stream.thread is not None and not stream.thread.is_alive()


def test_without_the_bound_older_tokens_are_trained_on(tiny, monkeypatch):
    """Shows that the test above can fail."""
    monkeypatch.setattr(GroupQueue, "drop_older", lambda self, version: [])
    stream = make_stream(tiny, bound=1, steps=12)
    assert largest_age(run_steps(stream, range(1, 13))) > 1
    stream.close()


def test_groups_that_finish_first_are_trained_on_first(tiny):
    stream = make_stream(tiny, bound=1, steps=4)
    first = trained_uids(run_steps(stream, [1]))
    stream.close()
    assert all(int(uid) % 4 for uid in first), "the long rows are not waited for"


def test_rows_beyond_the_engine_wait_outside_of_it(tiny):
    stream = make_stream(tiny, bound=3, steps=8)
    stream.max_rows = 3 * SAMPLES
    done = run_steps(stream, range(1, 9))
    stream.close()
    assert len(set(trained_uids(done))) == 8 * BATCH
    assert largest_age(done) <= 3


def test_resumed_run_trains_on_every_problem_once_and_keeps_complete_groups(tiny):
    # Long rows never end before the state is saved.
    engine = CheckedEngine(lambda prompt, seed: 10**6 if prompt[0] % 4 == 0 else SHORT)
    whole = make_stream(tiny, bound=2, steps=8, engine=engine)
    before = run_steps(whole, [1, 2, 3])
    with whole.changed:  # a moment when a complete group waits
        assert whole.changed.wait_for(lambda: whole.queue.ready, timeout=600)
    state = decode(encode(whole.state()))
    cursor = whole.problem_queue.state()
    whole.close()
    saved = {entry["number"]: entry for entry in state[1:]}
    complete = [entry for entry in saved.values() if entry["rows"]]
    assert complete and len(complete) < len(saved) == 2 * BATCH

    resumed = make_stream(tiny, bound=2, steps=8, version=3)
    resumed.problem_queue.load(cursor)
    resumed.load(state)
    kept = [group.rows for group in resumed.queue.ready]
    assert kept == [entry["rows"] for entry in complete]
    after = run_steps(resumed, range(4, 9))
    resumed.close()
    assert Counter(trained_uids(before + after)) == Counter(str(i) for i in range(8 * BATCH))
    assert resumed.next_number >= 8 * BATCH, "numbers, and with them seeds, are not used again"
    for number, (_, batch) in enumerate(after, start=3):
        assert torch.equal(batch.tokens["version"], -batch.tokens["behavior_logprobs"])
        assert float((number - batch.tokens["version"]).max()) <= 2


def test_an_error_of_the_engine_names_the_step(tiny):
    engine = CheckedEngine()
    stream = make_stream(tiny, bound=1, steps=4, engine=engine)
    run_steps(stream, [1])

    def fail(*_):
        raise RunError("the engine is gone")

    engine.poll = fail  # type: ignore[method-assign]
    with pytest.raises(RunError, match=r"step \d, stage rollout: the engine is gone"):
        run_steps(stream, [2, 3, 4])
    stream.close()


class FakeWorker:
    def __init__(self) -> None:
        self.engine = CheckedEngine()


class FakePool(EnginePool):
    """Engines in this process; at the 25th poll the first one is lost and restarted."""

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()
        self.workers = [FakeWorker() for _ in range(size)]  # type: ignore[misc]
        self.engines = self.workers
        self.owners = {}
        self.weights = {"version": torch.tensor(0)}
        self.num_polls = 0

    def _publish_to_all(self, port, weights):
        self.weights = weights
        for worker in self.workers:
            worker.engine.publish(weights)  # type: ignore[attr-defined]

    def _call_with_restarts(self, messages, call_name):
        self.num_polls += 1
        if self.num_polls == 25:
            self.workers[0].engine = CheckedEngine()  # type: ignore[attr-defined]
            self.workers[0].engine.publish(self.weights)  # type: ignore[attr-defined]
        results = {}
        for worker, message in messages.items():
            _, _, arguments = decode(message)
            results[worker] = encode(worker.engine.poll(*arguments))
        return results


def test_several_engines_share_the_groups_and_a_restarted_one_samples_its_groups_again(tiny):
    from postgrad.cluster.ports import RemotePort

    pool = FakePool(2)
    engine = RemotePort(pool, "engine", "engine")
    stream = make_stream(tiny, bound=3, steps=8, engine=engine)
    stream.max_rows = 2 * SAMPLES * BATCH
    done = run_steps(stream, range(1, 9))
    stream.close()
    assert pool.num_polls > 25
    assert Counter(trained_uids(done)) == Counter(str(i) for i in range(8 * BATCH))
    for _, batch in done:
        assert torch.equal(batch.tokens["version"], -batch.tokens["behavior_logprobs"])
