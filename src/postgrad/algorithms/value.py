"""The critic: clipped value loss and how much of the returns it explains."""

import torch
from torch import Tensor

from postgrad.algorithms.losses import TokenLoss


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.5
) -> TokenLoss:
    """(tokens,) max((v - G)^2, (clip(v, v_old ± clip) - G)^2) / 2; without clipping (v - G)^2 / 2.

    Only `values` carry a gradient. Metrics: clip_fraction (the clipped branch is strictly larger).
    """
    target = returns.detach()
    old_values = old_values.detach()
    squared = (values - target).square()
    if clip is None:
        return TokenLoss(0.5 * squared, {"clip_fraction": torch.zeros_like(target)})
    clipped = (values.clamp(old_values - clip, old_values + clip) - target).square()
    return TokenLoss(
        0.5 * torch.maximum(squared, clipped),
        {"clip_fraction": (clipped > squared).to(target.dtype)},
    )


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Scalar 1 - var(G - v) / (var(G) + 1e-5) over unmasked tokens, variances with n - 1.

    NaN for fewer than two tokens.
    """
    kept = mask.bool()
    target = returns[kept]
    error = (returns - values.detach())[kept]
    if target.numel() < 2:
        return torch.full((), torch.nan, dtype=returns.dtype, device=returns.device)
    return 1 - error.var() / (target.var() + 1e-5)
