"""Verifiers as actors on a Ray cluster, behind the port of verifiers/pool.py: the same verdicts, on the cores of other machines.

Each actor keeps a pool of killable children of its own, so the limits of time and memory are those of a local run. An actor that dies or
falls silent is made anew, and what it held is judged again, one response at a time: only one that loses a second actor fails.
"""

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.cluster.child_process import START_S
from postgrad.cluster.ray_backend import VERIFIER, Actors, Worker, WorkerLost
from postgrad.cluster.verifier_actor import VerifierActor, chunk_of, verdicts_of
from postgrad.config.schema import Config
from postgrad.errors import RunError
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.lookup import find_verifier
from postgrad.verifiers.pool import MAX_CHUNK


@dataclass
class Held:
    """The responses (by position) that an actor judges now, and until when."""

    member: Worker
    positions: list[int]
    limit_s: float
    deadline: float


class Verifiers(Actors):
    """cluster.pools.verifier actors, each with reward.workers child processes. Calls from several threads take turns."""

    def __init__(self, ray: Any, config: Config) -> None:
        self.reward = config.reward
        self.seconds: dict[str, float] = {}
        self.closed = False
        super().__init__(ray, config, VERIFIER, config.cluster.pools[VERIFIER], [])
        try:
            self._await(self.members)
        except BaseException:
            self.close()
            raise

    def make(self) -> Any:
        reward, here = self.reward, str(Path.cwd())
        actor = self.ray.remote(VerifierActor).options(
            **self.needs, max_restarts=0, max_concurrency=1
        )
        return actor.remote(
            reward.workers, reward.timeout_s, here, [path or here for path in sys.path]
        )

    def close(self) -> None:
        self.closed = True
        super().close()

    def verify(
        self, items: Sequence[tuple[str, Problem]], verifier_names: Sequence[str]
    ) -> list[Score | Failure]:
        """A Score or a Failure for each (response, problem), in order, as VerifierPool.verify gives them."""
        for name in set(verifier_names) - set(self.seconds):
            self.seconds[name] = max(self.reward.timeout_s, find_verifier(name).time_limit_s)
        with self.lock:
            return self._verify(items, verifier_names)

    def _verify(
        self, items: Sequence[tuple[str, Problem]], names: Sequence[str]
    ) -> list[Score | Failure]:
        waiting, alone = (
            deque(range(len(items))),
            deque[int](),
        )  # alone: what an actor held that was lost
        idle, busy = deque(self.members), dict[Any, Held]()
        results: dict[int, Score | Failure] = {}
        retried: set[int] = set()
        while waiting or alone or busy:
            while idle and (waiting or alone):
                # Chunks shrink towards the end, so that the actors finish together.
                size = min(
                    MAX_CHUNK * self.reward.workers,
                    -(-len(waiting) // (4 * len(self.members))),
                )
                chosen = [waiting.popleft() for _ in range(size)] or [alone.popleft()]
                reference, held = self._hand(idle.popleft(), chosen, items, names)
                busy[reference] = held
            reference, there = self._next(busy)
            held = busy.pop(reference)
            try:
                if not there:
                    raise WorkerLost(
                        held.member,
                        f"did not answer verify within {held.limit_s:g} s; it was stopped",
                    )
                _, _, answer = next(self.arrived({reference: held.member}, "verify", self.wait_s))
                results |= zip(held.positions, verdicts_of(answer), strict=True)
            except WorkerLost as lost:
                self._renew(held.member, lost)
                if retried.issuperset(held.positions):
                    results |= {
                        position: Failure("crash", str(lost)) for position in held.positions
                    }
                else:
                    retried |= set(held.positions)
                    alone.extend(held.positions)
            idle.append(held.member)
        return [results[position] for position in range(len(items))]

    def _hand(
        self,
        member: Worker,
        positions: list[int],
        items: Sequence[tuple[str, Problem]],
        names: Sequence[str],
    ) -> tuple[Any, Held]:
        """Send these responses; their time limits are kept over there, so here all of them and cluster.wait_s are waited for."""
        chosen = [names[position] for position in positions]
        limit_s = self.wait_s + sum(self.seconds[name] for name in chosen)
        reference = member.handle.verify.remote(
            chunk_of([items[position] for position in positions], chosen)
        )
        return reference, Held(member, positions, limit_s, time.monotonic() + limit_s)

    def _next(self, busy: dict[Any, Held]) -> tuple[Any, bool]:
        """(the answer that is there first, True), or (one whose time is over, False)."""
        soonest = min(busy, key=lambda reference: busy[reference].deadline)
        done, _ = self.ray.wait(
            list(busy), num_returns=1, timeout=max(0.0, busy[soonest].deadline - time.monotonic())
        )
        return (done[0], True) if done else (soonest, False)

    def _renew(self, member: Worker, lost: WorkerLost) -> None:
        if self.closed:
            raise RunError("the verifiers are closed") from lost
        self.ray.kill(member.handle)
        print(f"{lost}; it is started anew, and what it held is judged again", file=sys.stderr)
        member.handle = self.make()
        self._await([member])

    def _await(self, members: Sequence[Worker]) -> None:
        try:
            for _ in self.arrived(
                {member.handle.ready.remote(): member for member in members}, "start", START_S
            ):
                pass
        except WorkerLost as lost:
            raise RunError(f"{lost}; the same command continues the run") from lost
