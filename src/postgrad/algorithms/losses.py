"""Policy losses: one number per token. The caller sums them with aggregation.token_weights.

All columns are flat, (tokens,). `logprobs` carry the gradient; `old_logprobs` and `advantages` are
data. The log-ratio d = logprobs - old_logprobs is clamped to +-20, so that r = exp(d) cannot
overflow (verl does not clamp it in clip_cov and kl_cov). gspo and geo_mean bound the mean of a row
instead. Values on masked tokens are meaningless: their weight is 0. Losses that read whole rows
(gspo, geo_mean) need all tokens of a row in one call.

Formulas follow verl 0.9.1 unless a docstring says otherwise. LOSSES at the end lists them all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from postgrad.algorithms.masked import row_mean

MAX_LOG_RATIO = 20.0
MAX_LOG_SEQUENCE_RATIO = 10.0


class TokenLoss(NamedTuple):
    """The result of a loss.

    `values` (tokens,) are aggregated by the caller. `metrics` are detached (tokens,) columns; the
    caller logs their means over the loss mask as `policy/NAME`.
    """

    values: Tensor
    metrics: dict[str, Tensor]


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """(tokens,) logprobs - old_logprobs, clamped to +-20; no gradient reaches `old_logprobs`."""
    return (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clip(ratio: Tensor, clip_low: float | None, clip_high: float | None) -> Tensor:
    """Clip to [1 - clip_low, 1 + clip_high]; None leaves that side open."""
    if clip_low is None and clip_high is None:
        return ratio
    return ratio.clamp(
        None if clip_low is None else 1 - clip_low, None if clip_high is None else 1 + clip_high
    )


def _metrics(logprobs: Tensor, old_logprobs: Tensor, **flags: Tensor) -> dict[str, Tensor]:
    """policy_kl (old - new) and the given flags as 0.0 or 1.0, all detached."""
    return {"policy_kl": (old_logprobs - logprobs).detach()} | {
        name: flag.to(logprobs.dtype) for name, flag in flags.items()
    }


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    dual_clip: float | None = 3.0,
) -> TokenLoss:
    """PPO: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 at most -A · dual_clip.

    A bound of None is open. With both None it is the plain ratio loss -A r without dual clip
    (LUFFY's on-policy loss, "GRPO-No-Clip").

    Metrics: clip_fraction (the clipped branch is strictly larger), dual_clip_fraction, policy_kl.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * _clip(ratio, clip_low, clip_high)
    values = torch.maximum(unclipped, clipped)
    capped = torch.zeros_like(values, dtype=torch.bool)
    if dual_clip is not None and not (clip_low is None and clip_high is None):
        bound = -advantages * dual_clip
        capped = (advantages < 0) & (values > bound)
        values = torch.where(capped, bound, values)
    return TokenLoss(
        values,
        _metrics(
            logprobs, old_logprobs, clip_fraction=clipped > unclipped, dual_clip_fraction=capped
        ),
    )


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """Return -A · logprobs: REINFORCE, with a baseline if advantages are centered; also GPG."""
    return TokenLoss(-advantages * logprobs, {})


reinforce = gpg = policy_gradient


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    clip_low: float | None = 3e-4,
    clip_high: float | None = 4e-4,
) -> TokenLoss:
    """GSPO: PPO's clipped loss on the ratio of the whole response, s_i = exp(mean_t d).

        s_it = sg(s_i) · exp(logprobs - sg(logprobs)), its log at most 10
        loss = max(-A s_it, -A clip(s_it))

    The gradient of one token is -A s_i · weight. There is no dual clip. The paper uses the
    aggregation seq-mean-token-mean; others work.
    """
    mean = row_mean(logprobs.detach() - old_logprobs.detach(), mask, rows, num_rows)  # (rows,)
    log_s = (mean[rows] + (logprobs - logprobs.detach())).clamp(max=MAX_LOG_SEQUENCE_RATIO)
    ratio = log_s.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * _clip(ratio, clip_low, clip_high)
    return TokenLoss(
        torch.maximum(unclipped, clipped),
        _metrics(logprobs, old_logprobs, clip_fraction=clipped > unclipped),
    )


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float | None = 0.2,
) -> TokenLoss:
    """CISPO: -sg(clip(r, 1 - clip_low, 1 + clip_high)) · A · logprobs.

    The weight is clipped; the gradient never vanishes.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp().detach()
    weight = _clip(ratio, clip_low, clip_high)
    return TokenLoss(
        -weight * advantages * logprobs,
        _metrics(logprobs, old_logprobs, clip_fraction=weight != ratio),
    )


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> TokenLoss:
    """SAPO: -A · (4 / tau) · sigmoid(tau · (r - 1)), with one tau for A > 0 and one for A <= 0.

    A soft gate whose derivative at ratio 1 is 1. The paper aggregates by seq-mean-token-mean.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    positive = ratio.new_tensor(temperature_positive)
    negative = ratio.new_tensor(temperature_negative)
    tau = torch.where(advantages > 0, positive, negative)
    values = -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return TokenLoss(values, _metrics(logprobs, old_logprobs))


def geo_mean(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """GMPO: -mean_t(A) · rho_i, rho_i = exp(mean_t of clipped d), the geometric mean of ratios.

    d is clipped to at most clip_high where A > 0 and to at least -clip_low where A < 0 (the
    pessimistic side only). Every token of a row has the row's loss. With seq-mean-token-mean the
    result is the mean over rows, however rows are split into micro-batches. verl averages within
    each micro-batch, so its gradient depends on the split. Other aggregations weigh rows by length.
    Importance weights of a rollout correction multiply a row by their geometric mean, as in verl.
    """
    delta = logprobs - old_logprobs.detach()
    limited = torch.where(advantages > 0, delta.clamp(max=clip_high), delta.clamp(min=-clip_low))
    rho = row_mean(limited, mask, rows, num_rows).clamp(max=MAX_LOG_RATIO).exp()
    values = -row_mean(advantages, mask, rows, num_rows) * rho  # (rows,)
    return TokenLoss(values[rows], _metrics(logprobs, old_logprobs, clip_fraction=limited != delta))


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cov_selected: Tensor,
    *,
    clip_low: float | None = 1.0,
    clip_high: float | None = 1.0,
) -> TokenLoss:
    """Clip-Cov: PPO's clipped loss without dual clip, and 0 on the tokens of `cov_selected`.

    `cov_selected` (tokens,) bool comes from covariance.cov_selection with a band.
    """
    loss = ppo_clip(
        logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    )
    flags = {"clip_fraction": loss.metrics["clip_fraction"], "selected_fraction": cov_selected}
    return TokenLoss(
        torch.where(cov_selected, 0.0, loss.values), _metrics(logprobs, old_logprobs, **flags)
    )


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cov_selected: Tensor,
    *,
    coefficient: float = 0.1,
) -> TokenLoss:
    """KL-Cov: -A r, plus coefficient · |d| on the tokens of `cov_selected`.

    `cov_selected` (tokens,) bool comes from covariance.cov_selection without a band.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    # The penalty uses d unclamped: a token far from the old policy needs its gradient most.
    penalty = torch.where(cov_selected, coefficient * (logprobs - old_logprobs.detach()).abs(), 0.0)
    return TokenLoss(
        -advantages * ratio + penalty,
        _metrics(logprobs, old_logprobs, selected_fraction=cov_selected),
    )


def _dppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, keep: Tensor, max_ratio: float
) -> TokenLoss:
    """Return -A · sg(min(r, max_ratio)) · logprobs on the tokens of `keep`, 0 on the others."""
    weight = log_ratio(logprobs, old_logprobs).exp().clamp(max=max_ratio).detach()
    values = torch.where(keep, -advantages * weight * logprobs, 0.0)
    return TokenLoss(values, _metrics(logprobs, old_logprobs, clip_fraction=~keep))


def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    max_ratio: float = 20.0,
) -> TokenLoss:
    """DPPO by total variation: -A · sg(min(r, max_ratio)) · logprobs on tokens near the old policy.

    Kept are tokens with p - p_old <= clip_high where A > 0, and p - p_old >= -clip_low where
    A <= 0; the others get 0. The bounds are differences of probability. max_ratio is the published
    20; verl's actor uses 3.
    """
    change = logprobs.detach().exp() - old_logprobs.exp()
    keep = torch.where(advantages > 0, change <= clip_high, change >= -clip_low)
    return _dppo(logprobs, old_logprobs, advantages, keep, max_ratio)


def dppo_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    max_ratio: float = 20.0,
) -> TokenLoss:
    """DPPO by Bernoulli KL: as dppo_tv, with tokens kept by KL(p_old, p) instead of p - p_old.

    A token is kept while the KL is at most the bound or p moves back towards p_old. The KL is that
    of "this token or another": p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)).
    """
    current_logprobs = logprobs.detach()
    p = current_logprobs.exp()
    p_old = old_logprobs.exp()
    rest = _complement(current_logprobs)
    rest_old = _complement(old_logprobs)
    kl_token = p_old * (old_logprobs - current_logprobs)
    kl_rest = rest_old * (rest_old.log() - rest.log())
    kl = kl_token + kl_rest
    keep_positive = (kl <= clip_high) | (p <= p_old)
    keep_negative = (kl <= clip_low) | (p >= p_old)
    keep = torch.where(advantages > 0, keep_positive, keep_negative)
    return _dppo(logprobs, old_logprobs, advantages, keep, max_ratio)


def _complement(logprobs: Tensor) -> Tensor:
    """1 - exp(logprobs), above 0: -expm1 keeps the digits that 1 - p loses when p is near 1."""
    return (-torch.expm1(logprobs)).clamp(min=torch.finfo(logprobs.dtype).tiny)


def dro(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, beta: float) -> TokenLoss:
    """DRO: -(A · logprobs - beta / 2 · d^2), with d unclamped.

    `beta` has no default: the right value depends on the scale of the rewards.
    """
    delta = logprobs - old_logprobs.detach()
    values = -(advantages * logprobs - 0.5 * beta * delta.square())
    return TokenLoss(values, _metrics(logprobs, old_logprobs))


@dataclass(frozen=True)
class Loss:
    """A policy loss and what it needs, declared so that a run is checked before it starts.

    Args:
        function: returns TokenLoss; called with the columns of `reads` and options by name.
        reads: columns it is called with. `logprobs` are the current policy's; `mask`, `rows` and
            `num_rows` describe the batch; the others are columns of the batch. A row column, such
            as `reward`, is repeated over the row's tokens. `old_logprobs` are the current ones
            without gradient if the step has only one update.
        options: numbers that settings may set: method.clip_low, method.clip_high, method.dual_clip
            and the entries of method.loss_options.
        required: options without a default.
        needs_all_rows: True if the loss of a row is not 0 where all its advantages are 0. Rows with
            zero advantages are skipped otherwise.
        aggregation: the aggregation that the formula assumes; None if any will do.
        selection: for losses that read `cov_selected`: the options of covariance.cov_selection
            with their defaults. `cov_share` is its share, `cov_low` and `cov_high` its band.
            method.loss_options sets them.
        row_weights: True if importance weights per token enter as their geometric mean over the
            row, because the formula has one ratio per row.

    A user's own loss is declared the same way and given as method.loss=file.py:NAME, where NAME is
    the function or the declaration.
    """

    function: Callable[..., TokenLoss]
    reads: tuple[str, ...]
    options: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    needs_all_rows: bool = False
    aggregation: str | None = None
    selection: Mapping[str, float] = field(default_factory=dict)
    row_weights: bool = False


_RATIO = ("logprobs", "old_logprobs", "advantages")
_ROWS = (*_RATIO, "mask", "rows", "num_rows")
_SELECTED = (*_RATIO, "cov_selected")
_CLIP = ("clip_low", "clip_high")
_TAUS = ("temperature_positive", "temperature_negative")
_BY_ROW = "seq-mean-token-mean"

LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(ppo_clip, _RATIO, (*_CLIP, "dual_clip")),
    "policy_gradient": Loss(policy_gradient, ("logprobs", "advantages")),
    "reinforce": Loss(reinforce, ("logprobs", "advantages")),
    "gpg": Loss(gpg, ("logprobs", "advantages")),
    "gspo": Loss(gspo, _ROWS, _CLIP, aggregation=_BY_ROW),
    "cispo": Loss(cispo, _RATIO, _CLIP),
    "sapo": Loss(sapo, _RATIO, _TAUS, aggregation=_BY_ROW),
    "geo_mean": Loss(geo_mean, _ROWS, _CLIP, aggregation=_BY_ROW, row_weights=True),
    "clip_cov": Loss(
        clip_cov, _SELECTED, _CLIP, selection={"cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0}
    ),
    "kl_cov": Loss(
        kl_cov, _SELECTED, ("coefficient",), needs_all_rows=True, selection={"cov_share": 2e-4}
    ),
    "dppo_tv": Loss(dppo_tv, _RATIO, (*_CLIP, "max_ratio")),
    "dppo_kl": Loss(dppo_kl, _RATIO, (*_CLIP, "max_ratio")),
    "dro": Loss(dro, _RATIO, ("beta",), required=("beta",), needs_all_rows=True),
}
