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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from postgrad.config.schema import Config
from postgrad.data.feed import Feed
from postgrad.methods.method import Method
from postgrad.methods.step import Group, Stage, Step
from postgrad.rollout.engine import Request, trajectory_seed
from postgrad.training.group_queue import GroupQueue, StreamGroup
from postgrad.training.log import timed
from postgrad.types import Batch

BETWEEN_POLLS_S = 0.001  # so that another call to the engine, such as a validation, gets a turn
CLOSE_S = 5.0


class RolloutStream:
    """Gives each step the groups that were completed first."""

    def __init__(self, config: Config, method: Method, feed: Feed) -> None:
        self.config = config
        self.method = method
        self.feed = feed
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
        step = Step(number, self.feed)
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
            problem = self.feed.find(saved["uid"])
            (plan,) = self.method.compose([problem], Step(0, self.feed))
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
        return StreamGroup(number, plan, Request(self.method.ports.encoder.prompt(problem), seeds))

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
