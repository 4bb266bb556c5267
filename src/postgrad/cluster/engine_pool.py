"""Workers on Ray with a full model each, for generation only. Lost workers are restarted."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.cluster.actor_pool import (
    ActorPool,
    Worker,
    WorkerLost,
    merge_results,
    split_requests,
)
from postgrad.cluster.ports import to_exception
from postgrad.cluster.remote_ports import START_S
from postgrad.cluster.weights_ref import WeightsRef
from postgrad.cluster.wire import decode, encode
from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import RunError

MAX_RESTARTS = 3  # of lost engines, per run


class EnginePool(ActorPool):
    """Engines that share the requests of each call.

    A lost engine is restarted, gets the current weights and repeats its requests. Every sample
    has its own seed, so neither the repetition nor the split changes a result.

    Raises: ConfigError or RunError if the engines cannot start.
    """

    def __init__(
        self,
        ray: Any,
        config: Config | EngineConfig,
        label: str,
        size: int,
        port_names: Sequence[str],
    ) -> None:
        super().__init__(ray, config, label, size, port_names)
        self.restarts_left = MAX_RESTARTS
        self.published: tuple[str, Any] | None = None  # port, and reference of its weights
        self.owners: dict[str, Worker] = {}  # the engine of each unfinished group of rollout.stream
        try:
            self._start(self.workers)
        except WorkerLost as lost:
            self.close()
            raise RunError(str(lost)) from lost
        except BaseException:
            self.close()
            raise

    def call(self, port: str, method: str, *arguments: Any) -> Any:
        """Publishes weights to all engines, or distributes requests over them."""
        with self.lock:
            if method == "publish":
                self._publish_to_all(port, arguments[0])
                return None
            if method == "poll":
                return self._poll(port, *arguments)
            requests, sampling = arguments
            shares = split_requests(requests, len(self.workers))
            share_of: dict[Worker, list[int]] = {}
            messages: dict[Worker, bytes | None] = {}
            for worker, share in zip(self.workers, shares, strict=True):
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
        """Lets all engines decode their groups for a while; see ContinuousEngine.poll.

        A new group goes to the engine with the fewest groups. An engine that was restarted
        reports its groups as missing, and the driver adds them again.
        """
        self.owners = {name: self.owners[name] for name in names if name not in added}
        own: dict[Worker, list[str]] = {worker: [] for worker in self.workers}
        for name, worker in self.owners.items():
            own[worker].append(name)
        for name in added:
            worker = min(self.workers, key=lambda worker: len(own[worker]))
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
        is_stored = isinstance(weights, WeightsRef)
        reference = weights.reference if is_stored else self.ray.put(encode(weights))
        self.published = (port, reference)
        self._call_with_restarts(dict.fromkeys(self.workers), f"{port}.publish")

    def _call_with_restarts(
        self, messages: Mapping[Worker, bytes | None], call_name: str
    ) -> dict[Worker, bytes]:
        """Returns the encoded result per worker. A message of None publishes the weights.

        A lost worker is restarted and called again, while restarts are left.
        """
        sent = {worker: self._send(worker, message) for worker, message in messages.items()}
        results: dict[Worker, bytes] = {}
        while sent:
            worker, (status, result) = next(iter(sent.items()))
            try:
                self._check_status(status, worker, call_name, self.wait_s)
                results[worker] = self.wait(result, worker, call_name, self.wait_s)
                del sent[worker]
            except WorkerLost as lost:
                self._restart(worker, lost)
                sent[worker] = self._send(worker, messages[worker])
        return results

    def _send(self, worker: Worker, message: bytes | None) -> tuple[Any, Any]:
        if message is not None:
            return self.send(worker, message)
        assert self.published is not None
        port, reference = self.published
        return self.send(worker, encode([port, "publish", []]), [reference])

    def _restart(self, worker: Worker, lost: WorkerLost) -> None:
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
        worker.handle = self.create_actor()
        try:
            self._start([worker])
            if self.published is not None:
                status, _ = self._send(worker, None)
                self._check_status(status, worker, "engine.publish", self.wait_s)
        except WorkerLost as lost_again:
            self._restart(worker, lost_again)

    def _start(self, workers: Sequence[Worker]) -> None:
        """Builds the engines of the workers. Raises WorkerLost, ConfigError or RunError."""
        pending: dict[Any, Worker] = {}
        for worker in workers:
            reference = worker.handle.start.remote(self.config_ref, self.port_names, 0, 1, None)
            pending[reference] = worker
        for value in self.wait_all(pending, "start", START_S):
            _raise_failure(value)

    def _check_status(self, reference: Any, worker: Worker, call_name: str, limit_s: float) -> None:
        _raise_failure(self.wait(reference, worker, call_name, limit_s))


def _raise_failure(value: bytes) -> None:
    status, message = decode(value)
    if status != "ok":
        raise to_exception(status, message)
