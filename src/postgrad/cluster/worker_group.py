"""Workers on Ray that hold sharded models together."""

from collections.abc import Sequence
from typing import Any

from postgrad.cluster import stored
from postgrad.cluster.actor_pool import (
    ActorPool,
    Deadline,
    SentCall,
    Worker,
    WorkerLost,
    merge_results,
    split_requests,
)
from postgrad.cluster.ports import ENGINE, LOST_PEER, START_S, to_exception
from postgrad.cluster.resources import Placement
from postgrad.cluster.stored import Part, WeightsRef
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
                arguments = (self.config_ref, self.port_names, rank, size, address)
                started[worker.handle.start.remote(*arguments)] = worker
            self._check_statuses(started, "start", START_S)
        except BaseException:
            self.close()
            raise

    def call(self, port: str, method: str, *arguments: Any) -> Any:
        """Call all ranks; returns the first rank's result.

        `generate` is distributed over the ranks. `weights` returns a WeightsRef. Large tensors are
        sent once, and those of the result stay in Ray's object store.
        """
        with self.lock:
            if self.lost_reason:
                raise RunError(f"{self.lost_reason}, so {port}.{method} has no workers")
            if method == "generate":
                return self._generate(port, *arguments)
            if method == "weights":
                return self._store_weights(port)
            weights: WeightsRef | None = None
            if arguments and isinstance(arguments[0], WeightsRef):
                weights, arguments = arguments[0], arguments[1:]
            message, parts = self.store.encode_call(port, method, list(arguments))
            request = self.ray.put(message)
            min_bytes = stored.MIN_BYTES
            sent = [self.send(one, request, weights, parts, min_bytes) for one in self.workers]
            _, result, references = self._check_sent(f"{port}.{method}", sent)[0]
            data = self._wait_or_stop(result, self.workers[0])
            return self.store.decode_result(data, self._wait_or_stop(references, self.workers[0]))

    def _store_weights(self, port: str) -> WeightsRef:
        """Let every rank put its share of the weights into the object store."""
        request = encode([port, "weights", []])
        sent = [self.send(worker, request) for worker in self.workers]
        self._check_sent(f"{port}.weights", sent)
        parts: list[Part] = []
        for worker, call in zip(self.workers, sent, strict=True):
            parts += self._wait_or_stop(call.references, worker)
        return WeightsRef(self.ray, parts)

    def _generate(self, port: str, requests: list[Any], sampling: Any) -> list[Any]:
        """Distribute requests over the engines; the workers of a divided engine get the same."""
        group_size = self.config.rollout.tensor_parallel if port == ENGINE else 1
        shares = split_requests(requests, len(self.workers) // group_size)
        sent: list[SentCall] = []
        for number, worker in enumerate(self.workers):
            own_requests = [requests[index] for index in shares[number // group_size]]
            sent.append(self.send(worker, encode([port, "generate", [own_requests, sampling]])))
        self._check_sent(f"{port}.generate", sent)
        parts: list[tuple[list[int], list[Any]]] = []
        firsts = zip(self.workers[::group_size], sent[::group_size], shares, strict=True)
        for worker, call, share in firsts:
            parts.append((share, decode(self._wait_or_stop(call.result, worker))))
        return merge_results(parts)

    def _check_sent(self, call_name: str, sent: list[SentCall]) -> list[SentCall]:
        """Wait until all ranks have answered a call; returns the calls."""
        statuses = {call.status: worker for call, worker in zip(sent, self.workers, strict=True)}
        self._check_statuses(statuses, call_name, self.wait_s)
        return sent

    def _check_statuses(self, pending: dict[Any, Worker], call_name: str, limit_s: float) -> None:
        """Wait for the status of every rank; raises the first failure.

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
        """Return the value of a reference; stops the group if the worker is lost."""
        try:
            return self.wait(reference, worker, "its answer", max(self.wait_s, START_S))
        except WorkerLost as lost:
            raise self._stop(lost) from lost

    def _stop(self, lost: WorkerLost) -> RunError:
        """Stop all workers; returns the error to raise."""
        self.lost_reason = str(lost)
        self.close()
        return RunError(f"{lost}; the same command continues the run")
