"""Policy losses, one number a token. The caller sums them with the weights of aggregation.token_weights.

Columns are flat over all tokens, (tokens,). `logprobs` carry the gradient; `old_logprobs` and `advantages` are data. The log-ratio
d = logprobs - old_logprobs is clamped to +-20 so that r = exp(d) cannot overflow (verl leaves it open in clip_cov and kl_cov); gspo
and geo_mean bound a row's mean instead. Values on masked tokens mean nothing: their weight is 0. Losses that look at a whole row
(gspo, geo_mean) want all of the row's tokens in one call. Formulas follow verl 0.9.1 unless a docstring says otherwise; LOSSES at the
end names them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from postgrad.algorithms.masked import masked_mean, row_mean

MAX_LOG_RATIO = 20.0
MAX_LOG_SEQUENCE_RATIO = 10.0


class TokenLoss(NamedTuple):
    """`values` (tokens,) to be aggregated; `metrics`: (tokens,) detached columns whose mean over the loss mask is worth logging."""

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
    """PPO: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where A < 0 at most -A · dual_clip.

    A bound of None is open. Both None: the plain ratio loss -A r, dual clip off too (LUFFY's on-policy loss, "GRPO-No-Clip").
    Metrics: clip_fraction (the clipped branch is strictly larger), dual_clip_fraction, policy_kl (old - new).
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
    """-A · logprobs. Raw rewards as advantages make it the naive form, centered ones REINFORCE with baseline; GPG is the same."""
    return TokenLoss(-advantages * logprobs, {})


reinforce = policy_gradient
gpg = policy_gradient


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
    """GSPO: the ratio of the whole response, s_i = exp(mean_t d), clipped; each token carries its share of the gradient.

        s_it = sg(s_i) · exp(logprobs - sg(logprobs)), its log at most 10        max(-A s_it, -A clip(s_it))

    Gradient to one token: -A s_i · weight. There is no dual clip. Made for the aggregation seq-mean-token-mean; others work.
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
    """CISPO: -sg(clip(r, 1 - clip_low, 1 + clip_high)) · A · logprobs. The weight is clipped, the gradient never vanishes."""
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
    """SAPO: -A · (4 / tau) · sigmoid(tau · (r - 1)), tau by the sign of A. A soft gate whose slope at r = 1 is 1.

    Its authors average by seq-mean-token-mean.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    tau = torch.where(
        advantages > 0,
        ratio.new_tensor(temperature_positive),
        ratio.new_tensor(temperature_negative),
    )
    return TokenLoss(
        -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1)), _metrics(logprobs, old_logprobs)
    )


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
    """GMPO: -mean_t(A) · rho_i with rho_i = exp(mean_t of clipped d), the geometric mean of the row's clipped ratios.

    d is clipped to at most clip_high where A > 0 and to at least -clip_low where A < 0 (the pessimistic side only). The row's loss
    stands on each of its tokens, so seq-mean-token-mean gives mean over rows of the loss above and its gradient, however rows are
    split (verl averages within each micro-batch, so its gradient depends on the split). Other aggregations weigh rows by length.
    """
    delta = logprobs - old_logprobs.detach()
    limited = torch.where(advantages > 0, delta.clamp(max=clip_high), delta.clamp(min=-clip_low))
    rho = row_mean(limited, mask, rows, num_rows).clamp(max=MAX_LOG_RATIO).exp()
    values = -row_mean(advantages, mask, rows, num_rows) * rho  # (rows,)
    return TokenLoss(values[rows], _metrics(logprobs, old_logprobs, clip_fraction=limited != delta))


def token_covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(tokens,) (A - mean A) · (logprobs - mean logprobs), means over the mask; 0 on masked tokens."""
    if not bool(mask.any()):
        return torch.zeros_like(logprobs)
    covariance = (advantages - masked_mean(advantages, mask)) * (
        logprobs - masked_mean(logprobs, mask)
    )
    return torch.where(mask.bool(), covariance, 0.0).detach()


def cov_selection(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    share: float = 2e-4,
    band: tuple[float, float] | None = None,
    uniforms: Tensor | None = None,
) -> Tensor:
    """(tokens,) bool, the tokens that clip_cov or kl_cov treat apart: max(1, floor(share · unmasked tokens)) of them.

    Call it ONCE over the whole optimizer batch, with the old log-probs, and hand the column to the loss: verl selects within each
    micro-batch, so its gradient depends on the split.

    band None (kl_cov): the tokens with the largest covariance, the earlier one at a tie.
    band (low, high) (clip_cov; its authors use 1 and 5): a random pick among low < covariance < high, namely those with the
    smallest `uniforms` (tokens,), numbers the caller drew once for the batch. Fewer candidates than wanted: all of them.
    """
    mask = mask.bool()
    wanted = max(1, int(share * int(mask.sum())))
    covariance = token_covariance(logprobs, advantages, mask)
    if band is None:
        candidates, rank_by = mask, -covariance
    else:
        if uniforms is None:
            raise ValueError(
                "a random pick inside a band needs `uniforms`, one number for each token, drawn once for the batch"
            )
        candidates, rank_by = mask & (covariance > band[0]) & (covariance < band[1]), uniforms
    order = torch.where(candidates, rank_by, torch.inf).argsort(stable=True)[:wanted]
    selected = torch.zeros_like(mask)
    selected[order] = True
    return selected & candidates


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cov_selected: Tensor,
    *,
    clip_low: float | None = 1.0,
    clip_high: float | None = 1.0,
) -> TokenLoss:
    """Clip-Cov: PPO's max of both branches, and 0 on the tokens of `cov_selected` (cov_selection with a band). No dual clip."""
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
    """KL-Cov: -A r, plus coefficient · |d| on the tokens of `cov_selected` (cov_selection without a band)."""
    ratio = log_ratio(logprobs, old_logprobs).exp()
    # Not the clamped d: a token that is that far away needs the penalty's pull most.
    penalty = torch.where(cov_selected, coefficient * (logprobs - old_logprobs.detach()).abs(), 0.0)
    return TokenLoss(
        -advantages * ratio + penalty,
        _metrics(logprobs, old_logprobs, selected_fraction=cov_selected),
    )


def _dppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, keep: Tensor, max_ratio: float
) -> TokenLoss:
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
    """DPPO by total variation: -A · sg(min(r, max_ratio)) · logprobs on the tokens still near the old policy, 0 on the others.

    Kept: p - p_old <= clip_high where A > 0, p - p_old >= -clip_low where A <= 0; bounds are differences of probability.
    max_ratio is the published 20; verl's actor default of 3 overrides it there.
    """
    moved = logprobs.detach().exp() - old_logprobs.exp()
    return _dppo(
        logprobs,
        old_logprobs,
        advantages,
        torch.where(advantages > 0, moved <= clip_high, moved >= -clip_low),
        max_ratio,
    )


def dppo_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    max_ratio: float = 20.0,
) -> TokenLoss:
    """DPPO by Bernoulli KL: as dppo_tv, but a token is kept while KL(p_old, p) <= the bound or it moves back towards p_old.

    KL of "this token or another": p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)).
    """
    p, p_old = logprobs.detach().exp(), old_logprobs.exp()
    # 1 - p as float32 is 0 for every confident token, -expm1(log p) is not.
    rest, rest_old = (
        (-torch.expm1(q)).clamp(min=torch.finfo(q.dtype).tiny)
        for q in (logprobs.detach(), old_logprobs)
    )
    divergence = p_old * (old_logprobs - logprobs.detach()) + rest_old * (
        rest_old.log() - rest.log()
    )
    keep = torch.where(
        advantages > 0,
        (divergence <= clip_high) | (p <= p_old),
        (divergence <= clip_low) | (p >= p_old),
    )
    return _dppo(logprobs, old_logprobs, advantages, keep, max_ratio)


def dro(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, beta: float) -> TokenLoss:
    """DRO: -(A · logprobs - beta / 2 · d^2), d unclamped: its square does not overflow. `beta` has no default on purpose."""
    delta = logprobs - old_logprobs.detach()
    return TokenLoss(
        -(advantages * logprobs - 0.5 * beta * delta.square()), _metrics(logprobs, old_logprobs)
    )


@dataclass(frozen=True)
class LossSpec:
    """A loss and what it reads. `columns` are to be passed by name (`logprobs` is the current policy's; `mask`, `rows`, `num_rows`
    are the batch's own shape). `aggregation` is the mode its formula is meant for, None where any will do.
    `required` are the settings without default.
    """

    function: Callable[..., TokenLoss]
    columns: tuple[str, ...]
    aggregation: str | None = None
    required: tuple[str, ...] = ()


_RATIO = ("logprobs", "old_logprobs", "advantages")
_ROWS = (*_RATIO, "mask", "rows", "num_rows")
_SELECTED = (*_RATIO, "cov_selected")

LOSSES: dict[str, LossSpec] = {
    "ppo_clip": LossSpec(ppo_clip, _RATIO),
    "policy_gradient": LossSpec(policy_gradient, ("logprobs", "advantages")),
    "reinforce": LossSpec(reinforce, ("logprobs", "advantages")),
    "gpg": LossSpec(gpg, ("logprobs", "advantages")),
    "gspo": LossSpec(gspo, _ROWS, "seq-mean-token-mean"),
    "cispo": LossSpec(cispo, _RATIO),
    "sapo": LossSpec(sapo, _RATIO, "seq-mean-token-mean"),
    "geo_mean": LossSpec(geo_mean, _ROWS, "seq-mean-token-mean"),
    "clip_cov": LossSpec(clip_cov, _SELECTED),
    "kl_cov": LossSpec(kl_cov, _SELECTED),
    "dppo_tv": LossSpec(dppo_tv, _RATIO),
    "dppo_kl": LossSpec(dppo_kl, _RATIO),
    "dro": LossSpec(dro, _RATIO, required=("beta",)),
}
