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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from postgrad.config.schema import Config
from postgrad.data.feed import Feed
from postgrad.methods.method import Method
from postgrad.methods.step import Stage, Step
from postgrad.training.log import is_timing
from postgrad.training.stage_checks import run_stage
from postgrad.types import Batch

Rollout = tuple[Step, Batch]


class RolloutPrefetcher:
    """Samples the rollouts of a step when it begins, or `staleness` steps before."""

    def __init__(self, config: Config, method: Method, feed: Feed) -> None:
        self.method = method
        self.feed = feed
        self.staleness = config.rollout.staleness
        self.num_steps = config.training.steps
        self.ready: deque[Rollout] = deque()
        self.in_flight: InFlight | None = None

    def next_step(self, number: int) -> Rollout:
        """Return the step and its rollouts: sampled now, or earlier."""
        if not self.staleness:
            step = Step(number, self.feed)
            work: Any = None
            for stage in self.method.sampling_stages():
                work = run_stage(stage, work, step, self.method.ports.policy)
            return step, work
        self._fill(number)
        step, batch = self.ready.popleft()
        weights_step = step.metrics.pop("rollout/weights")
        step.metrics["rollout/staleness"] = float(number - 1) - weights_step
        if number + self.staleness <= self.num_steps:
            self._start(number + self.staleness, number)
        return step, batch

    @contextmanager
    def pausing(self, stage: Stage, step: Step) -> Iterator[None]:
        """Wait for the sampling before `publish`, so that the engine's weights do not change."""
        if self.staleness and stage == self.method.publish:
            started = time.perf_counter()
            self._join()
            step.metrics["wait/rollout_s"] = time.perf_counter() - started
        yield

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
        *before, sample = self.method.sampling_stages()
        for stage in before:
            work = run_stage(stage, work, step, self.method.ports.policy)
        self.in_flight = InFlight(step, sample, work, self.method.ports.policy)

    def _join(self) -> None:
        if self.in_flight is not None:
            self.ready.append(self.in_flight.join())
            self.in_flight = None


class InFlight:
    """One step that a daemon thread samples."""

    def __init__(self, step: Step, sample: Stage, work: Any, policy: Any) -> None:
        self.step = step
        self.sample = sample
        self.work = work
        self.policy = policy
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.work = run_stage(self.sample, self.work, self.step, self.policy)
        except BaseException as error:
            self.error = error

    def join(self) -> Rollout:
        """Wait for the thread and return its rollout; raise its error."""
        self.thread.join()  # no time limit here: the engine's calls have their own
        if self.error is not None:
            raise self.error
        return self.step, self.work
