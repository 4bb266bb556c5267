"""Rollouts ahead of training: while a step is scored and trained, the engine samples a later one.

With rollout.staleness=n, step k trains on rollouts sampled during step k-n, with the weights of
that time. The recorded log-probs and the method's correction account for the difference.
The result does not depend on timing: problems are drawn and groups composed before a step's own
stages run, weights are published only while nothing is sampled, and a checkpoint holds the
rollouts sampled ahead.
"""

import threading
import time
from collections import deque
from typing import Any

from postgrad.config.schema import Config
from postgrad.data.feed import Feed
from postgrad.methods.base import Method, Stage, Step
from postgrad.training.log import is_timing, returned, timed

Rollout = tuple[Step, Any]  # a step and its batch after sampling


class RolloutPrefetcher:
    """Returns each step with the stages that remain: all of them, or those after sampling."""

    def __init__(self, config: Config, method: Method, feed: Feed) -> None:
        self.method = method
        self.feed = feed
        self.staleness = config.rollout.staleness
        self.num_steps = config.training.steps
        self.ready: deque[Rollout] = deque()
        self.in_flight: InFlight | None = None

    def next_step(self, number: int) -> tuple[Step, Any, list[Stage]]:
        """Return (step, its work so far, the stages that remain)."""
        stages = self.method.stages()
        if not self.staleness:
            return Step(number, self.feed), None, stages
        self._fill(number)
        step, batch = self.ready.popleft()
        weights_step = step.metrics.pop("rollout/weights")
        step.metrics["rollout/staleness"] = float(number - 1) - weights_step
        if number + self.staleness <= self.num_steps:
            self._start(number + self.staleness, number)
        remaining = stages[stages.index(self.method.sample) + 1 :]
        publish = self.method.publish
        at = remaining.index(publish) if publish in remaining else len(remaining)
        remaining.insert(at, self.rollout)
        return step, batch, remaining

    def rollout(self, batch: Any, step: Step) -> Any:
        """A stage before publish: wait for the sampling, so the engine's weights do not change."""
        started = time.perf_counter()
        self._join()
        step.metrics["wait/rollout_s"] = time.perf_counter() - started
        return batch

    def state(self) -> list[Any]:
        """Return the rollouts that no step trained on yet, for the checkpoint.

        Without the measured times: the checkpoint of a resumed run has the same bytes.
        """
        state = []
        for step, batch in self.ready:
            metrics = {name: value for name, value in step.metrics.items() if not is_timing(name)}
            state.append({"number": step.number, "metrics": metrics, "batch": batch})
        return state

    def load(self, state: list[Any]) -> None:
        """Take the rollouts of a checkpoint."""
        self.ready = deque()
        for saved in state:
            step = Step(saved["number"], self.feed, saved["metrics"])
            self.ready.append((step, saved["batch"]))

    def close(self) -> None:
        """Do nothing: a thread that still samples ends with the process."""

    def _fill(self, number: int) -> None:
        """Sample until step `number` and those before number + staleness are ready.

        Only the first step of a run has something to do here.
        """
        last = min(number + self.staleness - 1, self.num_steps)
        while not self.ready or self.ready[-1][0].number < last:
            following = self.ready[-1][0].number + 1 if self.ready else number
            self._start(following, number)
            self._join()

    def _start(self, number: int, current: int) -> None:
        """Compose step `number`, then sample it in a thread; `current` is the step in training."""
        step = Step(number, self.feed)
        step.metrics["rollout/weights"] = float(current - 1)  # the engine has this step's update
        work = None
        stages = self.method.stages()
        at = stages.index(self.method.sample)
        for stage in stages[:at]:
            with timed(step, stage.__name__):
                work = returned(stage(work, step), stage)
        self.in_flight = InFlight(step, stages[at], work)

    def _join(self) -> None:
        if self.in_flight is not None:
            self.ready.append(self.in_flight.join())
            self.in_flight = None


class InFlight:
    """One step that a daemon thread samples."""

    def __init__(self, step: Step, sample: Stage, work: Any) -> None:
        self.step = step
        self.sample = sample
        self.work = work
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
        """Wait for the thread and return its rollout; raise its error."""
        self.thread.join()  # no time limit here: the engine's calls have their own
        if self.error is not None:
            raise self.error
        return self.step, self.work
