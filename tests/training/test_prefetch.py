"""Rollouts ahead, without models: which weights sample which step, also after a resume."""

import time
from types import SimpleNamespace

import pytest
from tiny_runs import config_of

from postgrad.cluster.wire import decode, encode
from postgrad.errors import RunError
from postgrad.training.rollouts import RolloutPrefetcher


class RecordingMethod:
    """Records its stages; `weights` is the number of updates that the engine has."""

    ports = SimpleNamespace(policy=None)

    def __init__(self) -> None:
        self.events: list[str] = []
        self.weights = 0
        self.trained = 0  # the last step with an update
        self.drawn = 0  # problems
        self.failing_step = 0

    def sampling_stages(self):
        return [self.draw, self.compose, self.sample]

    def learning_stages(self):
        return [self.score, self.update, self.publish]

    def draw(self, _, step):
        self.drawn += 1
        return self.drawn

    def compose(self, problem, step):
        return problem

    def sample(self, problem, step):
        time.sleep(0.01)
        if step.number == self.failing_step:
            raise RunError("the engine is gone")
        self.events.append(f"sample {step.number} with {self.weights}")
        return [problem, self.weights]

    def score(self, batch, step):
        return batch

    def update(self, batch, step):
        self.trained = step.number
        self.events.append(f"train {step.number} on problem {batch[0]} by {batch[1]}")
        return batch

    def publish(self, batch, step):
        self.weights = self.trained
        return batch


def run_steps(prefetcher: RolloutPrefetcher, numbers) -> list[float]:
    """Run the steps and return the staleness of each."""
    staleness = []
    for number in numbers:
        step, work = prefetcher.next_step(number)
        for stage in prefetcher.method.learning_stages():
            with prefetcher.pausing(stage, step):
                work = stage(work, step)
        staleness.append(step.metrics.get("rollout/staleness", 0.0))
    return staleness


def make_prefetcher(tiny, depth: int, last: int = 5) -> tuple[RecordingMethod, RolloutPrefetcher]:
    config = config_of("grpo", tiny, f"rollout.staleness={depth}", f"training.steps={last}")
    method = RecordingMethod()
    return method, RolloutPrefetcher(config, method, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_step_trains_on_its_own_problems_with_weights_of_the_right_age(tiny, depth):
    method, prefetcher = make_prefetcher(tiny, depth)
    assert run_steps(prefetcher, range(1, 6)) == [float(min(depth, k)) for k in range(5)]
    assert trained(method) == [
        f"train {k} on problem {k} by {max(0, k - 1 - depth)}" for k in range(1, 6)
    ]
    assert len(method.events) == 10 and method.drawn == 5, (
        "nothing is sampled that no step trains on"
    )
    assert prefetcher.state() == []


def test_next_step_is_sampled_while_one_is_trained(tiny):
    _, prefetcher = make_prefetcher(tiny, 1)
    prefetcher.next_step(1)
    assert prefetcher.in_flight is not None and prefetcher.in_flight[0].number == 2


def trained(method: RecordingMethod) -> list[str]:
    """Return the updates that the method recorded."""
    return [event for event in method.events if event.startswith("train")]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_resumed_run_uses_the_rollouts_of_the_checkpoint(tiny, depth):
    """They are written with the same bytes, too."""
    uninterrupted, prefetcher = make_prefetcher(tiny, depth)
    first, before = make_prefetcher(tiny, depth)
    second, after = make_prefetcher(tiny, depth)
    run_steps(prefetcher, [1, 2, 3])
    run_steps(before, [1, 2])
    second.drawn, second.weights = first.drawn, first.weights
    after.load(decode(encode(before.state())))
    run_steps(after, [3])
    assert encode(after.state()) == encode(prefetcher.state())
    for one in (prefetcher, after):
        run_steps(one, [4, 5])
    assert trained(first) + trained(second) == trained(uninterrupted)


def test_error_in_the_thread_names_its_step_and_stage(tiny):
    method, prefetcher = make_prefetcher(tiny, 1)
    method.failing_step = 2
    with pytest.raises(RunError, match=r"step 2, stage sample: the engine is gone"):
        run_steps(prefetcher, [1])
