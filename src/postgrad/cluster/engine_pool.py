"""Engines on Ray, for generation only: one worker each, or several that divide its weights.

Lost engines are restarted.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.cluster.actor_pool import (
    ActorPool,
    SentCall,
    Worker,
    WorkerLost,
    merge_results,
    split_requests,
)
from postgrad.cluster.ports import LOST_PEER, START_S, to_exception
from postgrad.cluster.resources import Placement
from postgrad.cluster.stored import WeightsRef, store_weights
from postgrad.cluster.wire import decode, encode
from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import ConfigError, RunError

MAX_RESTARTS = 3  # of lost engines, per run


class EnginePool(ActorPool):
    """Engines that share the requests of each call.

    With `group_size` > 1 an engine has that many workers, which divide its weights among them and
    get the same calls; the first of them stands for the engine here. A lost engine is restarted,
    gets the current weights and repeats its requests. Every sample has its own seed, so neither
    the repetition nor the split changes a result.

    Args: those of ActorPool; `size` is the number of engines.

    Raises: ConfigError or RunError if the engines cannot start.
    """

    def __init__(
        self,
        ray: Any,
        config: Config | EngineConfig,
        label: str,
        size: int,
        port_names: Sequence[str],
        placements: Sequence[Placement] = (),
        group_size: int = 1,
    ) -> None:
        super().__init__(ray, config, label, size * group_size, port_names, placements)
        self.engines = self.workers[::group_size]  # the first worker of each
        self.members: dict[Worker, list[Worker]] = {}  # the workers of an engine
        for number, first in enumerate(self.engines):
            members = self.workers[number * group_size : (number + 1) * group_size]
            self.members[first] = members
            for rank, worker in enumerate(members):
                if group_size > 1:
                    worker.name = f"{label} {number} rank {rank}"
        self.restarts_left = MAX_RESTARTS
        self.published: tuple[str, WeightsRef] | None = None  # port and its weights
        self.owners: dict[str, Worker] = {}  # the engine of each unfinished group of rollout.stream
        try:
            self._start(self.engines)
        except WorkerLost as lost:
            self.close()
            raise RunError(str(lost)) from lost
        except BaseException:
            self.close()
            raise

    def call(self, port: str, method: str, *arguments: Any) -> Any:
        """Publish weights to all engines, or distributes requests over them."""
        with self.lock:
            if method == "publish":
                self._publish_to_all(port, arguments[0])
                return None
            if method == "poll":
                return self._poll(port, *arguments)
            requests, sampling = arguments
            shares = split_requests(requests, len(self.engines))
            share_of: dict[Worker, list[int]] = {}
            messages: dict[Worker, bytes | None] = {}
            for worker, share in zip(self.engines, shares, strict=True):
                if share:
                    own_requests = [requests[index] for index in share]
                    share_of[worker] = share
                    messages[worker] = encode([port, method, [own_requests, sampling]])
            results = self._call_with_restarts(messages, f"{port}.{method}")
            return merge_results(
                [(share_of[worker], decode(data)) for worker, data in results.items()]
            )

    def _poll(
        self, port: str, version: int, names: Sequence[str], added: Mapping[str, Any]
    ) -> dict[str, list[Any]]:
        """Let all engines decode their groups for a while; see ContinuousEngine.poll.

        A new group goes to the engine with the fewest groups. An engine that was restarted
        reports its groups as missing, and the driver adds them again.
        """
        self.owners = {name: self.owners[name] for name in names if name not in added}
        own: dict[Worker, list[str]] = {worker: [] for worker in self.engines}
        for name, worker in self.owners.items():
            own[worker].append(name)
        for name in added:
            worker = min(self.engines, key=lambda worker: len(own[worker]))
            own[worker].append(name)
            self.owners[name] = worker
        messages: dict[Worker, bytes | None] = {}
        for worker, own_names in own.items():
            if own_names:
                requests = {name: added[name] for name in own_names if name in added}
                messages[worker] = encode([port, "poll", [version, own_names, requests]])
        parts = [
            decode(data) for data in self._call_with_restarts(messages, f"{port}.poll").values()
        ]
        return {
            key: [one for part in parts for one in part[key]] for key in ("finished", "missing")
        }

    def _publish_to_all(self, port: str, weights: Any) -> None:
        if not isinstance(weights, WeightsRef):
            weights = WeightsRef(self.ray, store_weights(self.ray, weights.items()))
        self.published = (port, weights)
        self._call_with_restarts(dict.fromkeys(self.engines), f"{port}.publish")

    def _call_with_restarts(
        self, messages: Mapping[Worker, bytes | None], call_name: str
    ) -> dict[Worker, bytes]:
        """Return the encoded result per engine. A message of None publishes the weights.

        A lost engine is restarted and called again, while restarts are left.
        """
        sent = {engine: self._send(engine, message) for engine, message in messages.items()}
        results: dict[Worker, bytes] = {}
        while sent:
            engine, calls = next(iter(sent.items()))
            try:
                self._check_statuses(calls, call_name)
                results[engine] = self.wait(calls[engine].result, engine, call_name, self.wait_s)
                del sent[engine]
            except WorkerLost as lost:
                self._restart(engine, lost)
                sent[engine] = self._send(engine, messages[engine])
        return results

    def _send(self, engine: Worker, message: bytes | None) -> dict[Worker, SentCall]:
        """Send a call to all workers of an engine; None sends the published weights."""
        weights: WeightsRef | None = None
        if message is None:
            assert self.published is not None
            port, weights = self.published
            message = encode([port, "publish", []])
        return {worker: self.send(worker, message, weights) for worker in self.members[engine]}

    def _restart(self, engine: Worker, lost: WorkerLost) -> None:
        """Replace all workers of an engine: they cannot go on without the one that is lost."""
        for worker in self.members[engine]:
            self.ray.kill(worker.handle)
        if self.restarts_left == 0:
            raise RunError(
                f"{lost}, after {MAX_RESTARTS} restarts; the same command continues the run"
            ) from lost
        self.restarts_left -= 1
        print(
            f"{lost}; restarting it and repeating its requests "
            f"({self.restarts_left} restarts left)",
            file=sys.stderr,
        )
        for worker in self.members[engine]:
            self.replace_actor(worker)
        try:
            self._start([engine])
            if self.published is not None:
                self._check_statuses(self._send(engine, None), "engine.publish")
        except WorkerLost as lost_again:
            self._restart(engine, lost_again)
        except ConfigError as error:
            raise RunError(f"{lost} and cannot be restarted: {error}") from error

    def _start(self, engines: Sequence[Worker]) -> None:
        """Build the engines. Raises WorkerLost, ConfigError or RunError."""
        pending: dict[Any, Worker] = {}
        for engine in engines:
            members = self.members[engine]
            address: Any = None
            if len(members) > 1:
                reference = engine.handle.rendezvous_address.remote()
                address = self.wait(reference, engine, "start", START_S)
            for rank, worker in enumerate(members):
                arguments = (self.config_ref, self.port_names, rank, len(members), address)
                pending[worker.handle.start.remote(*arguments)] = worker
        self._check_all(pending, "start", START_S)

    def _check_statuses(self, calls: Mapping[Worker, SentCall], call_name: str) -> None:
        statuses = {call.status: worker for worker, call in calls.items()}
        self._check_all(statuses, call_name, self.wait_s)

    def _check_all(self, statuses: dict[Any, Worker], call_name: str, limit_s: float) -> None:
        """Wait for the status of each worker; raises the first failure, WorkerLost for a loss."""
        for value in self.wait_all(statuses, call_name, limit_s):
            status, message = decode(value)
            if status == LOST_PEER:
                first = next(iter(statuses.values()))
                reason = f"lost its connection to another one during {call_name}"
                raise WorkerLost(first, reason)
            if status != "ok":
                raise to_exception(status, message)
