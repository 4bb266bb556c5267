"""Verifiers in actors on Ray, with the interface and the verdicts of verifiers/pool.py.

Each actor has its own pool of child processes, so time and memory limits are those of a local
run. An actor that dies or does not answer is restarted, and its responses are scored again, one
per message. A response that loses two actors becomes a Failure.
"""

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.cluster.actor_pool import ActorPool, Worker, WorkerLost
from postgrad.cluster.ports import START_S
from postgrad.cluster.resources import VERIFIER, Placement, verifier_workers
from postgrad.cluster.verifier_actor import VerifierActor, decode_verdicts, encode_chunk
from postgrad.config.schema import Config
from postgrad.errors import ConfigError, RunError
from postgrad.problem import Failure, Problem, Score
from postgrad.processes.supervisor import MAX_CHUNK
from postgrad.verifiers.loading import find_verifier

CHUNKS_PER_WORKER = 4  # of the waiting responses, so that the actors finish together

Items = Sequence[tuple[str, Problem]]  # responses and their problems


@dataclass
class Assignment:
    """The responses, by index, that a worker scores now, and the time limit."""

    worker: Worker
    indices: list[int]
    limit_s: float
    deadline: float


class RayVerifierPool(ActorPool):
    """cluster.pools.verifier actors with `num_children` child processes each.

    Calls from several threads wait for each other.

    Raises: RunError if the actors cannot start.
    """

    def __init__(self, ray: Any, config: Config) -> None:
        self.timeout_s = config.reward.timeout_s
        self.num_children = verifier_workers(config)
        self.time_limits: dict[str, float] = {}  # verifier -> seconds per response
        self.is_closed = False
        super().__init__(ray, config, VERIFIER, config.cluster.pools[VERIFIER], [])
        try:
            self._wait_ready(self.workers)
        except BaseException:
            self.close()
            raise

    def create_actor(self, placement: Placement | None) -> Any:
        folder = str(Path.cwd())
        paths = [path or folder for path in sys.path]
        actor = self.ray.remote(VerifierActor).options(
            **self.resources, max_restarts=0, max_concurrency=1
        )
        return actor.remote(self.num_children, self.timeout_s, folder, paths)

    def close(self) -> None:
        self.is_closed = True
        super().close()

    def verify(self, items: Items, verifier_names: Sequence[str]) -> list[Score | Failure]:
        """Return a Score or a Failure per (response, problem), in order."""
        for name in set(verifier_names) - set(self.time_limits):
            limit_s = find_verifier(name).time_limit_s
            self.time_limits[name] = max(self.timeout_s, limit_s)
        with self.lock:
            return self._verify(items, verifier_names)

    def _verify(self, items: Items, names: Sequence[str]) -> list[Score | Failure]:
        waiting = deque(range(len(items)))
        retries: deque[int] = deque()  # responses of a lost worker, scored one per message
        idle = deque(self.workers)
        busy: dict[Any, Assignment] = {}
        results: dict[int, Score | Failure] = {}
        retried: set[int] = set()
        while waiting or retries or busy:
            while idle and (waiting or retries):
                indices = self._next_chunk(waiting) or [retries.popleft()]
                reference, assignment = self._assign(idle.popleft(), indices, items, names)
                busy[reference] = assignment
            reference, is_ready = self._wait_any(busy)
            assignment = busy.pop(reference)
            try:
                verdicts = self._receive(reference, assignment, is_ready)
                results.update(zip(assignment.indices, verdicts, strict=True))
            except WorkerLost as lost:
                self._restart(assignment.worker, lost)
                if retried.issuperset(assignment.indices):
                    for index in assignment.indices:
                        results[index] = Failure("crash", str(lost))
                else:
                    retried.update(assignment.indices)
                    retries.extend(assignment.indices)
            idle.append(assignment.worker)
        return [results[index] for index in range(len(items))]

    def _next_chunk(self, waiting: deque[int]) -> list[int]:
        """Remove and return the next responses to score; empty if none are waiting."""
        share = -(-len(waiting) // (CHUNKS_PER_WORKER * len(self.workers)))
        size = min(MAX_CHUNK * self.num_children, share)
        return [waiting.popleft() for _ in range(size)]

    def _assign(
        self, worker: Worker, indices: list[int], items: Items, names: Sequence[str]
    ) -> tuple[Any, Assignment]:
        """Send responses to a worker; return the reference of its verdicts.

        The actor enforces the limit of each response, so the driver waits for their sum and
        cluster.wait_s.
        """
        own_names = [names[index] for index in indices]
        limit_s = self.wait_s + sum(self.time_limits[name] for name in own_names)
        message = encode_chunk([items[index] for index in indices], own_names)
        reference = worker.handle.verify.remote(message)
        return reference, Assignment(worker, indices, limit_s, time.monotonic() + limit_s)

    def _wait_any(self, busy: dict[Any, Assignment]) -> tuple[Any, bool]:
        """Return (first finished reference, True), or (one past its deadline, False)."""
        earliest = min(busy, key=lambda reference: busy[reference].deadline)
        timeout_s = max(0.0, busy[earliest].deadline - time.monotonic())
        ready, _ = self.ray.wait(list(busy), num_returns=1, timeout=timeout_s)
        return (ready[0], True) if ready else (earliest, False)

    def _receive(
        self, reference: Any, assignment: Assignment, is_ready: bool
    ) -> list[Score | Failure]:
        if not is_ready:
            raise WorkerLost(
                assignment.worker,
                f"did not answer verify within {assignment.limit_s:g} s and was stopped",
                died=False,
            )
        answer = self.wait(reference, assignment.worker, "verify", self.wait_s)
        return decode_verdicts(answer)

    def _restart(self, worker: Worker, lost: WorkerLost) -> None:
        if self.is_closed:
            raise RunError("the verifier pool is closed") from lost
        self.ray.kill(worker.handle)
        print(f"{lost}; restarting it and scoring its responses again", file=sys.stderr)
        self.replace_actor(worker)
        try:
            self._wait_ready([worker])
        except ConfigError as error:
            raise RunError(f"{lost} and cannot be restarted: {error}") from error

    def _wait_ready(self, workers: Sequence[Worker]) -> None:
        pending = {worker.handle.ready.remote(): worker for worker in workers}
        try:
            for _ in self.wait_all(pending, "start", START_S):
                pass
        except WorkerLost as lost:
            raise RunError(f"{lost}; the same command continues the run") from lost
