"""The vocabulary in slices: each rank of a tensor-parallel group has some rows of the LM head.

Each rank computes the logits of its own ids. A distribution over all ids is put together from
those of the slices: log-sum-exp, entropy and so on are exchanged, logits never.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postgrad.model.parallel.groups import Group


@dataclass(frozen=True)
class VocabularySlice:
    """The ids [first, first + size) of this rank; the group has all `total` ids."""

    group: Group
    first: int
    size: int
    total: int

    def local_ids(self, ids: Tensor) -> Tensor:
        """Return the rows of the ids in this slice; -1 for ids of other ranks."""
        local = ids - self.first
        return local.where((local >= 0) & (local < self.size), -1)

    def join(
        self, targets: Tensor, logprobs: Tensor, entropy: Tensor, sum_squares: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the columns of the whole vocabulary from those of the slices. A collective.

        `targets` are local ids, (tokens,) or (tokens, targets). With w = exp(own lse - lse), the
        probability of this slice, the entropy is the sum over the slices of w · (H - log w).
        """
        full_lse = torch.stack(self.group.gather(lse)).logsumexp(0)
        log_share = lse - full_lse
        share = log_share.exp()
        own_logits = as_table(logprobs) + lse[:, None]
        columns = [
            (share * (entropy - log_share))[:, None],
            (share.square() * sum_squares)[:, None],
            own_logits.masked_fill(as_table(targets) < 0, 0.0),
        ]
        total = self.group.sum(torch.cat(columns, 1))
        full_logprobs = (total[:, 2:] - full_lse[:, None]).reshape(targets.shape)
        return full_logprobs, total[:, 0], total[:, 1], full_lse

    def join_top(self, ids: Tensor, logits: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same of the whole vocabulary from those of the slices. A collective.

        `ids` and `logits` are (tokens, top) candidates of each slice, `lse` is (tokens,).
        """
        all_logits = torch.cat(self.group.gather(logits), 1)
        all_ids = torch.cat(self.group.gather(ids), 1)
        best = all_logits.topk(ids.shape[1])
        full_lse = torch.stack(self.group.gather(lse)).logsumexp(0)
        return all_ids.gather(1, best.indices), best.values, full_lse


def as_table(values: Tensor) -> Tensor:
    """Return (tokens, targets) values; a column becomes a table with one target per token."""
    return values if values.dim() == 2 else values[:, None]


def set_vocabulary(model: Any, vocabulary: VocabularySlice) -> None:
    """Note on the model which part of the vocabulary its head has."""
    model.postgrad_vocabulary = vocabulary


def vocabulary_of(model: Any) -> VocabularySlice | None:
    """Return what set_vocabulary noted; None if the head has all ids."""
    return vars(model).get("postgrad_vocabulary")
