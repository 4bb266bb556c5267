"""How a parameter is divided over the ranks of a group: slices of a full tensor."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from postgrad.errors import ConfigError
from postgrad.model.groups import Group


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
        raise ConfigError(
            f"cluster.tensor_parallel={group.size} does not divide the {length // division.parts} "
            f"units of {type(module).__name__}.{name}"
        )
    own = slice_tensor(full.detach(), division, group).clone()
    setattr(module, name, nn.Parameter(own, requires_grad=full.requires_grad))
