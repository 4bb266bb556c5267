"""Picking tokens: inverse-CDF sampling from one uniform number a row and token, so that each row's randomness is its own."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from postgrad.model.passes.head import cache_sized_slices
from postgrad.rollout.engine import Sampling

BLOCK = 32  # uniforms drawn at a time for one row


class RowRandom:
    """The uniforms of one trajectory, in blocks; the n-th token always gets the n-th number of its seed."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.Generator(np.random.Philox(key=seed))

    def block(self) -> np.ndarray:
        return self.numbers(BLOCK)

    def numbers(self, count: int) -> np.ndarray:
        """The next numbers of the row."""
        return self.generator.random(count)


def pick(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(rows,) tokens and their log-probs from float32 logits (rows, vocabulary) and uniforms (rows,) in [0, 1).

    The log-prob is that of the whole distribution at the sampling temperature, also where a filter (top-p, top-k, min-p) is on.
    """
    tokens, logprobs = zip(
        *(_pick(logits[rows], uniforms[rows], sampling) for rows in cache_sized_slices(logits)),
        strict=True,
    )
    return torch.cat(tokens), torch.cat(logprobs)


def _pick(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    if sampling.temperature == 0.0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    logprobs = (
        logits if sampling.temperature == 1.0 else logits.div(sampling.temperature)
    ).log_softmax(-1)
    probs = _filter(logprobs.exp(), sampling)
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    # The first token whose cumulated probability exceeds the target; the target stays below the total, so one always does.
    target = torch.minimum(
        uniforms[:, None].to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    tokens = torch.searchsorted(cdf, target, right=True)[:, 0]
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def pick_mixed(
    logits: Tensor, uniforms: Tensor, samplings: Sequence[Sampling]
) -> tuple[Tensor, Tensor]:
    """The same with a sampling for each row; rows with equal ones are picked together."""
    kinds: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        kinds.setdefault(sampling, []).append(row)
    if len(kinds) == 1:
        return pick(logits, uniforms, samplings[0])
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(samplings), dtype=logits.dtype, device=logits.device)
    for sampling, rows in kinds.items():
        at = torch.tensor(rows, device=logits.device)
        tokens[at], logprobs[at] = pick(logits[at], uniforms[at], sampling)
    return tokens, logprobs


def _filter(probs: Tensor, sampling: Sampling) -> Tensor:
    if sampling.top_k > 0:
        floor = probs.topk(min(sampling.top_k, probs.shape[-1]), dim=-1).values[:, -1:]
        probs = probs.masked_fill(probs < floor, 0.0)
    if sampling.top_p < 1.0:
        ordered, order = probs.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p * probs.sum(-1, keepdim=True), 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    if sampling.min_p > 0.0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.max(-1, keepdim=True).values, 0.0)
    return probs
