"""The ids that top-p, top-k or min-p sampling kept at each token, replayed on other logits.

A token that was sampled from a truncated distribution has probability exp(logit) / sum(exp(logits
of the kept ids)). The loss must compute the same fraction: over the ids that were kept when the
token was sampled, whatever the weights are now.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from postgrad.types import Batch

EXCLUDED_LOGIT = -1e30  # finite: 0 * EXCLUDED_LOGIT is 0 in the entropy, and exp() of it is 0


class SampledSupport(NamedTuple):
    """Kept ids of a number of tokens.

    Attributes:
        counts: (tokens,) number of kept ids per token, on the CPU; 0 keeps the whole vocabulary.
        ids: (sum of counts,) the ids, token after token.
        first: the id of the first logit, where a rank computes a slice of the vocabulary.
    """

    counts: Tensor
    ids: Tensor
    first: int = 0

    @staticmethod
    def of(batch: Batch, rows: Sequence[int], device: torch.device) -> "SampledSupport | None":
        """Return the kept ids of the tokens of these rows; None if the batch has none."""
        if "kept_ids" not in batch.rows:
            return None
        by_row = [batch.rows["kept_ids"][row] for row in rows]
        ids = torch.cat([torch.zeros(0, dtype=torch.int32), *by_row])
        positions = batch.response.positions(torch.tensor(rows, dtype=torch.int64))
        return SampledSupport(batch.tokens["num_kept"][positions], ids.to(device, torch.int64))

    def part(self, start: int, stop: int) -> "SampledSupport":
        """Return the kept ids of the tokens [start, stop)."""
        counts = self.counts[start:stop]
        first = int(self.counts[:start].sum())
        return SampledSupport(counts, self.ids[first : first + int(counts.sum())], self.first)

    def select(self, tokens: Tensor) -> "SampledSupport":
        """Return the kept ids of these tokens, in their order."""
        by_token = self.ids.split(self.counts.tolist())
        ids = torch.cat([self.ids[:0], *(by_token[token] for token in tokens.tolist())])
        return SampledSupport(self.counts[tokens.to(self.counts.device)], ids, self.first)

    def exclude_others(self, logits: Tensor) -> Tensor:
        """Overwrite the logits (tokens, vocabulary) of ids that were not kept; returns them."""
        counts = self.counts.to(logits.device)
        excluded = (counts > 0)[:, None].repeat(1, logits.shape[-1])
        rows = torch.arange(len(counts), device=logits.device).repeat_interleave(counts)
        columns = self.ids - self.first
        is_here = (columns >= 0) & (columns < logits.shape[-1])
        excluded[rows[is_here], columns[is_here]] = False
        return logits.masked_fill_(excluded, EXCLUDED_LOGIT)
