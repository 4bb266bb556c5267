"""Rollouts as a stream: the engine samples without pauses, and weights change meanwhile.

Version k of the weights is the policy after step k. Step k + 1 trains on the groups that were
completed first. Groups that are not complete go on with the new weights; each token records the
version that sampled it. A group with a token that is more than rollout.staleness versions old is
dropped, and its problem is sampled again.

As in AReaL, the number of groups ahead is bounded: at most rollout.staleness + 1 steps' worth are
waiting, being sampled or complete. So groups are dropped only if others overtake them.

Only the driver's thread draws problems and takes groups; a second thread polls the engine. What a
step trains on depends on timing: unlike the rest of Postgrad, a stream is not repeatable.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from postgrad.config.schema import Config
from postgrad.data.problem_queue import ProblemQueue
from postgrad.methods.method import Method
from postgrad.methods.step import Group, Stage, Step
from postgrad.rollout.engine import Completion, Request, trajectory_seed
from postgrad.training.stages import timed
from postgrad.types import Batch

BETWEEN_POLLS_S = 0.001  # so that another call to the engine, such as a validation, gets a turn
CLOSE_S = 5.0


@dataclass(eq=False)
class StreamGroup:
    """One problem's group.

    Attributes:
        number: counts the groups of a run; seeds are made from it.
        started: the version of the weights when the engine got the request.
        completions: the finished rows, by index.
    """

    number: int
    plan: Group
    request: Request
    started: int = 0
    completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.number)

    @property
    def is_complete(self) -> bool:
        return len(self.completions) == len(self.request.seeds)

    @property
    def rows(self) -> list[Completion]:
        """The completions in the order of the seeds."""
        return [self.completions[index] for index in sorted(self.completions)]

    @property
    def oldest(self) -> int:
        """The version of the weights that sampled the oldest token."""
        if not self.is_complete:
            return self.started
        versions = [version for row in self.rows for version in row.versions or ()]
        return min(versions, default=self.started)


class GroupQueue:
    """Groups in the order in which they were drawn, until a step takes them."""

    def __init__(self) -> None:
        self.waiting: deque[StreamGroup] = deque()
        self.running: dict[str, StreamGroup] = {}  # by name
        self.ready: deque[StreamGroup] = deque()  # in the order in which they were completed

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.ready)

    def start(self, max_rows: int, version: int) -> dict[str, Request]:
        """Start waiting groups while fewer than `max_rows` rows run; return their requests.

        Further groups wait here: rows that wait in the engine would count as older than they are.
        """
        requests: dict[str, Request] = {}
        num_rows = sum(len(group.request.seeds) for group in self.running.values())
        while self.waiting:
            group = self.waiting[0]
            num_rows += len(group.request.seeds)
            if self.running and num_rows > max_rows:
                break
            self.waiting.popleft()
            group.started = version
            group.completions.clear()
            self.running[group.name] = group
            requests[group.name] = group.request
        return requests

    def collect(self, result: dict[str, list[Any]]) -> None:
        """Take the result of a poll: complete groups are ready, missing ones start again.

        Rows of groups that were dropped during the poll are ignored.
        """
        for name, index, completion in result["finished"]:
            if name not in self.running:
                continue
            group = self.running[name]
            group.completions[index] = completion
            if group.is_complete:
                self.ready.append(self.running.pop(name))
        for name in reversed(result["missing"]):
            if name in self.running:
                self.waiting.appendleft(self.running.pop(name))

    def drop_older(self, version: int) -> list[StreamGroup]:
        """Remove and return the groups with a token that weights before `version` sampled."""
        dropped = [group for group in self.running.values() if group.oldest < version]
        for group in dropped:
            del self.running[group.name]
        dropped += [group for group in self.ready if group.oldest < version]
        self.ready = deque(group for group in self.ready if group.oldest >= version)
        return dropped

    def take(self, count: int) -> list[StreamGroup]:
        """Remove and return the groups that were completed first."""
        return [self.ready.popleft() for _ in range(count)]


class RolloutStream:
    """Gives each step the groups that were completed first."""

    def __init__(self, config: Config, method: Method, problem_queue: ProblemQueue) -> None:
        self.config = config
        self.method = method
        self.problem_queue = problem_queue
        self.staleness = config.rollout.staleness
        self.groups_per_step = config.training.problems_per_step
        self.max_rows = config.rollout.max_rows * max(1, config.cluster.engines)
        self.next_number = 0
        self.thread: threading.Thread | None = None
        # Shared with the thread; `changed` guards them.
        self.changed = threading.Condition()
        self.queue = GroupQueue()
        self.version = 0  # of the engine's weights
        self.is_polling = False
        self.is_paused = False
        self.is_closed = False
        self.error: BaseException | None = None

    def next_step(self, number: int) -> tuple[Step, Batch]:
        """Return the step and the batch of its groups."""
        step = Step(number, self.problem_queue)
        if self.thread is None:
            self.version = number - 1
        step.metrics["staleness/dropped"] = float(self._drop_old(number))
        self._draw(step)
        with timed(step, "rollout"):
            groups = self._wait_for_groups()
        step.metrics["wait/rollout_s"] = step.metrics["stage/rollout_s"]
        batch = self.method.assemble([g.plan for g in groups], [g.rows for g in groups])
        step.metrics |= staleness_metrics(batch, number - 1)
        return step, batch

    @contextmanager
    def pausing(self, stage: Stage, step: Step) -> Iterator[None]:
        """Do not poll during `publish`; unfinished rows go on with the new weights."""
        if stage != self.method.publish:
            yield
            return
        with self._paused():
            yield
            self.version = step.number

    def state(self) -> list[Any]:
        """Return the complete groups, and the problems of the others, which start again."""
        with self.changed:
            unfinished = [*self.queue.running.values(), *self.queue.waiting]
            groups = [*self.queue.ready, *sorted(unfinished, key=lambda group: group.number)]
            state: list[Any] = [{"next_number": self.next_number}]
            for group in groups:
                rows = group.rows if group.is_complete else []
                state.append({"number": group.number, "uid": group.plan.problem.uid, "rows": rows})
        return state

    def load(self, state: list[Any]) -> None:
        """Take the groups of a checkpoint."""
        if not state:
            return
        self.next_number = state[0]["next_number"]
        for saved in state[1:]:
            problem = self.problem_queue.find(saved["uid"])
            (plan,) = self.method.compose([problem], Step(0, self.problem_queue))
            group = self._make_group(plan, saved["number"])
            group.completions = dict(enumerate(saved["rows"]))
            (self.queue.ready if group.is_complete else self.queue.waiting).append(group)

    def close(self) -> None:
        """Stop the thread after its poll."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join(CLOSE_S)

    # ---- the driver's thread

    def _drop_old(self, number: int) -> int:
        """Replace the groups that are too old for step `number`; return how many."""
        with self.changed:
            dropped = self.queue.drop_older(number - 1 - self.staleness)
            for group in reversed(dropped):
                self.queue.waiting.appendleft(self._make_group(group.plan, self._new_number()))
        return len(dropped)

    def _draw(self, step: Step) -> None:
        """Draw problems up to step + staleness, or up to the last step of the run."""
        last = min(step.number + self.staleness, self.config.training.steps)
        num_missing = (last - step.number + 1) * self.groups_per_step - len(self.queue)
        for _ in range(num_missing // self.groups_per_step):
            problems = self.method.draw(None, step)
            for plan in self.method.compose(problems, step):
                group = self._make_group(plan, self._new_number())
                with self.changed:
                    self.queue.waiting.append(group)

    def _new_number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def _make_group(self, plan: Group, number: int) -> StreamGroup:
        problem = plan.problem
        seed = self.config.seed
        seeds = [trajectory_seed(seed, number, problem.uid, i) for i in range(plan.num_samples)]
        prompt = self.method.ports.encoder.prompt(problem)
        return StreamGroup(number, plan, Request(prompt, seeds, images=problem.prompt_images))

    def _wait_for_groups(self) -> list[StreamGroup]:
        """Return the groups of one step, once there are enough; raise the thread's error."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()
        count = self.groups_per_step
        with self.changed:
            self.changed.notify_all()
            # No time limit here: the engine's calls have their own.
            self.changed.wait_for(lambda: self.error or len(self.queue.ready) >= count)
            if self.error is not None:
                raise self.error
            return self.queue.take(count)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Keep the engine from being polled."""
        with self.changed:
            self.is_paused = True
            self.changed.wait_for(lambda: not self.is_polling)
        try:
            yield
        finally:
            with self.changed:
                self.is_paused = False
                self.changed.notify_all()

    # ---- the other thread

    def _run(self) -> None:
        try:
            while self._poll():
                time.sleep(BETWEEN_POLLS_S)
        except BaseException as error:
            with self.changed:
                self.error = error
                self.is_polling = False
                self.changed.notify_all()

    def _poll(self) -> bool:
        """Poll the engine once, when there is something to sample; False at the end of the run."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_closed or self._can_poll())
            if self.is_closed:
                return False
            added = self.queue.start(self.max_rows, self.version)
            names = list(self.queue.running)
            self.is_polling = True
        engine: Any = self.method.ports.engine  # it has `poll`: see cluster/engines.py
        result = engine.poll(self.version, names, added)
        with self.changed:
            self.is_polling = False
            self.queue.collect(result)
            self.changed.notify_all()
        return True

    def _can_poll(self) -> bool:
        return not self.is_paused and bool(self.queue.running or self.queue.waiting)


def staleness_metrics(batch: Batch, version: int) -> dict[str, float]:
    """Return how many versions behind `version` the tokens of a batch were sampled.

    `staleness/mixed` is the share of rows that several versions sampled.
    """
    versions = batch.tokens["version"]
    age = version - versions
    rows = versions.split(batch.response.lengths.tolist())
    num_mixed = sum(bool((row != row[0]).any()) for row in rows if len(row))
    return {
        "staleness/mean": float(age.mean()),
        "staleness/max": float(age.max()),
        "staleness/mixed": num_mixed / len(rows),
    }
