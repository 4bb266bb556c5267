"""Sampling tokens from logits by inverse CDF, with one uniform number per row and token.

Each row has its own random numbers, so a row's tokens do not depend on the other rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postgrad.model.passes.head import cache_sized_slices
from postgrad.rollout.engine import Sampling

DRAW = 256  # random numbers drawn at a time per row
MAX_TOP_LOGPROBS = 20  # most likely tokens that are kept per position

TopTokens = list[tuple[int, float]]  # the most likely tokens at one position, with log-probs


class SeededRandom:
    """The uniform numbers of trajectories: token n always gets the number n of its seed.

    The generator's state is set for each draw, which takes less time than one generator per seed.
    """

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)
        self.generator = np.random.Generator(self.philox)
        self.state: Any = self.philox.state

    def draw(self, seed: int, first: int, count: int) -> np.ndarray:
        """Return the numbers of `count` tokens from the first on."""
        skipped = first % 4  # each count of Philox gives four numbers
        self.state["state"]["key"][0] = seed
        self.state["state"]["counter"][0] = first // 4
        self.philox.state = self.state
        return self.generator.random(skipped + count)[skipped:]


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the sampled tokens (rows,) and their log-probs (rows,).

    A log-prob is that of the unfiltered distribution at the sampling temperature, also when top-p,
    top-k or min-p is on; `truncate` returns the others.

    Args:
        logits: (rows, vocabulary) in float32.
        uniforms: (rows,) numbers in [0, 1).
        sampling: the same for all rows.
    """
    slices = cache_sized_slices(logits)
    parts = [_sample_slice(logits[rows], uniforms[rows], sampling) for rows in slices]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample_slice(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    if sampling.temperature == 0.0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    scaled = logits if sampling.temperature == 1.0 else logits.div(sampling.temperature)
    logprobs = scaled.log_softmax(-1)
    cdf = _filter(logprobs.exp(), sampling).cumsum(-1)
    total = cdf[:, -1:]
    # Take the first token whose cumulative probability exceeds the target. The target stays below
    # the total, so there always is one.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms[:, None].to(cdf.dtype) * total, below_total)
    tokens = torch.searchsorted(cdf, target, right=True)[:, 0]
    tokens.clamp_(max=cdf.shape[1] - 1)  # NaN has no such token; its log-prob shows it
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def sample_mixed_tokens(
    logits: Tensor, uniforms: Tensor, samplings: Sequence[Sampling]
) -> tuple[Tensor, Tensor]:
    """Return the same as `sample_tokens`, with one Sampling per row.

    Rows with equal sampling parameters are sampled together.
    """
    rows_by_sampling = _group_rows(samplings)
    if len(rows_by_sampling) == 1:
        return sample_tokens(logits, uniforms, samplings[0])
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(samplings), dtype=logits.dtype, device=logits.device)
    for sampling, rows in rows_by_sampling.items():
        index = torch.tensor(rows, device=logits.device)
        tokens[index], logprobs[index] = sample_tokens(logits[index], uniforms[index], sampling)
    return tokens, logprobs


def truncate(logits: Tensor, logprobs: Tensor, samplings: Sequence[Sampling]) -> list[list[int]]:
    """Return the ids that the filters of `record_kept` rows keep, one list per row.

    Turns the `logprobs` (rows,) of these rows' sampled tokens into those of the distribution over
    the kept ids, in place. The lists of other rows are empty.
    """
    kept_ids: list[list[int]] = [[] for _ in samplings]
    for sampling, rows in _group_rows(samplings).items():
        if not (sampling.record_kept and sampling.filters and sampling.temperature > 0):
            continue
        index = torch.tensor(rows, device=logits.device)
        probs = _filter((logits[index] / sampling.temperature).softmax(-1), sampling)
        logprobs[index] -= probs.sum(-1).log()
        for row, row_probs in zip(rows, probs, strict=True):
            kept_ids[row] = row_probs.nonzero()[:, 0].tolist()
    return kept_ids


def _group_rows(samplings: Sequence[Sampling]) -> dict[Sampling, list[int]]:
    """Return the rows of each Sampling."""
    rows_by_sampling: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        rows_by_sampling.setdefault(sampling, []).append(row)
    return rows_by_sampling


def _filter(probs: Tensor, sampling: Sampling) -> Tensor:
    """Set the probabilities that top-k, top-p or min-p excludes to 0; the rest is not rescaled."""
    if sampling.top_k > 0:
        top = probs.topk(min(sampling.top_k, probs.shape[-1]), dim=-1).values
        probs = probs.masked_fill(probs < top[:, -1:], 0.0)
    if sampling.top_p < 1.0:
        ordered, order = probs.sort(-1, descending=True)
        sum_before = ordered.cumsum(-1) - ordered
        limit = sampling.top_p * probs.sum(-1, keepdim=True)
        ordered[:, 1:].masked_fill_((sum_before >= limit)[:, 1:], 0.0)  # the first is always kept
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    if sampling.min_p > 0.0:
        largest = probs.max(-1, keepdim=True).values
        probs = probs.masked_fill(probs < sampling.min_p * largest, 0.0)
    return probs


def filter_rows(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the same as `_filter`, with the parameters (rows,) of each row.

    A row without a filter has 0, 1 or 0. The host does not wait for the device.
    """
    ordered, order = probs.sort(-1, descending=True)
    kth = (top_k.long() - 1).clamp(0, probs.shape[-1] - 1)
    least = torch.where(top_k > 0, ordered.gather(-1, kth[:, None])[:, 0], 0.0)
    ordered = ordered.masked_fill(ordered < least[:, None], 0.0)
    sum_before = ordered.cumsum(-1) - ordered
    limit = torch.where(top_p < 1.0, top_p * ordered.sum(-1), torch.inf)
    ordered[:, 1:].masked_fill_((sum_before >= limit[:, None])[:, 1:], 0.0)  # the first stays
    ordered = ordered.masked_fill(ordered < (min_p * ordered[:, 0])[:, None], 0.0)
    return torch.zeros_like(probs).scatter(-1, order, ordered)


def logprobs_at(logits: Tensor, temperature: float) -> Tensor:
    """Return log-probs at this temperature; at 1 for temperature 0."""
    return logits.div(temperature or 1.0).log_softmax(-1)


def find_top_tokens(logprobs: Tensor, count: int) -> list[TopTokens]:
    """Return the most likely tokens and their log-probs at each position (tokens, vocabulary)."""
    values, tokens = logprobs.topk(min(count, logprobs.shape[1]))
    return [pair_tokens(*pair) for pair in zip(tokens.tolist(), values.tolist(), strict=True)]


def pair_tokens(tokens: Sequence[int], logprobs: Sequence[float]) -> TopTokens:
    return list(zip(tokens, logprobs, strict=True))
