"""Workers on Ray that hold sharded models together."""

from collections.abc import Sequence
from typing import Any

from postgrad.cluster import stored
from postgrad.cluster.actor_pool import (
    ActorPool,
    Deadline,
    Worker,
    WorkerLost,
    merge_results,
    split_requests,
)
from postgrad.cluster.placement import Placement
from postgrad.cluster.ports import ENGINE, LOST_PEER, to_exception
from postgrad.cluster.remote_ports import START_S
from postgrad.cluster.weights_ref import Part, WeightsRef
from postgrad.cluster.wire import decode, encode
from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import RunError

# Limit for the other ranks after one has failed: they may wait for it in a collective operation.
AFTER_FAILURE_S = 5.0
# The same after a rank lost its connection to another one: Ray needs this long to notice that a
# node is gone, and its name is the better message.
AFTER_LOST_PEER_S = 60.0


class WorkerGroup(ActorPool):
    """The ranks of sharded models. If one is lost, all are stopped and the run ends.

    Raises: ConfigError or RunError if the ranks cannot start.
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
        super().__init__(ray, config, label, size, port_names, placements)
        self.store = stored.TensorStore(ray, self.wait_s)
        self.lost_reason = ""  # set when a worker is lost; no call can be answered then
        try:
            first = self.workers[0]
            address = self._wait_or_stop(first.handle.rendezvous_address.remote(), first)
            started: dict[Any, Worker] = {}
            for rank, worker in enumerate(self.workers):
                reference = worker.handle.start.remote(
                    self.config_ref, self.port_names, rank, size, address
                )
                started[reference] = worker
            self._check_statuses(started, "start", START_S)
        except BaseException:
            self.close()
            raise

    def call(self, port: str, method: str, *arguments: Any) -> Any:
        """Calls all ranks; returns the first rank's result.

        `generate` is distributed over the ranks. `weights` returns a WeightsRef.
        """
        call_name = f"{port}.{method}"
        with self.lock:
            if self.lost_reason:
                raise RunError(f"{self.lost_reason}, so {call_name} has no workers")
            if method == "generate":
                return self._generate(port, *arguments)
            if method == "weights":
                return self._store_weights(port)
            if arguments and isinstance(arguments[0], WeightsRef):
                return self._send_weights(port, method, arguments[0])
            return self._call_by_reference(port, method, list(arguments))

    def _call_by_reference(self, port: str, method: str, arguments: list[Any]) -> Any:
        """Calls all ranks; large tensors are sent once, and those of the result stay there."""
        message, parts = self.store.encode_call(port, method, arguments)
        request = self.ray.put(message)
        sent: dict[Worker, tuple[Any, Any, Any]] = {}
        for worker in self.workers:
            call = worker.handle.call_by_reference.options(num_returns=3)
            sent[worker] = call.remote(request, stored.MIN_BYTES, *parts)
        statuses = {status: worker for worker, (status, _, _) in sent.items()}
        self._check_statuses(statuses, f"{port}.{method}", self.wait_s)
        first = self.workers[0]
        _, result, references = sent[first]
        data = self._wait_or_stop(result, first)
        return self.store.decode_result(data, self._wait_or_stop(references, first))

    def _send_weights(self, port: str, method: str, weights: WeightsRef) -> None:
        """Calls all ranks with weights of the object store."""
        request = encode([port, method, []])
        sent = {self.send(worker, request, weights)[0]: worker for worker in self.workers}
        self._check_statuses(sent, f"{port}.{method}", self.wait_s)

    def _store_weights(self, port: str) -> WeightsRef:
        """Lets every rank put its share of the weights into the object store."""
        sent: dict[Worker, tuple[Any, Any]] = {}
        for worker in self.workers:
            sent[worker] = worker.handle.store_weights.options(num_returns=2).remote(port)
        statuses = {status: worker for worker, (status, _) in sent.items()}
        self._check_statuses(statuses, f"{port}.weights", self.wait_s)
        parts: list[Part] = []
        for worker, (_, own_parts) in sent.items():
            parts += self._wait_or_stop(own_parts, worker)
        return WeightsRef(self.ray, parts)

    def _generate(self, port: str, requests: list[Any], sampling: Any) -> list[Any]:
        """Distributes requests over the engines; the workers of a divided engine get the same."""
        group_size = self.config.rollout.tensor_parallel if port == ENGINE else 1
        shares = split_requests(requests, len(self.workers) // group_size)
        sent: dict[Worker, tuple[Any, Any]] = {}
        for number, worker in enumerate(self.workers):
            own_requests = [requests[index] for index in shares[number // group_size]]
            sent[worker] = self.send(worker, encode([port, "generate", [own_requests, sampling]]))
        statuses = {status: worker for worker, (status, _) in sent.items()}
        self._check_statuses(statuses, f"{port}.generate", self.wait_s)
        parts: list[tuple[list[int], list[Any]]] = []
        for worker, share in zip(self.workers[::group_size], shares, strict=True):
            _, result = sent[worker]
            parts.append((share, decode(self._wait_or_stop(result, worker))))
        return merge_results(parts)

    def _check_statuses(self, pending: dict[Any, Worker], call_name: str, limit_s: float) -> None:
        """Waits for the status of every rank; raises the first failure.

        After a failure the other ranks have AFTER_FAILURE_S seconds to answer. A rank that lost
        its connection to another one has failed because of that one: if it died, it is named.
        """
        failure: Exception | None = None
        lost_peer: Exception | None = None
        deadline = Deadline(limit_s)
        try:
            for value in self.wait_all(pending, call_name, limit_s, deadline):
                status, message = decode(value)
                if status == LOST_PEER:
                    lost_peer = lost_peer or RunError(
                        f"a {self.label} worker lost its connection to another one during "
                        f"{call_name}: {message}; the same command continues the run"
                    )
                    deadline.shorten(AFTER_LOST_PEER_S)
                elif status != "ok" and failure is None:
                    failure = to_exception(status, message)
                    deadline.shorten(AFTER_FAILURE_S)
        except WorkerLost as lost:
            stopped = self._stop(lost)
            if failure is None and (lost_peer is None or lost.died):
                raise stopped from lost
        failure = failure or lost_peer
        if failure is not None:
            raise failure

    def _wait_or_stop(self, reference: Any, worker: Worker) -> Any:
        """Returns the value of a reference; stops the group if the worker is lost."""
        try:
            return self.wait(reference, worker, "its answer", max(self.wait_s, START_S))
        except WorkerLost as lost:
            raise self._stop(lost) from lost

    def _stop(self, lost: WorkerLost) -> RunError:
        """Stops all workers; returns the error to raise."""
        self.lost_reason = str(lost)
        self.close()
        return RunError(f"{lost}; the same command continues the run")
