"""Preference losses over pairs and over single labeled responses, and the loss of reward models.

A pair is (chosen, rejected); columns are (pairs,). `row_logprobs` adds up token log-probs. With
h = (chosen - rejected) - (reference_chosen - reference_rejected), the reference terms 0 if
reference-free, m = target_margin, and
odds = log-odds(chosen) - log-odds(rejected), log-odds(x) = x - log(1 - exp(x)):

    sigmoid      -log σ(beta·h - m)   DPO; SimPO with a margin
    ipo          (h - 1 / (2 beta))^2   mean log-probs per token: row_logprobs(average=True)
    hinge        max(0, 1 - beta·h)   SLiC
    odds_ratio   -beta · log σ(odds)   ORPO, mean log-probs per token, no reference
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from postgrad.algorithms.masked import row_mean, row_sum
from postgrad.errors import NoEffect, UnknownName, WrongValue, did_you_mean

PREFERENCE_LOSSES = ("sigmoid", "ipo", "hinge", "odds_ratio")
# Losses that are defined for mean log-probs per token.
MEAN_LOSSES = ("ipo", "odds_ratio")
# A response of probability 1 has infinite odds; log-probs are clamped just below 0.
MAX_LOGPROB = -1e-6


class PreferenceLoss(NamedTuple):
    """`values` (pairs,) or (rows,); `metrics`: detached columns to average, of the same length."""

    values: Tensor
    metrics: dict[str, Tensor]


def row_logprobs(
    logprobs: Tensor, mask: Tensor, rows: Tensor, num_rows: int, *, average: bool = False
) -> Tensor:
    """(rows,) the sum (or mean) of token log-probs over each row's unmasked tokens."""
    return (row_mean if average else row_sum)(logprobs, mask, rows, num_rows)


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss: str = "sigmoid",
    target_margin: float = 0.0,
) -> PreferenceLoss:
    """(pairs,) the loss named by `loss`, one of PREFERENCE_LOSSES.

    Without reference columns it is reference-free. No gradient reaches the reference.

    Metrics: reward_chosen = beta·(chosen - reference), reward_rejected, margin = their difference,
    accuracy (margin > 0).

    Raises:
        ConfigError: unknown loss, beta <= 0, or target_margin without sigmoid.
        ValueError: one reference column without the other, or a reference with odds_ratio.
    """
    if loss not in PREFERENCE_LOSSES:
        raise UnknownName(
            f"unknown preference loss {loss!r}; {did_you_mean(loss, PREFERENCE_LOSSES)}", at="loss"
        )
    if not beta > 0:
        raise WrongValue(f"beta={beta} is out of range; preference losses need beta > 0")
    if target_margin and loss != "sigmoid":
        raise NoEffect(f"target_margin={target_margin} with loss {loss}; only sigmoid has one")
    if (reference_chosen is None) != (reference_rejected is None):
        raise ValueError("one reference column is missing; give both, or none (reference-free)")
    if reference_chosen is not None and loss == "odds_ratio":
        raise ValueError("odds_ratio has no reference; leave out its columns")
    gain_chosen = _subtract(chosen, reference_chosen)
    gain_rejected = _subtract(rejected, reference_rejected)
    h = gain_chosen - gain_rejected
    if loss == "sigmoid":
        values = -logsigmoid(beta * h - target_margin)
    elif loss == "ipo":
        values = (h - 1 / (2 * beta)).square()
    elif loss == "hinge":
        values = torch.relu(1 - beta * h)
    else:
        values = -beta * logsigmoid(log_odds(chosen) - log_odds(rejected))
    margin = beta * h.detach()
    metrics = {
        "reward_chosen": beta * gain_chosen.detach(),
        "reward_rejected": beta * gain_rejected.detach(),
        "margin": margin,
        "accuracy": (margin > 0).to(margin.dtype),
    }
    return PreferenceLoss(values, metrics)


def log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) of log-probabilities, which are at most MAX_LOGPROB."""
    bounded = logprobs.clamp(max=MAX_LOGPROB)
    return bounded - torch.log(-torch.expm1(bounded))


def kto(
    logprobs: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PreferenceLoss:
    """(rows,) KTO: one response per row, labeled desirable or not.

        g = logprobs - reference
        desirable:    desirable_weight · (1 - σ(beta·(g - kl)))
        undesirable:  undesirable_weight · (1 - σ(beta·(kl - g)))

    Args:
        logprobs: (rows,) log-probs of whole responses.
        reference: (rows,) those of the reference; no gradient reaches it.
        desirable: (rows,) bool.
        kl: one number, from mismatched_kl; no gradient reaches it.
        beta: strength of the KL constraint.
        desirable_weight: weight of desirable rows.
        undesirable_weight: weight of undesirable rows.

    Metrics: accuracy, the share of desirable rows above the kl and of undesirable rows below it.
    """
    gain = _subtract(logprobs, reference)
    sign = torch.where(desirable, 1.0, -1.0).to(gain.dtype)
    weight = torch.where(desirable, desirable_weight, undesirable_weight).to(gain.dtype)
    distance = sign * beta * (gain - kl)
    values = weight * torch.sigmoid(-distance)
    return PreferenceLoss(values, {"accuracy": (distance.detach() > 0).to(gain.dtype)})


def mismatched_kl(logprobs: Tensor, reference: Tensor) -> float:
    """KTO's estimate of the KL to the reference: mean(logprobs - reference), at least 0.

    The columns are (rows,): log-probs of responses that belong to other prompts.
    """
    return max(0.0, float((logprobs.double() - reference.double()).mean()))


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margins: Tensor, *, centering: float = 0.0
) -> PreferenceLoss:
    """(pairs,) the loss of a reward model whose scores are `chosen` and `rejected`.

        loss = -log σ(chosen - rejected - margin) + centering · (chosen + rejected)^2

    `centering` keeps the mean score near 0.

    Metrics: reward_chosen, reward_rejected, margin = their difference, accuracy (margin > 0).
    """
    difference = chosen - rejected
    values = -logsigmoid(difference - margins) + centering * (chosen + rejected).square()
    metrics = {
        "reward_chosen": chosen.detach(),
        "reward_rejected": rejected.detach(),
        "margin": difference.detach(),
        "accuracy": (difference.detach() > 0).to(chosen.dtype),
    }
    return PreferenceLoss(values, metrics)


def _subtract(logprobs: Tensor, reference: Tensor | None) -> Tensor:
    """`logprobs` minus those of the reference, if there is one."""
    return logprobs if reference is None else logprobs - reference.detach()
