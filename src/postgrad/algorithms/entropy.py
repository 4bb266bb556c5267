"""Log-probs of given tokens, entropy and sums of squared probabilities, from logits.

Logits are (..., vocabulary) of any dtype. Arithmetic is float32 (float64 stays float64), in slices
of `chunk` positions, so that no second tensor of the logits' size is needed. With gradients each
slice is recomputed in the backward pass. Results do not depend on `chunk`. A logit of -inf is a
token that cannot occur.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 128


def selective_log_softmax(
    logits: Tensor, index: Tensor, *, temperature: float = 1.0, chunk: int = CHUNK
) -> Tensor:
    """(...,) log-softmax of `logits` / temperature at the token ids `index` (...,)."""

    def pick(part: Tensor, ids: Tensor) -> Tensor:
        logprobs = torch.log_softmax(_wide(part) / temperature, -1)
        return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    return _by_slice(pick, logits, chunk, index)


def entropy(logits: Tensor, *, temperature: float = 1.0, chunk: int = CHUNK) -> Tensor:
    """(...,) -sum_v p_v log p_v in nats, between 0 and log(vocabulary)."""

    def measure(part: Tensor) -> Tensor:
        logprobs = torch.log_softmax(_wide(part) / temperature, -1)
        # 0 · -inf must be 0, in the value and in the gradient.
        return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0)).sum(-1)

    return _by_slice(measure, logits, chunk)


def sum_probs_squared(logits: Tensor, *, temperature: float = 1.0, chunk: int = CHUNK) -> Tensor:
    """(...,) sum_v p_v^2, which optimal_token_baseline reads."""

    def measure(part: Tensor) -> Tensor:
        return torch.softmax(_wide(part) / temperature, -1).square().sum(-1)

    return _by_slice(measure, logits, chunk)


def _wide(part: Tensor) -> Tensor:
    """float64 unchanged, every other dtype as float32."""
    return part if part.dtype == torch.float64 else part.float()


def _by_slice(
    function: Callable[..., Tensor], logits: Tensor, chunk: int, *others: Tensor
) -> Tensor:
    """Return `function` over slices of the leading dimensions of `logits` and of `others`."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk} is too small; a slice has at least one position")
    shape = logits.shape[:-1]
    flat = [
        logits.flatten(0, -2) if logits.dim() > 1 else logits.unsqueeze(0),
        *(other.reshape(-1) for other in others),
    ]
    # Not by slicing: the backward of split joins the parts once, slicing pads each to full size.
    parts = list(zip(*(tensor.split(chunk) for tensor in flat), strict=True))
    outputs: list[Any]  # torch does not say what checkpoint returns
    if len(parts) > 1 and torch.is_grad_enabled() and logits.requires_grad:
        outputs = [
            checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False)
            for part in parts
        ]
    else:
        outputs = [function(*part) for part in parts]
    return torch.cat(outputs).reshape(shape)
