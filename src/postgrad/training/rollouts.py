"""Where a step's rollouts come from: sampled in the step, ahead of it, or by a stream.

With rollout.staleness=n, step k trains on rollouts sampled during step k-n, with the weights of
that time. The recorded log-probs and the method's correction account for the difference.
The result does not depend on timing: problems are drawn and groups composed before a step's own
stages run, weights are published only while nothing is sampled, and a checkpoint holds the
rollouts sampled ahead. A stream (stream.py) is not repeatable.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from postgrad.config.schema import Config
from postgrad.data.problem_queue import ProblemQueue
from postgrad.methods.method import Method
from postgrad.methods.step import Stage, Step
from postgrad.training.log import is_timing
from postgrad.training.stages import run_stage
from postgrad.types import Batch

if TYPE_CHECKING:
    from postgrad.training.stream import RolloutStream


def make_rollouts(
    config: Config, method: Method, problem_queue: ProblemQueue
) -> "RolloutPrefetcher | RolloutStream":
    """Return the rollouts of a run: a stream with rollout.stream, otherwise step by step."""
    if config.rollout.stream:
        from postgrad.training.stream import RolloutStream

        return RolloutStream(config, method, problem_queue)
    return RolloutPrefetcher(config, method, problem_queue)


class RolloutPrefetcher:
    """Samples the rollouts of a step when it begins, or `staleness` steps before."""

    def __init__(self, config: Config, method: Method, problem_queue: ProblemQueue) -> None:
        self.method = method
        self.problem_queue = problem_queue
        self.staleness = config.rollout.staleness
        self.num_steps = config.training.steps
        self.ready: deque[tuple[Step, Batch]] = deque()
        self.in_flight: tuple[Step, Future[Batch]] | None = None

    def next_step(self, number: int) -> tuple[Step, Batch]:
        """Return the step and its rollouts: sampled now, or earlier."""
        if not self.staleness:
            step = Step(number, self.problem_queue)
            return step, self._run(self.method.sampling_stages(), None, step)
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
            step = Step(saved["number"], self.problem_queue, saved["metrics"])
            self.ready.append((step, saved["batch"]))

    def close(self) -> None:
        """Do nothing: a thread that still samples ends with the process."""

    def _run(self, stages: list[Stage], work: Any, step: Step) -> Any:
        for stage in stages:
            work = run_stage(stage, work, step, self.method.ports.policy)
        return work

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
        step = Step(number, self.problem_queue)
        step.metrics["rollout/weights"] = float(current - 1)  # the engine has this step's update
        *before, sample = self.method.sampling_stages()
        groups = self._run(before, None, step)
        self.in_flight = step, in_thread(lambda: self._run([sample], groups, step))

    def _join(self) -> None:
        """Wait for the thread, without a time limit: the engine's calls have theirs."""
        if self.in_flight is not None:
            step, batch = self.in_flight
            self.ready.append((step, batch.result()))
            self.in_flight = None


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Run a function in a thread that ends with the process; return its future result."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
