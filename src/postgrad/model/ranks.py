"""Several processes that train one model: who they are, which rows each computes, and how they put their parts together.

Every rank sees the whole batch of an optimizer step, so all weights and denominators are global before the rows are divided: the sum of
the ranks' gradients is the gradient of one process.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from postgrad.model.passes.layout import MicroBatch
from postgrad.types import Batch

UNEVEN = 1.05  # the most loaded rank may have this much more than the mean before groups of one prompt are divided


@dataclass(frozen=True)
class Ranks:
    """This process among the others. Every method but the properties is a meeting: all ranks call it, in the same order."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    offload: bool = False

    @staticmethod
    def from_process_group(device: torch.device, offload: bool = False) -> "Ranks":
        """The ranks of the process group that was set up already."""
        return Ranks(
            dist.get_rank(),
            dist.get_world_size(),
            device,
            init_device_mesh(device.type, (dist.get_world_size(),)),
            offload,
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks, where `values` lies."""
        there = values.detach().to(self.device, copy=True)
        dist.all_reduce(there)
        return there.to(values.device)

    def most(self, count: int) -> int:
        """The largest of the ranks' counts."""
        counts = torch.tensor([count], device=self.device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        return int(counts)

    def gather(self, plain: Any) -> list[Any]:
        """Every rank's plain value, in the order of the ranks. It travels as JSON, never as code."""
        data = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8).to(
            self.device
        )
        room = torch.zeros(self.most(len(data)), dtype=torch.uint8, device=self.device)
        room[: len(data)] = data
        parts = [torch.zeros_like(room) for _ in range(self.size)]
        dist.all_gather(parts, room)
        return [json.loads(bytes(part.cpu().tolist()).rstrip(b"\0")) for part in parts]

    def full(self, shard: Tensor, like: Any) -> Tensor:
        """The whole tensor of which each rank has a shard, cut as the parameter `like` is; on the device."""
        whole = DTensor.from_local(
            shard.detach().to(self.device),
            self.mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return whole.full_tensor()

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that every rank has."""
        return distribute_tensor(
            whole.to(self.device), self.mesh, [Shard(0)], src_data_rank=None
        ).to_local()

    def passes(self, batch: Batch, row_groups: Sequence[int] | None, make: Any) -> list[MicroBatch]:
        """The passes over this rank's rows, as many as every other rank has: the last ones may be idle."""
        rows = divide(batch, row_groups, self.size)[self.rank]
        units = None if row_groups is None else [row_groups[row] for row in rows]
        mine = [
            dataclasses.replace(micro, rows=[rows[i] for i in micro.rows])
            for micro in make(batch.select(rows), units)
        ]
        return [*mine, *[idle_pass()] * (self.most(len(mine)) - len(mine))]


def idle_pass() -> MicroBatch:
    """A pass over one token that predicts nothing: its gradient is zero everywhere."""
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch([], nothing, nothing, None, torch.zeros(0, dtype=torch.int64))


def divide(batch: Batch, row_groups: Sequence[int] | None, size: int) -> list[list[int]]:
    """Rows for each of `size` ranks with nearly equal numbers of tokens; rows of one unit stay together.

    Rows of one prompt stay together too, so that it is computed once, as long as no rank gets more than UNEVEN times its share; else
    the groups are halved, and halved again.
    """
    cost = (batch.prompt.lengths + batch.response.lengths).tolist()
    units: dict[int, list[int]] = {}
    for row in range(len(batch)):
        units.setdefault(row if row_groups is None else row_groups[row], []).append(row)
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    prompts = [tuple(p.tolist()) for p in batch.prompt.split()]
    for unit in units.values():
        groups.setdefault(prompts[unit[0]], []).append(unit)
    parts = list(groups.values())
    while True:
        shares = _spread([[row for unit in part for row in unit] for part in parts], cost, size)
        loads = [sum(cost[row] for row in share) for share in shares]
        if max(loads) <= UNEVEN * sum(loads) / size or all(len(part) == 1 for part in parts):
            return [sorted(share) for share in shares]
        parts = [
            half
            for part in parts
            for half in (part[: (len(part) + 1) // 2], part[(len(part) + 1) // 2 :])
            if half
        ]


def _spread(parts: list[list[int]], cost: list[int], size: int) -> list[list[int]]:
    """The heaviest part first, each to the rank that has least."""
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    weights = [sum(cost[row] for row in part) for part in parts]
    for index in sorted(range(len(parts)), key=lambda i: (-weights[i], i)):
        target = loads.index(min(loads))
        shares[target] += parts[index]
        loads[target] += weights[index]
    return shares
