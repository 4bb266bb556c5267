"""Losses of supervised fine-tuning, one number per token of a given response.

With p = the policy's probability of the token:

    nll   -log p   maximum likelihood
    dft   -sg(p) · log p   the gradient of -p: unlikely tokens count little (Wu et al. 2025)
"""

from torch import Tensor

SFT_LOSSES = ("nll", "dft")


def sft_loss(logprobs: Tensor, kind: str = "nll") -> Tensor:
    """(tokens,) the loss named by `kind`, nll or dft, from the log-probs of the given tokens."""
    if kind == "dft":
        return -logprobs.detach().exp() * logprobs
    return -logprobs
