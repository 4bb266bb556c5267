"""Sequence parallelism: the tokens of a pass are divided over a group of ranks.

Each rank runs the blocks on its own tokens. Attention needs all tokens: the ranks exchange heads
for tokens, so that each computes some heads over all tokens, and exchange back (Ulysses).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from postgrad.model.parallel.groups import Group, exchange
from postgrad.model.passes.packing import Packing
from postgrad.model.passes.row_attention import PaddedSegments


@dataclass(frozen=True)
class DividedTokens:
    """A pass whose tokens are divided over the ranks of a group, and its packing as a whole."""

    group: Group
    counts: list[int]  # tokens of each rank
    packing: Packing | PaddedSegments | None

    def to(self, device: torch.device) -> "DividedTokens":
        packing = None if self.packing is None else self.packing.to(device)
        return DividedTokens(self.group, self.counts, packing)

    def heads_for_tokens(self, x: Tensor) -> Tensor:
        """Return (1, heads / ranks, all tokens, width) from (1, heads, own tokens, width)."""
        size = self.group.size
        own = self.counts[self.group.rank]
        rows = x[0].unflatten(0, (size, -1)).transpose(1, 2).flatten(0, 1)
        received = exchange(rows, self.group, [own] * size, self.counts)
        return received.transpose(0, 1)[None]

    def tokens_for_heads(self, x: Tensor) -> Tensor:
        """Return (1, own tokens, heads, width) from (1, all tokens, heads / ranks, width)."""
        size = self.group.size
        own = self.counts[self.group.rank]
        received = exchange(x[0], self.group, self.counts, [own] * size)
        return received.unflatten(0, (size, own)).transpose(0, 1).flatten(1, 2)[None]


AnyPacking = Packing | PaddedSegments | DividedTokens
