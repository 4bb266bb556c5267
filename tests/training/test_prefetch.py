"""Rollouts ahead, without models: who samples what with which weights, and that a resumed run does the same."""

import time
from types import SimpleNamespace

import pytest
from world import config_of

from postgrad.errors import RunError
from postgrad.training.prefetch import RolloutPrefetcher


class Told:
    """A method that writes down what happens; its `weights` are the number of updates the engine has."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.weights = self.trained = self.drawn = 0
        self.broken = 0

    def stages(self):
        return [self.draw, self.compose, self.sample, self.score, self.update, self.publish]

    def draw(self, _, step):
        self.drawn += 1
        return self.drawn

    def compose(self, problem, step):
        return problem

    def sample(self, problem, step):
        time.sleep(0.01)
        if step.number == self.broken:
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


def steps(ahead: RolloutPrefetcher, numbers) -> list[float]:
    out = []
    for number in numbers:
        step, work, stages = ahead.next_step(number)
        for stage in stages:
            work = stage(work, step)
        out.append(step.metrics.get("rollout/staleness", 0.0))
    return out


def ahead_of(tiny, depth: int, last: int = 5) -> tuple[Told, RolloutPrefetcher]:
    config = config_of("grpo", tiny, f"rollout.staleness={depth}", f"training.steps={last}")
    method = Told()
    return method, RolloutPrefetcher(config, method, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_step_trains_on_its_own_problems_by_weights_of_the_right_age(tiny, depth):
    method, ahead = ahead_of(tiny, depth)
    assert steps(ahead, range(1, 6)) == [float(min(depth, k)) for k in range(5)]
    trained = [event for event in method.events if event.startswith("train")]
    assert trained == [f"train {k} on problem {k} by {max(0, k - 1 - depth)}" for k in range(1, 6)]
    assert len(method.events) == 10 and method.drawn == 5, (
        "nothing is sampled that no step trains on"
    )
    assert ahead.state() == []


def test_sampling_runs_while_the_step_before_is_trained(tiny):
    _, ahead = ahead_of(tiny, 1)
    _, _, stages = ahead.next_step(1)
    assert ahead.in_flight is not None and ahead.in_flight.step.number == 2
    assert [stage.__name__ for stage in stages] == ["score", "update", "rollout", "publish"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_goes_on_with_what_was_sampled_ahead(tiny, depth):
    whole, ahead = ahead_of(tiny, depth)
    steps(ahead, range(1, 6))
    first, before = ahead_of(tiny, depth)
    steps(before, [1, 2])
    second, after = ahead_of(tiny, depth)
    second.drawn, second.weights = first.drawn, first.weights
    after.load(before.state())
    steps(after, [3, 4, 5])
    trained = lambda *methods: [e for m in methods for e in m.events if e.startswith("train")]  # noqa: E731
    assert trained(first, second) == trained(whole)


def test_a_failure_in_the_thread_is_told_with_its_own_step_and_stage(tiny):
    method, ahead = ahead_of(tiny, 1)
    method.broken = 2
    with pytest.raises(RunError, match=r"step 2, stage sample: the engine is gone"):
        steps(ahead, [1])
