"""What the workers of a mesh send to each other, and how long links take for it.

Bytes follow from the sizes of the model; tests/sizing/test_mesh_time.py compares them with what
gloo ranks send. The speeds of links are assumptions.
"""

import math
from dataclasses import dataclass

from postgrad.config.schema import ClusterConfig
from postgrad.sizing.gpu_time import Work

MASTER_BYTES = 4  # of a gradient that is reduced, in float32


@dataclass(frozen=True)
class Links:
    """What links between devices reach. Assumptions, not measurements."""

    node: float = 350e9  # bytes per second that a device sends within its node
    network: float = 40e9  # bytes per second that a device sends to other nodes
    node_size: int = 8
    latency_s: float = 20e-6  # per collective and doubling of the number of workers

    def ring_s(self, size: int, stride: int, sent: float, num_calls: float = 1) -> float:
        """Return the seconds of all-gathers, reduce-scatters or all-reduces.

        Args:
            size: workers of the group.
            stride: distance of its neighbors in the order of workers; nodes are filled in order.
            sent: bytes that each worker sends in all calls.
            num_calls: how many collectives there are.

        Between nodes a group has one ring per member within a node, each with its own network link.
        """
        if size <= 1:
            return 0.0
        speed = self.node
        if size * stride > self.node_size:
            speed = min(self.node, self.network * max(1, self.node_size // stride))
        return sent / speed + num_calls * self._latency(size)

    def exchange_s(self, size: int, stride: int, sent: float, num_calls: float = 1) -> float:
        """Return the seconds of all-to-alls, with the arguments of `ring_s`.

        What goes to other nodes leaves through the worker's own network link.
        """
        if size <= 1:
            return 0.0
        speed = self.node if size * stride <= self.node_size else self.network
        return sent / speed + num_calls * self._latency(size)

    def _latency(self, size: int) -> float:
        return self.latency_s * math.ceil(math.log2(size))

    def __str__(self) -> str:
        return (
            f"{self.node / 1e9:g} GB/s per device in a node of {self.node_size}, "
            f"{self.network / 1e9:g} GB/s between nodes, {self.latency_s * 1e6:g} us per collective"
        )


@dataclass(frozen=True)
class Mesh:
    """The workers of one model: data x sequence x tensor, as in model/ranks.py."""

    workers: int = 1
    tensor: int = 1
    sequence: int = 1
    dispatch: int = 1  # workers that tokens are sent between, to their experts
    shards: int = 1  # workers over which FSDP2 shards one copy of the weights

    @staticmethod
    def of(cluster: ClusterConfig, num_workers: int) -> "Mesh":
        """Return the mesh of these settings on this many workers."""
        tensor = cluster.tensor_parallel
        return Mesh(
            num_workers,
            tensor,
            cluster.sequence_parallel,
            cluster.expert_parallel if tensor == 1 else 1,
            cluster.shard_workers or num_workers // tensor,
        )

    @property
    def data(self) -> int:
        """Number of groups of workers that compute rows of their own."""
        return self.workers // (self.tensor * self.sequence)

    @property
    def copies(self) -> int:
        """Number of copies of the weights (hybrid sharding)."""
        return self.workers // (self.tensor * self.shards)


@dataclass(frozen=True)
class SentSizes:
    """The sizes of a model that its traffic follows from."""

    parameters: int  # of one worker's slices, with the experts of all workers if they are held
    trained: int  # those of them that have gradients
    experts: int  # those of them in experts that tokens are sent to; 0 without dispatch
    blocks: int
    hidden: int
    heads: int  # columns of queries and keys together
    itemsize: int  # bytes per value of the compute type
    num_experts: int = 0  # per block
    chosen_experts: int = 0  # per token


@dataclass(frozen=True)
class Sent:
    """What one worker sends for one purpose."""

    nbytes: float
    num_calls: float  # collectives


def sent_share(size: int) -> float:
    """Return the share of a gathered, reduced or exchanged tensor that a worker sends."""
    return (size - 1) / size


def expected_owners(num_experts: int, chosen: int, num_workers: int) -> float:
    """Return how many other workers a token is sent to, if every choice is equally likely."""
    others = num_experts - num_experts // num_workers  # experts of all workers but one
    missed = math.comb(others, chosen) / math.comb(num_experts, chosen)
    return (num_workers - 1) * (1 - missed)


def count_traffic(
    mesh: Mesh, sizes: SentSizes, work: Work, trains: bool, recomputes: bool
) -> dict[str, Sent]:
    """Return what one worker sends in passes over the rows of its group, by purpose.

    Args:
        mesh: the workers of the model.
        sizes: of the model.
        work: the passes of one group of workers that have rows of their own.
        trains: with backward passes.
        recomputes: activation checkpointing, which sends once more what a forward pass sends.
    """
    forwards = 2 if trains and recomputes else 1
    directions = forwards + int(trains)
    calls = work.num_passes * sizes.blocks
    tokens = work.tokens / mesh.sequence
    hidden = sizes.hidden * sizes.itemsize
    held = sizes.experts / mesh.dispatch  # of one worker, if tokens are sent
    # FSDP2 gathers weights for the forward and again for the backward pass, reduces gradients once.
    expert_share = sent_share(mesh.shards // mesh.dispatch)
    share = sent_share(mesh.shards)
    gathered = (sizes.parameters - sizes.experts) * share + held * expert_share
    sharding = gathered * sizes.itemsize * (2 if trains else 1)
    reduced = 0.0
    copies = 0.0
    if trains:
        trained_experts = min(sizes.experts, sizes.trained)
        reduced = (sizes.trained - trained_experts) * share
        reduced += trained_experts / mesh.dispatch * expert_share
        copies = 2 * sizes.trained / mesh.shards * sent_share(mesh.copies)
    # Two sums per block and direction, and the embedding; backward, the hidden states of the head.
    sums = 2 * directions * sizes.blocks + 1
    summed = sums * tokens + (work.response_tokens / mesh.sequence if trains else 0)
    owners = 0.0
    if mesh.dispatch > 1:
        owners = expected_owners(sizes.num_experts, sizes.chosen_experts, mesh.dispatch)
    exchanged = 2 * sizes.heads / mesh.tensor * sizes.itemsize  # queries and outputs, keys, values
    per_block = {
        "sharding": Sent(
            work.num_passes * (sharding + MASTER_BYTES * reduced), (3 if trains else 1) * calls
        ),
        "copies": Sent(work.num_passes * MASTER_BYTES * copies, calls if trains else 0),
        "tensor": Sent(2 * sent_share(mesh.tensor) * hidden * summed, 2 * directions * calls),
        "sequence": Sent(
            directions * sizes.blocks * exchanged * tokens * sent_share(mesh.sequence),
            4 * directions * calls,
        ),
        "experts": Sent(
            2 * directions * sizes.blocks * owners * hidden * tokens, 4 * directions * calls
        ),
    }
    return {name: sent for name, sent in per_block.items() if sent.nbytes}


def traffic_s(mesh: Mesh, traffic: dict[str, Sent], links: Links) -> dict[str, float]:
    """Return the seconds of each purpose of the traffic."""
    rings = {
        "sharding": (mesh.shards, mesh.tensor),
        "copies": (mesh.copies, mesh.tensor * mesh.shards),
        "tensor": (mesh.tensor, 1),
    }
    exchanges = {"sequence": (mesh.sequence, mesh.tensor), "experts": (mesh.dispatch, 1)}
    seconds: dict[str, float] = {}
    for name, sent in traffic.items():
        if name in rings:
            seconds[name] = links.ring_s(*rings[name], sent.nbytes, sent.num_calls)
        else:
            seconds[name] = links.exchange_s(*exchanges[name], sent.nbytes, sent.num_calls)
    return seconds
