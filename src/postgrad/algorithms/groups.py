"""Sums, means and standard deviations within groups, and whitening over the batch.

One rule for every advantage estimator:
  - a baseline needs two members: a set with fewer has mean 0 and standard deviation 1, so A = R;
  - a set whose values are all equal is exactly 0 after centering, not rounding noise / epsilon;
  - standard deviations divide by n - 1; a single number whitens to 0, never to NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from postgrad.algorithms.masked import widened

STD_EPS = 1e-6  # added to a group's standard deviation
WHITEN_EPS = 1e-8  # added to the variance under the square root when whitening over tokens


def as_float(values: Tensor) -> Tensor:
    """float32 and float64 unchanged, every other dtype as float32.

    Half precision cannot count the rows of a large group.
    """
    return widened(values) if values.is_floating_point() else values.float()


def finite(name: str, values: Tensor) -> Tensor:
    """`values` as floats. Raises ValueError for NaN and infinity, which would spoil their group."""
    values = as_float(values)
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"{name} has {int(bad.sum())} entries that are not finite, the first at {first}; "
            "leave out the failed rows"
        )
    return values


@dataclass(frozen=True)
class Groups:
    """The group of each row: `index` (rows,) in 0..num-1, whatever the group ids were."""

    index: Tensor
    num: int

    @staticmethod
    def of(ids: Tensor, device: torch.device) -> "Groups":
        unique, index = torch.unique(ids.to(device), return_inverse=True)
        return Groups(index, int(unique.numel()))

    def sum(self, values: Tensor) -> Tensor:
        """Return (groups,) sums of a row column."""
        zeros = torch.zeros(self.num, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.index, values)

    def expand(self, values: Tensor) -> Tensor:
        """Return a group column as a row column."""
        return values[self.index]

    def max(self, values: Tensor) -> Tensor:
        """Return (groups,) maxima of a row column."""
        low = torch.full((self.num,), -torch.inf, dtype=values.dtype, device=values.device)
        return low.scatter_reduce(0, self.index, values, "amax")

    def all_equal(self, values: Tensor) -> Tensor:
        """Return (groups,) bool: every member has the same value."""
        return self.max(values) == -self.max(-values)


def centered(rewards: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """(rows,) R - mean_g and (rows,) std_g with n - 1, by the rule in the module docstring."""
    counts = groups.sum(torch.ones_like(rewards))  # (groups,)
    alone = counts < 2
    mean = torch.where(alone, 0.0, groups.sum(rewards) / counts)
    # Equal rewards minus their rounded mean are not exactly 0, so 0 is set instead of computed.
    flat = groups.all_equal(rewards) & ~alone
    offset = torch.where(groups.expand(flat), 0.0, rewards - groups.expand(mean))
    variance = groups.sum(offset.square()) / (counts - 1).clamp(min=1)
    std = torch.where(alone, 1.0, variance.sqrt())
    return offset, groups.expand(std)


def whiten(values: Tensor, counts: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8), where entry i counts as `counts[i]` equal numbers.

    The variance divides by n - 1. `counts` is a mask for a token column, or the number of trainable
    tokens for a row column. Entries with count 0 become 0. If fewer than two numbers are counted or
    all are equal, everything becomes 0 (verl raises for fewer than two).
    """
    weights = counts.to(values.dtype)
    total = weights.sum()
    counted = values[weights > 0]
    if counted.numel() == 0 or bool(total < 2) or bool((counted == counted[0]).all()):
        return torch.zeros_like(values)
    # A NaN at an entry with count 0 must not reach the sums.
    values = torch.where(weights > 0, values, counted[0])
    mean = (values * weights).sum() / total
    variance = ((values - mean).square() * weights).sum() / (total - 1)
    return torch.where(weights > 0, (values - mean) / (variance + WHITEN_EPS).sqrt(), 0.0)


def normalize_rows(values: Tensor, eps: float = STD_EPS) -> Tensor:
    """(rows,) (x - mean) / (std + eps) over all rows, std with n - 1, as Classmate-CoT does.

    A single row and equal rows give 0.
    """
    if values.numel() < 2 or bool((values == values[0]).all()):
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + eps)
