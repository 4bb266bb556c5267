"""The ranks that train one model: their collectives, and which rows each rank computes.

Every rank gets the full batch of an optimizer step, so loss weights and denominators are global
before the rows are divided. The sum of the ranks' gradients is the gradient of one process.

Ranks form a mesh of data x sequence x tensor: rows are divided over the first, the tokens of a
row over the second, the matrices of the model over the third. Ranks that differ in the third only
are neighbors. Experts have a mesh of their own over the same ranks: each group of neighbors holds
all experts, and tokens are sent within it (parallel/experts.py).
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from postgrad.config.schema import ClusterConfig
from postgrad.errors import Conflict
from postgrad.model.parallel.experts import count_experts
from postgrad.model.parallel.groups import (
    ALONE,
    Group,
    division_of,
    full_shape,
    join_slices,
    slice_tensor,
    sum_outputs,
)
from postgrad.model.passes.layout import MicroBatch, Prompt, prompts_of
from postgrad.model.passes.sequence import DividedTokens
from postgrad.types import Batch

# The most loaded rank may have this many times the mean before rows of one prompt are divided.
MAX_IMBALANCE = 1.05
# Kinds of roles whose models are sharded; those of other kinds are complete on each rank.
SHARDED_KINDS = ("frozen", "critic")

MakeMicroBatches = Callable[[Batch, list[int] | None], list[MicroBatch]]


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks.

    Every method is a collective: all ranks call it, in the same order.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # what FSDP2 shards over: (shard,), or (replicate, shard)
    offload: bool = False
    data: Group = ALONE  # rows are divided over it
    sequence: Group = ALONE  # the tokens of a pass are divided over it
    tensor: Group = ALONE  # the matrices of the blocks are divided over it
    shard: Group = ALONE  # the slices of one rank are sharded over it
    expert: Group = ALONE  # tokens are sent to their experts within it
    expert_shard: Group = ALONE  # the experts of one rank are sharded over it
    expert_mesh: DeviceMesh | None = None  # what FSDP2 shards dispatched experts over

    @staticmethod
    def from_process_group(device: torch.device, cluster: ClusterConfig) -> "Ranks":
        """Return the ranks of the initialized default process group.

        Raises: ConfigError if the parallel sizes do not divide the number of ranks.
        """
        size = dist.get_world_size()
        tensor = cluster.tensor_parallel
        sequence = cluster.sequence_parallel
        check_mesh(size, cluster)
        num_shards = cluster.shard_workers or size // tensor
        names = ("data", "sequence", "tensor")
        by_row = init_device_mesh(
            device.type, (size // (tensor * sequence), sequence, tensor), mesh_dim_names=names
        )
        by_weight = init_device_mesh(
            device.type,
            (size // (tensor * num_shards), num_shards, tensor),
            mesh_dim_names=("replicate", "shard", "slice"),
        )
        is_hybrid = num_shards * tensor < size
        experts = (ALONE, ALONE, None)
        if cluster.expert_parallel > 1:
            experts = _expert_mesh(device, size, num_shards, cluster.expert_parallel)
        return Ranks(
            dist.get_rank(),
            size,
            device,
            by_weight["replicate", "shard"] if is_hybrid else by_weight["shard"],
            cluster.offload,
            _group_of(by_row, "data"),
            _group_of(by_row, "sequence"),
            _group_of(by_row, "tensor"),
            _group_of(by_weight, "shard"),
            *experts,
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def world(self) -> Group:
        return Group(self.rank, self.size)

    @property
    def is_first_copy(self) -> bool:
        """Whether no earlier rank holds the same shards; hybrid sharding keeps several copies."""
        return self.rank < self.shard.size * self.tensor.size

    def slices_of(self, p: Tensor) -> Group:
        """Return the group that a parameter is divided over."""
        return self.expert if division_of(p).is_dispatched else self.tensor

    def _mesh_of(self, p: Tensor) -> DeviceMesh:
        """Return the mesh that a parameter is sharded over.

        Not p.device_mesh: torch may give it an equal mesh of an earlier process group of this
        process, in which this rank had another number.
        """
        if division_of(p).is_dispatched:
            assert self.expert_mesh is not None
            return self.expert_mesh
        return self.mesh

    def sum_rows(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks that compute different rows, on the device of `values`."""
        return self.data.sum(values.to(self.device)).to(values.device)

    def global_norm(self, gradients: dict[str, Tensor], params: dict[str, Any]) -> Tensor:
        """Return the norm of the ranks' gradients: shards of slices, by name of parameter."""
        replicated, sliced, dispatched = torch.zeros(3, dtype=torch.float64, device=self.device)
        for name, gradient in gradients.items():
            square = gradient.double().square().sum().to(self.device)
            division = division_of(params[name])
            if division.is_dispatched:
                dispatched += square
            elif division.dim is not None:
                sliced += square
            else:
                replicated += square
        total = self.shard.sum(replicated) + self.tensor.sum(self.shard.sum(sliced))
        total += self.expert.sum(self.expert_shard.sum(dispatched))
        return total.sqrt().float()

    def sum_partial_gradient(self, gradient: Tensor, like: Any) -> Tensor:
        """Return a shard of a gradient; partial gradients of a replicated parameter are summed."""
        if self.tensor.size == 1 or not division_of(like).partial_gradient:
            return gradient
        return self.tensor.sum(gradient.to(self.device)).to(gradient.device)

    def all_reduce_max(self, count: int) -> int:
        """Return the largest of the ranks' counts."""
        counts = torch.tensor([count], device=self.device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        return int(counts)

    def gather_json(self, value: Any, group: Group | None = None) -> list[Any]:
        """Return one value per rank of a group, or for each part of the rows.

        They are sent as JSON, never as pickle. All ranks call this.
        """
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        padded = torch.zeros(self.all_reduce_max(len(data)), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data.to(self.device)
        parts = (group or self.data).gather(padded)
        return [json.loads(bytes(part.cpu().tolist()).rstrip(b"\0")) for part in parts]

    def broadcast_json(self, value: Any) -> Any:
        """Return the first rank's value; sent as JSON."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = self.all_reduce_max(len(data) if self.is_first else 0)
        text = torch.zeros(length, dtype=torch.uint8, device=self.device)
        if self.is_first:
            text.copy_(data)
        dist.broadcast(text, src=0)
        return json.loads(bytes(text.cpu().tolist()))

    def broadcast(self, full: Tensor | None, like: Any, dtype: torch.dtype) -> Tensor:
        """Return the first rank's full tensor of the parameter `like`, on the device."""
        shape = full_shape(like.shape, division_of(like), self.slices_of(like))
        sent = torch.empty(shape, dtype=dtype, device=self.device)
        if self.is_first:
            assert full is not None
            sent.copy_(full)
        dist.broadcast(sent, src=0)
        return sent

    def full_tensor(self, shard: Tensor, like: Any) -> Tensor:
        """Return the full tensor of the ranks' shards, on the device.

        The shards are divided as the parameter `like` is.
        """
        sharded = DTensor.from_local(
            shard.detach().to(self.device),
            self._mesh_of(like),
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return join_slices(sharded.full_tensor(), division_of(like), self.slices_of(like))

    def local_shard(self, full: Tensor, like: Any) -> Tensor:
        """Return this rank's shard of a tensor that every rank has, divided as `like` is."""
        own = slice_tensor(full.to(self.device), division_of(like), self.slices_of(like))
        mesh = self._mesh_of(like)
        sharded = distribute_tensor(own, mesh, like.placements, src_data_rank=None)
        return sharded.to_local()

    def micro_batches(
        self, batch: Batch, row_groups: Sequence[int] | None, make: MakeMicroBatches
    ) -> list[MicroBatch]:
        """Return the passes over this rank's rows; idle passes make all ranks' numbers equal."""
        rows = divide_rows(batch, row_groups, self.data.size)[self.data.rank]
        own_groups = None if row_groups is None else [row_groups[row] for row in rows]
        passes: list[MicroBatch] = []
        for micro in make(batch.select(rows), own_groups):
            passes.append(dataclasses.replace(micro, rows=[rows[i] for i in micro.rows]))
        num_idle = self.all_reduce_max(len(passes)) - len(passes)
        return passes + [self.idle_pass()] * num_idle

    def idle_pass(self) -> MicroBatch:
        """Return a short pass that predicts nothing: all its gradients are zero."""
        zero = torch.zeros(1, self.sequence.size, dtype=torch.int64)
        return MicroBatch([], zero, zero, None, torch.zeros(0, dtype=torch.int64))


def mesh_of_models(
    cluster: ClusterConfig, num_ranks: int, models: Sequence[Any], is_pool: bool = False
) -> ClusterConfig:
    """Return the settings of the ranks that hold these models; sizes that none of them uses are 1.

    Args:
        cluster: of the run.
        num_ranks: of this group of workers.
        models: transformers configurations of the models that are sharded over the ranks.
        is_pool: the workers of a role. A copy of its weights is sharded over at most all of them.
    """
    if not models:  # reward models are complete on each rank
        cluster = dataclasses.replace(
            cluster, tensor_parallel=1, sequence_parallel=1, shard_workers=0
        )
    if not any(count_experts(model) for model in models):
        cluster = dataclasses.replace(cluster, expert_parallel=1)
    if is_pool and cluster.shard_workers > num_ranks // cluster.tensor_parallel:
        cluster = dataclasses.replace(cluster, shard_workers=0)
    return cluster


def check_mesh(num_ranks: int, cluster: ClusterConfig) -> None:
    """Raise ConfigError if the parallel sizes do not fit the number of ranks."""
    tensor = cluster.tensor_parallel
    inner = tensor * cluster.sequence_parallel
    if num_ranks % inner:
        raise Conflict(
            f"{num_ranks} workers cannot be divided into groups of cluster.tensor_parallel x "
            f"cluster.sequence_parallel = {inner}",
            at="cluster.tensor_parallel",
        )
    if tensor > 1 and cluster.expert_parallel > 1:
        raise Conflict(
            f"cluster.expert_parallel={cluster.expert_parallel}: with "
            f"cluster.tensor_parallel={tensor} every expert is divided; set one of them to 1"
        )
    if cluster.shard_workers and (num_ranks // tensor) % cluster.shard_workers:
        raise Conflict(
            f"cluster.shard_workers={cluster.shard_workers} does not divide the "
            f"{num_ranks // tensor} workers that hold the same slices"
        )
    copy_size = (cluster.shard_workers or num_ranks // tensor) * tensor
    if copy_size % cluster.expert_parallel:
        raise Conflict(
            f"cluster.expert_parallel={cluster.expert_parallel} does not divide the {copy_size} "
            "workers that hold one copy of the weights"
        )


def _group_of(mesh: DeviceMesh, name: str) -> Group:
    axis = mesh[name]
    if axis.size() == 1:
        return ALONE
    return Group(axis.get_local_rank(), axis.size(), axis.get_group())


def _expert_mesh(
    device: torch.device, size: int, num_shards: int, num_slices: int
) -> tuple[Group, Group, DeviceMesh]:
    """Return the groups that experts are divided and sharded over, and FSDP2's mesh of them."""
    mesh = init_device_mesh(
        device.type,
        (size // num_shards, num_shards // num_slices, num_slices),
        mesh_dim_names=("replicate", "shard", "expert"),
    )
    is_hybrid = num_shards < size
    sharded = mesh["replicate", "shard"] if is_hybrid else mesh["shard"]
    return _group_of(mesh, "expert"), _group_of(mesh, "shard"), sharded


def divide_rows(batch: Batch, row_groups: Sequence[int] | None, size: int) -> list[list[int]]:
    """Return the rows of each of `size` ranks, with nearly equal numbers of tokens.

    Rows of one row group stay on one rank. Rows of one prompt do too, so that it is computed once,
    while no rank gets more than MAX_IMBALANCE times the mean; otherwise parts are halved.
    """
    cost = (batch.prompt.lengths + batch.response.lengths).tolist()
    parts = _units_by_prompt(batch, row_groups)
    while True:
        rows_of_parts = [[row for unit in part for row in unit] for part in parts]
        shares = _assign_to_ranks(rows_of_parts, cost, size)
        loads = [sum(cost[row] for row in share) for share in shares]
        is_balanced = max(loads) <= MAX_IMBALANCE * sum(loads) / size
        if is_balanced or all(len(part) == 1 for part in parts):
            return [sorted(share) for share in shares]
        parts = _halve(parts)


def _units_by_prompt(batch: Batch, row_groups: Sequence[int] | None) -> list[list[list[int]]]:
    """Return, for each prompt, its units: lists of rows that must stay on one rank."""
    units: dict[int, list[int]] = {}
    for row in range(len(batch)):
        group = row if row_groups is None else row_groups[row]
        units.setdefault(group, []).append(row)
    prompts = prompts_of(batch)
    by_prompt: dict[Prompt, list[list[int]]] = {}
    for unit in units.values():
        by_prompt.setdefault(prompts[unit[0]], []).append(unit)
    return list(by_prompt.values())


def _halve(parts: list[list[list[int]]]) -> list[list[list[int]]]:
    halves: list[list[list[int]]] = []
    for part in parts:
        middle = (len(part) + 1) // 2
        halves.append(part[:middle])
        if len(part) > middle:
            halves.append(part[middle:])
    return halves


def _assign_to_ranks(parts: list[list[int]], cost: list[int], size: int) -> list[list[int]]:
    """Assign parts to ranks greedily: the most expensive part first, to the least loaded rank."""
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    costs = [sum(cost[row] for row in part) for part in parts]
    for index in sorted(range(len(parts)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        shares[rank] += parts[index]
        loads[rank] += costs[index]
    return shares


@dataclass(frozen=True)
class LocalTokens:
    """This rank's part of a pass."""

    micro: MicroBatch
    predicted: Tensor  # which of the pass's response tokens are predicted from own tokens
    num_predicted: int  # of the whole pass

    def join(self, values: Tensor, group: Group) -> Tensor:
        """Return the values of all response tokens from those of the ranks. A collective."""
        full = values.new_zeros((self.num_predicted, *values.shape[1:]))
        return sum_outputs(full.index_copy(0, self.predicted, values), group)


def divide_tokens(micro: MicroBatch, group: Group) -> LocalTokens:
    """Return this rank's tokens of a pass over one row of packed tokens."""
    assert not isinstance(micro.packing, DividedTokens)
    num_tokens = micro.ids.shape[1]
    share, rest = divmod(num_tokens, group.size)
    counts = [share + (rank < rest) for rank in range(group.size)]
    start = sum(counts[: group.rank])
    end = start + counts[group.rank]
    predicted = torch.nonzero((micro.gather >= start) & (micro.gather < end))[:, 0]
    own = dataclasses.replace(
        micro,
        ids=micro.ids[:, start:end],
        positions=micro.positions[:, start:end],
        gather=micro.gather[predicted] - start,
        packing=DividedTokens(group, counts, micro.packing),
    )
    return LocalTokens(own, predicted, len(micro.gather))
