"""The loss of a method on a micro-batch, checked, so that a mistake in it is one line."""

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from postgrad.errors import RunError
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.types import Batch, MissingColumnError
from postgrad.user_code import place_of

# Token columns that some steps do not have, and what to write instead.
ABSENT = {
    "old_logprobs": "a step with one update computes none: use "
    'batch.tokens.get("old_logprobs", current.logprobs.detach()), or override token_losses instead',
    "reference_logprobs": "set method.kl=loss (or method.kl=reward), which computes it",
}


class HasLoss(Protocol):
    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor: ...


def checked_loss(
    objective: HasLoss, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
) -> Tensor:
    """Return the objective's loss.

    Raises: RunError if it reads a column that the batch does not have, or is not one number with a
        gradient.
    """
    name = f"{type(objective).__qualname__}.loss"
    try:
        loss = objective.loss(batch, current, metrics)
    except MissingColumnError as error:
        raise RunError(f"{name}: {error}{_hint(error, batch)}{place_of(error)}") from error
    except AttributeError as error:
        if error.obj is not objective:
            raise
        kind = type(objective).__qualname__
        raise RunError(
            f"{kind} has no attribute {error.name}{place_of(error)}; a loss sees the batch and the "
            f'configuration: set a column in a stage, such as batch.rows["{error.name}"]'
        ) from error
    _check(loss, name)
    return loss


def check_loss(loss: Tensor, grad_norm: float) -> None:
    """Raise RunError for an update whose loss is not finite although its gradient is."""
    if math.isfinite(grad_norm) and not torch.isfinite(loss):
        raise RunError(
            f"the loss is {float(loss)} although the gradient norm is {grad_norm:.3g}; look for a "
            "logarithm, a root or a division in the loss or the critic's targets that fails for "
            "some tokens"
        )


def _hint(error: MissingColumnError, batch: Batch) -> str:
    if error.kind == "token" and error.name in ABSENT:
        return f"; {ABSENT[error.name]}"
    if error.kind == "token" and error.name in batch.rows:
        return f'; it is a row column: use batch.expand(batch.rows["{error.name}"])'
    return ""


def _check(loss: Any, name: str) -> None:
    if not isinstance(loss, Tensor):
        raise RunError(f"{name} returned {type(loss).__name__}; return a tensor with one number")
    if loss.numel() != 1:
        raise RunError(
            f"{name} returned a tensor of the shape {tuple(loss.shape)}; return the sum of its "
            'values times batch.tokens["loss_weight"]'
        )
    if not loss.requires_grad:
        raise RunError(
            f"{name} returned a number without gradient; compute it from current.logprobs without "
            "detach()"
        )
