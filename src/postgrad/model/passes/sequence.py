"""Sequence parallelism: the tokens of a pass are divided over a group of ranks.

Each rank runs the blocks on its own tokens. Attention needs all tokens: the ranks exchange heads
for tokens, so that each computes some heads over all tokens, and exchange back (Ulysses).
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from postgrad.model.groups import Group, sum_outputs
from postgrad.model.passes.divided import DividedTokens
from postgrad.model.passes.layout import MicroBatch


@dataclass(frozen=True)
class OwnTokens:
    """This rank's part of a pass."""

    micro: MicroBatch
    predicted: Tensor  # which of the pass's response tokens are predicted from own tokens
    num_predicted: int  # of the whole pass

    def join(self, values: Tensor, group: Group) -> Tensor:
        """Return the values of all response tokens from those of the ranks. A collective."""
        full = values.new_zeros((self.num_predicted, *values.shape[1:]))
        return sum_outputs(full.index_copy(0, self.predicted, values), group)


def divide_tokens(micro: MicroBatch, group: Group) -> OwnTokens:
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
    return OwnTokens(own, predicted, len(micro.gather))
