"""Rollout correction: for tokens whose probability differs between the engine and the trainer.

Everything is a function of rho = pi_train / pi_rollout, with log rho = train_logprobs -
rollout_logprobs clamped to +-20 (verl calls the trainer's log-probs "old"). `importance_weights`
weighs tokens, `reject` masks them, `mismatch_metrics` measures the difference; all are detached.
Bounds are on rho: "0.5_1.2" keeps 0.5 <= rho <= 1.2. (verl 0.9.1 applies them to 1 / rho.)
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from postgrad.algorithms.masked import row_mean, row_sum
from postgrad.errors import UnknownName, WrongValue, did_you_mean

LEVELS = ("token", "sequence", "geometric")
RULES = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
MAX_LOG_RATIO = 20.0
MIN_WEIGHT = 1e-10  # below it a weight counts as this in a geometric mean, unless it is 0


class Weights(NamedTuple):
    """`values` (tokens,) multiply the loss, 0 on masked tokens; `metrics` are scalars."""

    values: Tensor
    metrics: dict[str, Tensor]


class Rejection(NamedTuple):
    """`keep` (tokens,) is the remaining loss mask; `metrics` has the share masked per rule."""

    keep: Tensor
    metrics: dict[str, Tensor]


def _interval(text: str) -> tuple[float, float]:
    """("0.5_2") -> (0.5, 2.0). Raises ConfigError."""
    low, separator, high = text.partition("_")
    try:
        bounds = (float(low), float(high)) if separator else (0.0, 0.0)
    except ValueError:
        bounds = (0.0, 0.0)
    if not 0 < bounds[0] < bounds[1]:
        raise WrongValue(
            f'bounds {text!r} are not of the form "low_high" with 0 < low < high, e.g. "0.5_2.0"',
            at="bounds",
        )
    return bounds


def ratio_bounds(bounds: float | str) -> tuple[float, float]:
    """("0.5_2") -> (0.5, 2.0); a single number u > 1 means 1/u to u. Raises ConfigError."""
    if isinstance(bounds, str) and "_" in bounds:
        return _interval(bounds)
    upper = _number(bounds)
    if not upper > 1:
        raise WrongValue(
            f"ratio bound {bounds!r} means 1/u to u and needs u > 1; "
            'for other intervals write "low_high"',
            at="bounds",
        )
    return 1 / upper, upper


def _number(bound: float | str) -> float:
    try:
        value = float(bound)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise WrongValue(f"bound {bound!r} is not a positive number", at="bounds")
    return value


def log_rho(train_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """(tokens,) log(pi_train / pi_rollout), clamped to +-20, without gradient."""
    return (train_logprobs - rollout_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _log_product(
    train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, rows: Tensor, num_rows: int
) -> Tensor:
    """(rows,) log of the product of rho over unmasked tokens, clamped to +-20.

    The terms of the sum are not clamped, because they may cancel.
    """
    log_ratio = (train_logprobs - rollout_logprobs).detach()
    return row_sum(log_ratio, mask, rows, num_rows).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_weights(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    level: str = "token",
    threshold: float | str = 2.0,
) -> Weights:
    """(tokens,) importance weights of the rollout, truncated or masked.

    `level` selects the weight of a token:

        token      rho_t
        sequence   product of rho over the row's unmasked tokens, its log clamped to +-20
        geometric  geometric mean of rho over the row's unmasked tokens

    Args:
        threshold: a number C truncates weights at C (truncated importance sampling). "lo_hi" sets
            weights outside [lo, hi] to 0 (IcePop).

    Metrics are those of weight_metrics.

    Raises: ConfigError for an unknown level or a malformed threshold.
    """
    if level not in LEVELS:
        raise UnknownName(
            f"unknown importance level {level!r}; {did_you_mean(level, LEVELS)}", at="level"
        )
    mask = mask.bool()
    log_ratio = log_rho(train_logprobs, rollout_logprobs)
    if level == "sequence":
        log_ratio = _log_product(train_logprobs, rollout_logprobs, mask, rows, num_rows)[rows]
    elif level == "geometric":
        log_ratio = row_mean(log_ratio, mask, rows, num_rows)[rows]
    raw = torch.where(mask, log_ratio.exp(), 0.0)
    if isinstance(threshold, str) and "_" in threshold:
        low, high = _interval(threshold)
        values = torch.where((raw >= low) & (raw <= high), raw, 0.0)
    else:
        high = _number(threshold)
        low = 1 / high
        values = raw.clamp(max=high)
    metrics = weight_metrics(values, mask, rows, num_rows)
    if metrics:
        metrics["fraction_high"] = (raw[mask] > high).to(raw.dtype).mean()
        metrics["fraction_low"] = (raw[mask] < low).to(raw.dtype).mean()
    return Weights(values, metrics)


def geometric_row_weights(weights: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """(tokens,) the geometric mean of the row's unmasked weights; 0 if one of them is 0."""
    logs = row_mean(weights.clamp(min=MIN_WEIGHT).log(), mask, rows, num_rows)
    zero = row_sum((weights <= 0).to(weights.dtype), mask, rows, num_rows) > 0
    return torch.where(zero, 0.0, logs.exp())[rows]


def weight_metrics(weights: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> dict[str, Tensor]:
    """Statistics of the weights, as scalars. An empty dict if all tokens are masked.

    Over unmasked tokens: mean, std, max, min, and effective_sample_size = 1 / E[(w / mean)^2], in
    (0, 1]. Over the mean weights of rows: seq_mean, seq_std, seq_max, seq_min. Standard deviations
    divide by n.
    """
    mask = mask.bool()
    kept = weights[mask]
    if kept.numel() == 0:
        return {}
    mean = kept.mean()
    square = kept.square().mean()
    by_row = row_mean(weights, mask, rows, num_rows)[_present(mask, rows, num_rows)]
    return {
        "mean": mean,
        "std": kept.std(correction=0),
        "max": kept.max(),
        "min": kept.min(),
        "effective_sample_size": torch.where(square > 0, mean.square() / square, 0.0),
        "seq_mean": by_row.mean(),
        "seq_std": by_row.std(correction=0),
        "seq_max": by_row.max(),
        "seq_min": by_row.min(),
    }


def reject(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    rules: Mapping[str, float | str],
) -> Rejection:
    """Return the loss mask of the tokens, or whole rows, that pass every rule.

    Use the mask for the loss and for its denominators. Per token k1 = log rho, k2 = (log rho)^2 / 2
    and k3 = rho - 1 - log rho. `rules` maps these names to bounds:

        token_k*     the token's own value
        seq_sum_k*   the row's sum over unmasked tokens (k1: the product of rho)
        seq_mean_k*  the row's mean (k1: the geometric mean of rho)
        seq_max_k*   the row's largest value; k2 and k3 only

    k2 and k3 take one upper bound. k1 takes bounds of rho, inclusive: "low_high", or a number u for
    1/u to u (ratio_bounds).

    Raises: ConfigError for an unknown rule or a malformed bound.
    """
    mask = mask.bool()
    log_ratio = log_rho(train_logprobs, rollout_logprobs)
    measures = {
        "k1": log_ratio,
        "k2": log_ratio.square() / 2,
        "k3": log_ratio.exp() - 1 - log_ratio,
    }
    keep = mask
    metrics: dict[str, Tensor] = {}
    for rule, bound in rules.items():
        if rule not in RULES:
            raise UnknownName(
                f"unknown rejection rule {rule!r}; {did_you_mean(rule, RULES)}", at="rule"
            )
        scope, _, kind = rule.rpartition("_")
        measure = _over_rows(scope, measures[kind], mask, rows, num_rows)
        if kind == "k1":
            low, high = ratio_bounds(bound)
            # Compared as ratios: their logs would round, and a bound equal to rho must pass.
            ratio = measure.exp()
            passed = (ratio >= low) & (ratio <= high)
        else:
            passed = measure <= _number(bound)
        if bool(mask.any()):
            metrics[f"{rule}_rejected_fraction"] = (~passed)[mask].to(log_ratio.dtype).mean()
        keep = keep & passed
    return Rejection(keep, metrics)


def _over_rows(scope: str, measure: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """(tokens,) the measure itself, or its row's sum, mean or maximum over unmasked tokens."""
    if scope == "token":
        return measure
    if scope == "seq_sum":
        return row_sum(measure, mask, rows, num_rows)[rows]
    if scope == "seq_mean":
        return row_mean(measure, mask, rows, num_rows)[rows]
    low = torch.full((num_rows,), -torch.inf, dtype=measure.dtype, device=measure.device)
    return low.scatter_reduce(0, rows, torch.where(mask, measure, -torch.inf), "amax")[rows]


def _present(mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """(rows,) bool: the row has an unmasked token."""
    present = torch.zeros(num_rows, dtype=torch.bool, device=mask.device)
    present[rows[mask]] = True
    return present


def mismatch_metrics(
    train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, rows: Tensor, num_rows: int
) -> dict[str, Tensor]:
    """Measures of the difference between engine and trainer, as scalars over unmasked tokens.

        kl, k3_kl                   E[-log rho], E[rho - 1 - log rho]: KL(rollout || train)
        chi2_token, chi2_seq        E[rho^2] - 1 over tokens; over rows, with the product of rho
        training_ppl, rollout_ppl   mean over rows of exp(-mean log-prob)
        *_log_ppl, log_ppl_*        means and differences of the rows' log perplexities
        ppl_ratio                   mean over rows of training / rollout perplexity
        probs_diff_*                statistics of |p_train - p_rollout|
        probs_pearson               correlation of p_train and p_rollout, if defined

    Rows without an unmasked token do not count. An empty dict if all tokens are masked.
    """
    mask = mask.bool()
    if not bool(mask.any()):
        return {}
    log_ratio = log_rho(train_logprobs, rollout_logprobs)
    kept = log_ratio[mask]
    present = _present(mask, rows, num_rows)
    product = _log_product(train_logprobs, rollout_logprobs, mask, rows, num_rows)[present]
    train = -row_mean(train_logprobs.detach(), mask, rows, num_rows)[present]
    rollout = -row_mean(rollout_logprobs, mask, rows, num_rows)[present]
    probs = torch.stack([train_logprobs.detach()[mask].exp(), rollout_logprobs[mask].exp()])
    probs_diff = (probs[0] - probs[1]).abs()
    log_ppl_diff = train - rollout
    metrics = {
        "kl": -kept.mean(),
        "k3_kl": (kept.exp() - 1 - kept).mean(),
        "chi2_token": (2 * kept).exp().mean() - 1,
        "chi2_seq": (2 * product).exp().mean() - 1,
        "training_ppl": train.exp().mean(),
        "rollout_ppl": rollout.exp().mean(),
        "training_log_ppl": train.mean(),
        "rollout_log_ppl": rollout.mean(),
        "log_ppl_diff": log_ppl_diff.mean(),
        "log_ppl_abs_diff": log_ppl_diff.abs().mean(),
        "log_ppl_diff_max": log_ppl_diff.max(),
        "log_ppl_diff_min": log_ppl_diff.min(),
        "ppl_ratio": log_ppl_diff.exp().mean(),
        "probs_diff_mean": probs_diff.mean(),
        "probs_diff_max": probs_diff.max(),
        "probs_diff_std": probs_diff.std(correction=0),
    }
    if bool((probs.std(dim=1, correction=0) > 0).all()):
        metrics["probs_pearson"] = torch.corrcoef(probs)[0, 1]
    return metrics
