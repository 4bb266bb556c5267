"""The tokens that the losses clip_cov and kl_cov treat differently."""

from collections.abc import Mapping

import torch
from torch import Tensor

from postgrad.algorithms.covariance import cov_selection
from postgrad.types import Batch


def uniforms(batch: Batch, seed: int, step: int) -> Tensor:
    """(tokens,) random numbers in [0, 1), determined by run and step, for the random choice."""
    generator = torch.Generator().manual_seed((seed << 20) + step)
    return torch.rand(batch.num_tokens, generator=generator)


def select_by_covariance(batch: Batch, options: Mapping[str, float]) -> Tensor:
    """(tokens,) bool: the selected tokens of one optimizer step.

    `options` are those of algorithms.losses.Loss.selection.
    """
    return cov_selection(
        batch.tokens["old_logprobs"],
        batch.tokens["advantages"],
        batch.tokens["loss_mask"],
        share=options["cov_share"],
        band=(options["cov_low"], options["cov_high"]) if "cov_low" in options else None,
        uniforms=batch.tokens["uniforms"],
    )
