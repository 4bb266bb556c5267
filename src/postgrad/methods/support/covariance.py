"""The tokens that the losses clip_cov and kl_cov treat differently."""

import torch
from torch import Tensor

from postgrad.algorithms.covariance import cov_selection
from postgrad.types import Batch


def uniforms(batch: Batch, seed: int, step: int) -> Tensor:
    """(tokens,) random numbers in [0, 1), determined by run and step, for the random choice."""
    generator = torch.Generator().manual_seed((seed << 20) + step)
    return torch.rand(batch.num_tokens, generator=generator)


def select_by_covariance(batch: Batch, band: tuple[float, float] | None) -> Tensor:
    """(tokens,) bool: the selected tokens of one optimizer step."""
    return cov_selection(
        batch.tokens["old_logprobs"],
        batch.tokens["advantages"],
        batch.tokens["loss_mask"],
        band=band,
        uniforms=batch.tokens["uniforms"],
    )
