"""Rollouts that run ahead: while a step is scored and trained, the engine samples for a later one with the weights it has.

With rollout.staleness=n, step k trains on what was sampled during step k-n, by the weights of that time; the recorded log-probs and the
method's correction account for the difference. Problems are drawn and groups composed before a step's own stages run, and weights are
published only when nothing is being sampled, so the result depends on no clock, and a checkpoint holds what was sampled ahead.
"""

import threading
import time
from collections import deque
from typing import Any

from postgrad.config.schema import Config
from postgrad.data.feed import Feed
from postgrad.methods.base import Method, Stage, Step
from postgrad.training.log import timed

Rollout = tuple[Step, Any]  # a step on its way, and its batch after sampling


class RolloutPrefetcher:
    """Gives out steps with the stages that are left of them: all of them, or those after sampling."""

    def __init__(self, config: Config, method: Method, feed: Feed) -> None:
        self.method, self.feed = method, feed
        self.depth, self.last = config.rollout.staleness, config.training.steps
        self.ready: deque[Rollout] = deque()
        self.in_flight: InFlight | None = None

    def take(self, number: int) -> tuple[Step, Any, list[Stage]]:
        """(step, its work so far, the stages left)."""
        stages = self.method.stages()
        if not self.depth:
            return Step(number, self.feed), None, stages
        while not self.ready or self.ready[-1][0].number < min(
            number + self.depth - 1, self.last
        ):  # only at the start of a run
            self._send(self.ready[-1][0].number + 1 if self.ready else number, number)
            self._land()
        step, batch = self.ready.popleft()
        step.metrics["rollout/staleness"] = float(number - 1) - step.metrics.pop("rollout/weights")
        if number + self.depth <= self.last:
            self._send(number + self.depth, number)
        left, publish = stages[stages.index(self.method.sample) + 1 :], self.method.publish
        left.insert(left.index(publish) if publish in left else len(left), self.rollout)
        return step, batch, left

    def rollout(self, batch: Any, step: Step) -> Any:
        """A stage: wait until what is being sampled is there, before the engine gets other weights."""
        began = time.perf_counter()
        self._land()
        step.metrics["wait/rollout_s"] = time.perf_counter() - began
        return batch

    def state(self) -> list[Any]:
        """What was sampled and not trained on yet; goes into the checkpoint."""
        return [
            {"number": step.number, "metrics": step.metrics, "batch": batch}
            for step, batch in self.ready
        ]

    def load(self, state: list[Any]) -> None:
        self.ready = deque(
            (Step(one["number"], self.feed, one["metrics"]), one["batch"]) for one in state
        )

    def _send(self, number: int, now: int) -> None:
        """Compose a step here, and let a thread sample it."""
        step, work = Step(number, self.feed), None
        step.metrics["rollout/weights"] = float(now - 1)  # the step whose update the engine has
        stages = self.method.stages()
        at = stages.index(self.method.sample)
        for stage in stages[:at]:
            with timed(step, stage.__name__):
                work = stage(work, step)
        self.in_flight = InFlight(step, stages[at], work)

    def _land(self) -> None:
        if self.in_flight is not None:
            self.ready.append(self.in_flight.join())
            self.in_flight = None


class InFlight:
    """One step being sampled in a thread of its own, which does not keep a stopping process alive."""

    def __init__(self, step: Step, sample: Stage, work: Any) -> None:
        self.step, self.sample, self.work = step, sample, work
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with timed(self.step, self.sample.__name__):
                self.work = self.sample(self.work, self.step)
        except BaseException as error:
            self.error = error

    def join(self) -> Rollout:
        self.thread.join()  # the engine's calls have time limits of their own
        if self.error is not None:
            raise self.error
        return self.step, self.work
