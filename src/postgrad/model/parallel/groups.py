"""A group of processes that exchange tensors, and how a parameter is divided over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from postgrad.errors import Conflict


@dataclass(frozen=True)
class Group:
    """The processes of a group, and this one's place among them.

    Every method is a collective: all processes of the group call it, in the same order.
    """

    rank: int = 0
    size: int = 1
    handle: Any = None  # the process group; None for one process alone

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the processes, as a new tensor."""
        total = values.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(total, group=self.handle)
        return total

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return every process's tensor, in the order of the processes. All have one shape."""
        if self.size == 1:
            return [values]
        own = values.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self.handle)
        return parts

    def exchange(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[i]` leading rows to process i; return the rows received, in their order."""
        shape = (sum(received), *values.shape[1:])
        result = torch.empty(shape, dtype=values.dtype, device=values.device)
        dist.all_to_all_single(result, values.contiguous(), received, sent, group=self.handle)
        return result


ALONE = Group()


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.group.sum(grads[0]), None


class _SumOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grads[0], None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return torch.cat(group.gather(x), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grads[0].chunk(ctx.group.size, -1)[ctx.group.rank], None


class _SliceLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.chunk(group.size, -1)[group.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return torch.cat(ctx.group.gather(grads[0]), -1), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
        ctx.arguments = (group, received, sent)
        return group.exchange(x, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        group, sent, received = ctx.arguments
        return group.exchange(grads[0], sent, received), None, None, None


def sum_gradients(x: Tensor, group: Group) -> Tensor:
    """Return x; its gradient is the sum of the group's gradients."""
    return apply(_SumGradients, x, group)


def sum_outputs(x: Tensor, group: Group) -> Tensor:
    """Return the sum of the group's x; each x gets the gradient of the sum."""
    return apply(_SumOutputs, x, group)


def gather_last(x: Tensor, group: Group) -> Tensor:
    """Return the group's x side by side along the last dimension.

    Every process computes the same from it, so the gradient of x is its own part.
    """
    return apply(_GatherLast, x, group)


def slice_last(x: Tensor, group: Group) -> Tensor:
    """Return this process's part of x along the last dimension; the inverse of gather_last."""
    return apply(_SliceLast, x, group)


def exchange(x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    """Return the rows that the group sent here (see Group.exchange); gradients go back."""
    return apply(_Exchange, x, group, sent, received)


def apply(function: Any, *arguments: Any) -> Tensor:
    result: Any = function.apply(*arguments)
    return result


# ---- how a parameter is divided over a group: slices of a full tensor


class Division(NamedTuple):
    """How a parameter is divided over the ranks of a group."""

    dim: int | None = None  # the sliced dimension; None: replicated on every rank
    parts: int = 1  # 2: gate and up are stored one after the other, and each is sliced
    partial_gradient: bool = False  # a rank's gradient is that of its own heads
    padding: int = 0  # zeros at the end of the last slice, which the full tensor does not have
    is_dispatched: bool = False  # experts that tokens are sent to: divided over the expert group


REPLICATED = Division()


def set_division(p: Tensor, division: Division) -> None:
    """Note on a parameter how it is divided."""
    p.postgrad_division = division  # type: ignore[attr-defined]


def division_of(p: Tensor) -> Division:
    """Return how a parameter is divided."""
    return getattr(p, "postgrad_division", REPLICATED)


def slice_tensor(full: Tensor, division: Division, group: Group) -> Tensor:
    """Return this rank's slice of a full tensor."""
    if division.dim is None or group.size == 1:
        return full
    if division.padding:
        shape = list(full.shape)
        shape[division.dim] = division.padding
        full = torch.cat([full, full.new_zeros(shape)], division.dim)
    parts: list[Tensor] = []
    for part in full.chunk(division.parts, division.dim):
        parts.append(part.chunk(group.size, division.dim)[group.rank])
    return torch.cat(parts, division.dim)


def full_shape(own: Sequence[int], division: Division, group: Group) -> list[int]:
    """Return the shape of the full tensor of a slice."""
    shape = list(own)
    if division.dim is not None and group.size > 1:
        shape[division.dim] = shape[division.dim] * group.size - division.padding
    return shape


def join_slices(own: Tensor, division: Division, group: Group) -> Tensor:
    """Return the full tensor of the ranks' slices. A collective."""
    if division.dim is None or group.size == 1:
        return own
    return join_parts(group.gather(own), division)


def join_parts(slices: list[Tensor], division: Division) -> Tensor:
    """Return the full tensor of all ranks' slices."""
    if division.dim is None:
        return slices[0]
    parts = [s.chunk(division.parts, division.dim) for s in slices]
    ordered = [s[part] for part in range(division.parts) for s in parts]
    full = torch.cat(ordered, division.dim)
    return full.narrow(division.dim, 0, full.shape[division.dim] - division.padding)


def replace_parameter(module: nn.Module, name: str, division: Division, group: Group) -> None:
    """Replace a parameter by this rank's slice. Raises ConfigError if the size does not fit."""
    full = module.get_parameter(name)
    assert division.dim is not None
    length = full.shape[division.dim] + division.padding
    if length % (group.size * division.parts):
        raise Conflict(
            f"cluster.tensor_parallel={group.size} does not divide the {length // division.parts} "
            f"units of {type(module).__name__}.{name}"
        )
    own = slice_tensor(full.detach(), division, group).clone()
    setattr(module, name, nn.Parameter(own, requires_grad=full.requires_grad))
