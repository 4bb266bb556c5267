"""Covariance of log-probs and advantages per token, which clip_cov and kl_cov select tokens by."""

import torch
from torch import Tensor

from postgrad.algorithms.masked import masked_mean


def token_covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(tokens,) (A - mean A) · (logprobs - mean logprobs), means over the mask; 0 where masked."""
    if not bool(mask.any()):
        return torch.zeros_like(logprobs)
    advantage_offset = advantages - masked_mean(advantages, mask)
    logprob_offset = logprobs - masked_mean(logprobs, mask)
    return torch.where(mask.bool(), advantage_offset * logprob_offset, 0.0).detach()


def cov_selection(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    share: float = 2e-4,
    band: tuple[float, float] | None = None,
    uniforms: Tensor | None = None,
) -> Tensor:
    """(tokens,) bool: the tokens that clip_cov and kl_cov treat differently.

    Selects max(1, floor(share · number of unmasked tokens)) tokens by token_covariance.

    Args:
        band: None (kl_cov) selects the largest covariances; the earlier token wins a tie.
            (low, high) (clip_cov; the paper uses 1 and 5) selects at random among the tokens with
            low < covariance < high. If there are too few, all of them are selected.
        uniforms: (tokens,) random numbers, drawn once per batch; a band needs them. The candidates
            with the smallest numbers are selected.

    Call it once per optimizer step, over the whole batch, with the old log-probs. verl selects
    within each micro-batch, so its gradient depends on the split.

    Raises: ValueError for a band without `uniforms`.
    """
    mask = mask.bool()
    num_selected = max(1, int(share * int(mask.sum())))
    covariance = token_covariance(logprobs, advantages, mask)
    if band is None:
        candidates = mask
        rank = -covariance
    else:
        if uniforms is None:
            raise ValueError("a band needs `uniforms`: one random number per token of the batch")
        low, high = band
        candidates = mask & (covariance > low) & (covariance < high)
        rank = uniforms
    order = torch.where(candidates, rank, torch.inf).argsort(stable=True)[:num_selected]
    selected = torch.zeros_like(mask)
    selected[order] = True
    return selected & candidates
