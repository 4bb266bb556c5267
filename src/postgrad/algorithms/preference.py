"""Preference losses over pairs, DPO and its relatives, from log-probs of whole responses.

A pair is (chosen, rejected); columns are (pairs,). `row_logprobs` adds up token log-probs. With
h = (chosen - rejected) - (reference_chosen - reference_rejected), the reference terms 0 if
reference-free, and s = label_smoothing, the share of pairs with a wrong label:

    sigmoid   -(1 - s) · log σ(beta·h) - s · log σ(-beta·h)
    ipo       (h - 1 / (2 beta))^2      for mean log-probs per token: row_logprobs(average=True)
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
    """(pairs,) the loss named by `loss`, one of PREFERENCE_LOSSES.

    Without reference columns it is reference-free. No gradient reaches the reference.

    Metrics: reward_chosen = beta·(chosen - reference), reward_rejected, margin = their difference,
    accuracy (margin > 0).

    Raises:
        ConfigError: unknown loss, beta <= 0, label_smoothing outside [0, 0.5) or not with sigmoid.
        ValueError: one reference column without the other.
    """
    if loss not in PREFERENCE_LOSSES:
        raise ConfigError(
            f"unknown preference loss {loss!r}; {did_you_mean(loss, PREFERENCE_LOSSES)}"
        )
    if not beta > 0:
        raise ConfigError(f"beta={beta} is out of range; preference losses need beta > 0")
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and loss != "sigmoid"):
        raise ConfigError(
            f"label_smoothing={label_smoothing} with loss {loss} is out of range; "
            "it must be in [0, 0.5), and 0 unless the loss is sigmoid"
        )
    if (reference_chosen is None) != (reference_rejected is None):
        raise ValueError("one reference column is missing; give both, or none (reference-free)")
    gain_chosen = _subtract(chosen, reference_chosen)
    gain_rejected = _subtract(rejected, reference_rejected)
    h = gain_chosen - gain_rejected
    if loss == "sigmoid":
        correct_label = -(1 - label_smoothing) * logsigmoid(beta * h)
        wrong_label = -label_smoothing * logsigmoid(-beta * h)
        values = correct_label + wrong_label
    elif loss == "ipo":
        values = (h - 1 / (2 * beta)).square()
    else:
        values = torch.relu(1 - beta * h)
    margin = beta * h.detach()
    metrics = {
        "reward_chosen": beta * gain_chosen.detach(),
        "reward_rejected": beta * gain_rejected.detach(),
        "margin": margin,
        "accuracy": (margin > 0).to(margin.dtype),
    }
    return PairLoss(values, metrics)


def _subtract(logprobs: Tensor, reference: Tensor | None) -> Tensor:
    """`logprobs` minus those of the reference, if there is one."""
    return logprobs if reference is None else logprobs - reference.detach()
