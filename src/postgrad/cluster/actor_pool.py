"""Creates actors on Ray, calls them and waits for them.

A wait has a time limit and names the worker: a death is noticed within seconds, a worker that
does not answer after cluster.wait_s. Ray lets an actor wait forever for a node, and it counts a
dead node for some seconds more; so the cluster is checked again while actors start.
"""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from postgrad.cluster.rank_actor import RankActor
from postgrad.cluster.resources import (
    CHECK_S,
    PLACE_S,
    Placement,
    actor_bundle,
    actor_resources,
    actor_state,
    check_capacity,
    describe,
)
from postgrad.cluster.stored import WeightsRef
from postgrad.config.compose import to_yaml
from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import RunError, first_line


class Worker:
    """An actor with its name; `handle` changes when the actor is restarted.

    `placement` has the options that put the actor on a reserved device; None without one.
    """

    def __init__(self, name: str, handle: Any, placement: Placement | None = None) -> None:
        self.name = name
        self.handle = handle
        self.placement = placement


class SentCall(NamedTuple):
    """References of what RankActor.call returns."""

    status: Any
    result: Any
    references: Any


class WorkerLost(Exception):
    """A worker died or did not answer in time."""

    def __init__(self, worker: Worker, reason: str, died: bool = False) -> None:
        super().__init__(f"the {worker.name} worker {reason}")
        self.worker = worker
        self.died = died


class Deadline:
    """A point in time that can be moved closer."""

    def __init__(self, limit_s: float) -> None:
        self.time = time.monotonic() + limit_s

    def shorten(self, limit_s: float) -> None:
        """Move the deadline to `limit_s` seconds from now, if that is earlier."""
        self.time = min(self.time, time.monotonic() + limit_s)

    def remaining_s(self) -> float:
        return max(0.0, self.time - time.monotonic())


class ActorPool:
    """Workers of one kind. Subclasses say how a call is distributed over them.

    Args:
        ray: the connected ray module.
        config: the settings that the actors build their models from.
        label: name of the pool in messages, such as "policy".
        size: number of workers.
        port_names: the ports that each worker holds.
        placements: reserved devices, one per worker; () without a reservation.
    """

    def __init__(
        self,
        ray: Any,
        config: Config | EngineConfig,
        label: str,
        size: int,
        port_names: Sequence[str],
        placements: Sequence[Placement] = (),
    ) -> None:
        self.ray = ray
        self.config = config
        self.label = label
        self.port_names = list(port_names)
        self.config_ref = ray.put(to_yaml(config))
        self.wait_s = config.cluster.wait_s
        self.resources = actor_resources(config, label, ray.cluster_resources())
        self.lock = threading.RLock()
        self.workers: list[Worker] = []
        self.starting: dict[Worker, Deadline] = {}  # until when an actor may wait for a node
        for number in range(size):
            name = f"{label} {number}" if size > 1 else label
            worker = Worker(name, None, placements[number] if placements else None)
            self.replace_actor(worker)
            self.workers.append(worker)

    def create_actor(self, placement: Placement | None) -> Any:
        """Return the handle of a new actor."""
        options = {**self.resources, **(placement or {}), "max_restarts": 0, "max_concurrency": 1}
        return self.ray.remote(RankActor).options(**options).remote()

    def replace_actor(self, worker: Worker) -> None:
        """Give the worker a new actor; the one before, if any, has been killed."""
        worker.handle = self.create_actor(worker.placement)
        self.starting[worker] = Deadline(PLACE_S)

    def send(
        self,
        worker: Worker,
        request: bytes | Any,
        weights: WeightsRef | None = None,
        parts: Sequence[Any] = (),
        min_bytes: float = math.inf,
    ) -> SentCall:
        """Send an encoded call; the arguments are those of RankActor.call.

        `weights` are its last argument. The worker reads them part by part.
        """
        call = worker.handle.call.options(num_returns=3)
        weight_parts = None if weights is None else weights.parts
        return SentCall(*call.remote(request, weight_parts, min_bytes, *parts))

    def wait_all(
        self,
        pending: dict[Any, Worker],
        call_name: str,
        limit_s: float,
        deadline: Deadline | None = None,
    ) -> Iterator[Any]:
        """Yield the values of the references in the order of their arrival.

        Raises:
            WorkerLost: a worker died, found no node within PLACE_S, or did not answer within
                `limit_s` or the deadline.
            ConfigError: a worker waits for a node, and the cluster has become too small.
            RunError: Ray could not run the call.
        """
        pending = dict(pending)
        deadline = deadline or Deadline(limit_s)
        while pending:
            ready = self._wait_first(list(pending), deadline)
            if not ready:
                setting = " (cluster.wait_s)" if limit_s == self.wait_s else ""
                reason = f"did not answer {call_name} within {limit_s:g} s{setting}"
                raise WorkerLost(next(iter(pending.values())), f"{reason} and was stopped")
            worker = pending.pop(ready[0])
            try:
                value = self.ray.get(ready[0])
            except self.ray.exceptions.RayActorError as error:
                raise WorkerLost(worker, f"died during {call_name}", died=True) from error
            except self.ray.exceptions.RayError as error:
                raise RunError(
                    f"{call_name} on the {worker.name} worker: {first_line(error)}"
                ) from error
            yield value

    def _wait_first(self, references: list[Any], deadline: Deadline) -> list[Any]:
        """Return the first finished reference in a list, which is empty after the deadline."""
        while True:
            remaining_s = deadline.remaining_s()
            timeout_s = min(remaining_s, CHECK_S) if self.starting else remaining_s
            ready, _ = self.ray.wait(references, num_returns=1, timeout=timeout_s)
            if ready or timeout_s == remaining_s:
                return ready
            self._check_starting()

    def _check_starting(self) -> None:
        """Check that the actors which wait for a node can get one. Raises as `wait_all` does."""
        for worker, deadline in list(self.starting.items()):
            state, is_placed = actor_state(self.ray, worker.handle)
            if state in ("ALIVE", "DEAD"):  # a call to a dead actor raises
                del self.starting[worker]
            elif is_placed:  # if its node dies now, Ray looks for another one
                self.starting[worker] = Deadline(PLACE_S)
            else:
                check_capacity(self.ray, self.config)
                if deadline.remaining_s() == 0.0:
                    raise WorkerLost(
                        worker,
                        f"was not started: no node of the Ray cluster had "
                        f"{describe(actor_bundle(self.resources))} free within {PLACE_S:g} s; "
                        "`ray status` shows what other programs use",
                    )

    def wait(self, reference: Any, worker: Worker, call_name: str, limit_s: float) -> Any:
        """Return the value of one reference. Raises as `wait_all` does."""
        return next(self.wait_all({reference: worker}, call_name, limit_s))

    def close(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            self.ray.kill(worker.handle)


def split_requests(requests: Sequence[Any], size: int) -> list[list[int]]:
    """Return the indices of the requests for each of `size` workers.

    The numbers of samples per worker are nearly equal; a request is not split.
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    num_samples = [0] * size
    largest_first = sorted(range(len(requests)), key=lambda i: (-len(requests[i].seeds), i))
    for index in largest_first:
        worker = num_samples.index(min(num_samples))
        shares[worker].append(index)
        num_samples[worker] += len(requests[index].seeds)
    return [sorted(share) for share in shares]


def merge_results(parts: Sequence[tuple[list[int], list[Any]]]) -> list[Any]:
    """Return the results of (indices, results) parts in the order of the requests."""
    by_index: dict[int, Any] = {}
    for indices, results in parts:
        by_index.update(zip(indices, results, strict=True))
    return [by_index[index] for index in sorted(by_index)]
