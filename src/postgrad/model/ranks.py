"""The ranks that train one model: their collectives, and which rows each rank computes.

Every rank gets the full batch of an optimizer step, so loss weights and denominators are global
before the rows are divided. The sum of the ranks' gradients is the gradient of one process.
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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from postgrad.model.passes.layout import MicroBatch
from postgrad.types import Batch

# The most loaded rank may have this many times the mean before rows of one prompt are divided.
MAX_IMBALANCE = 1.05

MakeMicroBatches = Callable[[Batch, list[int] | None], list[MicroBatch]]


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks.

    Every method is a collective: all ranks call it, in the same order.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    offload: bool = False

    @staticmethod
    def from_process_group(device: torch.device, offload: bool = False) -> "Ranks":
        """Return the ranks of the initialized default process group."""
        size = dist.get_world_size()
        mesh = init_device_mesh(device.type, (size,))
        return Ranks(dist.get_rank(), size, device, mesh, offload)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks, on the device of `values`."""
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    def all_reduce_max(self, count: int) -> int:
        """Return the largest of the ranks' counts."""
        counts = torch.tensor([count], device=self.device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        return int(counts)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value in the order of the ranks; sent as JSON, never as pickle."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        padded = torch.zeros(self.all_reduce_max(len(data)), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data.to(self.device)
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [json.loads(bytes(part.cpu().tolist()).rstrip(b"\0")) for part in parts]

    def full_tensor(self, shard: Tensor, like: Any) -> Tensor:
        """Return the full tensor of the ranks' shards, on the device.

        The shards are divided as the parameter `like` is.
        """
        sharded = DTensor.from_local(
            shard.detach().to(self.device),
            self.mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return sharded.full_tensor()

    def local_shard(self, full: Tensor) -> Tensor:
        """Return this rank's shard of a tensor that every rank has."""
        sharded = distribute_tensor(full.to(self.device), self.mesh, [Shard(0)], src_data_rank=None)
        return sharded.to_local()

    def micro_batches(
        self, batch: Batch, row_groups: Sequence[int] | None, make: MakeMicroBatches
    ) -> list[MicroBatch]:
        """Return the passes over this rank's rows; idle passes make all ranks' numbers equal."""
        rows = divide_rows(batch, row_groups, self.size)[self.rank]
        own_groups = None if row_groups is None else [row_groups[row] for row in rows]
        passes: list[MicroBatch] = []
        for micro in make(batch.select(rows), own_groups):
            passes.append(dataclasses.replace(micro, rows=[rows[i] for i in micro.rows]))
        num_idle = self.all_reduce_max(len(passes)) - len(passes)
        return passes + [idle_pass()] * num_idle


def idle_pass() -> MicroBatch:
    """Return a pass over one token that predicts nothing: all its gradients are zero."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch([], zero, zero, None, torch.zeros(0, dtype=torch.int64))


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
    prompts = [tuple(prompt.tolist()) for prompt in batch.prompt.split()]
    by_prompt: dict[tuple[int, ...], list[list[int]]] = {}
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
