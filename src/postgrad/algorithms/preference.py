"""Preference losses over pairs: DPO and its relatives, from log-probs of whole responses.

A pair is (chosen, rejected); columns are (pairs,). Use `row_logprobs` to add up token log-probs. With
h = (chosen - rejected) - (reference_chosen - reference_rejected), the reference terms 0 when reference-free:

    sigmoid   -(1 - s) · log σ(beta·h) - s · log σ(-beta·h)      s = label_smoothing, the share of pairs labeled wrongly
    ipo       (h - 1 / (2 beta))^2                               meant for MEAN log-probs a token: row_logprobs(average=True)
    hinge     max(0, 1 - beta·h)
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from postgrad.algorithms.masked import row_mean, row_sum
from postgrad.errors import ConfigError, did_you_mean

PREFERENCE_LOSSES = ("sigmoid", "ipo", "hinge")


class PairLoss(NamedTuple):
    """`values` (pairs,); `metrics`: (pairs,) detached columns to average."""

    values: Tensor
    metrics: dict[str, Tensor]


def row_logprobs(
    logprobs: Tensor, mask: Tensor, rows: Tensor, num_rows: int, *, average: bool = False
) -> Tensor:
    """(rows,) the sum (or mean, for ipo) of token log-probs over each row's unmasked tokens."""
    return (row_mean if average else row_sum)(logprobs, mask, rows, num_rows)


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> PairLoss:
    """(pairs,) the loss named by `loss`, one of PREFERENCE_LOSSES. Without references it is reference-free; they carry no gradient.

    Metrics: reward_chosen = beta·(chosen - reference), reward_rejected, margin = their difference, accuracy (margin > 0).
    Raises: ConfigError for an unknown loss, beta <= 0, smoothing outside [0, 0.5) or with another loss; ValueError for one
    reference without the other.
    """
    if loss not in PREFERENCE_LOSSES:
        raise ConfigError(
            f"unknown preference loss {loss!r}; {did_you_mean(loss, PREFERENCE_LOSSES)}"
        )
    if not beta > 0:
        raise ConfigError(
            f"beta is {beta}; preference losses divide by it or scale with it and need beta > 0"
        )
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and loss != "sigmoid"):
        raise ConfigError(
            f"label_smoothing is {label_smoothing} with loss {loss}; it is in [0, 0.5) and for sigmoid only"
        )
    if (reference_chosen is None) != (reference_rejected is None):
        raise ValueError(
            "one reference column without the other; give both, or none for the reference-free loss"
        )
    gain_chosen = chosen if reference_chosen is None else chosen - reference_chosen.detach()
    gain_rejected = (
        rejected if reference_rejected is None else rejected - reference_rejected.detach()
    )
    h = gain_chosen - gain_rejected
    if loss == "sigmoid":
        values = -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(
            -beta * h
        )
    elif loss == "ipo":
        values = (h - 1 / (2 * beta)).square()
    else:
        values = torch.relu(1 - beta * h)
    margin = beta * h.detach()
    return PairLoss(
        values,
        {
            "reward_chosen": beta * gain_chosen.detach(),
            "reward_rejected": beta * gain_rejected.detach(),
            "margin": margin,
            "accuracy": (margin > 0).to(margin.dtype),
        },
    )
