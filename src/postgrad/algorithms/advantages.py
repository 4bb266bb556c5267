"""Advantages of whole responses: one number per row, from one reward per row.

Estimators with one number per token are in token_advantages.py.

Notation: R_i is the reward of row i, g its group, n_g the size of the group. `rewards` is (rows,)
float. `groups` is (rows,) int64: any integers in any order. Every function returns (rows,); the
caller repeats it over the trainable tokens of the row.

One rule for all of them (groups.py): a group of one has baseline 0 and standard deviation 1, so
A = R (or R / (1 + eps) if the estimator divides). A group whose rewards are all equal gives exactly
0. Estimators that whiten over the batch apply the rule before they whiten. All of them refuse
rewards that are not finite (ValueError). ADVANTAGES at the end lists them all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from postgrad.algorithms import classmate_advantages, token_advantages
from postgrad.algorithms.groups import STD_EPS, Groups, centered, finite, normalize_rows, whiten


def grpo(
    rewards: Tensor, groups: Tensor, *, normalize_by_std: bool = True, eps: float = STD_EPS
) -> Tensor:
    """(rows,) (R_i - mean_g) / (std_g + eps), std with n - 1; or R_i - mean_g without division."""
    rewards = finite("rewards", rewards)
    offset, std = centered(rewards, Groups.of(groups, rewards.device))
    return offset / (std + eps) if normalize_by_std else offset


def drgrpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """(rows,) R_i - mean_g (Dr. GRPO).

    Use it with the aggregation seq-mean-token-sum-norm and without a KL loss.
    """
    return grpo(rewards, groups, normalize_by_std=False)


def lite_ppo(rewards: Tensor, groups: Tensor, *, eps: float = STD_EPS) -> Tensor:
    """(rows,) (R_i - mean_g) / (std of all rewards of the batch + eps), std with n - 1: Lite PPO.

    A batch of one row has standard deviation 1. The standard deviation of a group makes small
    differences of easy and hard problems large; that of the batch does not.
    """
    rewards = finite("rewards", rewards)
    offset, _ = centered(rewards, Groups.of(groups, rewards.device))
    return offset if rewards.numel() < 2 else offset / (rewards.std() + eps)


def no_baseline(rewards: Tensor) -> Tensor:
    """(rows,) the reward itself: REINFORCE without a baseline (`no_baseline` of CS336)."""
    return finite("rewards", rewards)


def grpo_passk(
    rewards: Tensor, groups: Tensor, *, normalize_by_std: bool = True, eps: float = STD_EPS
) -> Tensor:
    """(rows,) (R_best - R_second) / (std_g + eps) for the best row of a group, 0 for the others.

    A tie at the top gives 0 to all rows. In a group of one R_second is 0 and std is 1, where verl
    raises.
    """
    rewards = finite("rewards", rewards)
    index = Groups.of(groups, rewards.device)
    best = index.max(rewards)
    is_best = rewards == index.expand(best)
    num_best = index.sum(is_best.to(rewards.dtype))
    second = index.max(torch.where(is_best, -torch.inf, rewards))
    second = torch.where(num_best > 1, best, second)  # in a tie the second reward is the best
    alone = index.sum(torch.ones_like(rewards)) < 2
    gap = best - torch.where(alone, 0.0, second)
    _, std = centered(rewards, index)
    advantages = torch.where(is_best, index.expand(gap), 0.0)
    return advantages / (std + eps) if normalize_by_std else advantages


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """(rows,) R_i - mean of the other rows of the group = n_g / (n_g - 1) · (R_i - mean_g).

    A group of one keeps R, where verl's vectorized variant gives 0.
    """
    rewards = finite("rewards", rewards)
    index = Groups.of(groups, rewards.device)
    counts = index.expand(index.sum(torch.ones_like(rewards)))
    offset, _ = centered(rewards, index)
    return torch.where(counts > 1, offset * counts / (counts - 1).clamp(min=1), offset)


def opo(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """(rows,) R_i - sum_j(L_j R_j) / sum_j(L_j) over the group: OPO's length-weighted baseline.

    `lengths` (rows,) counts trainable tokens. A group without trainable tokens has baseline 0.
    """
    rewards = finite("rewards", rewards)
    index = Groups.of(groups, rewards.device)
    weights = lengths.to(rewards)
    total = index.sum(weights)
    alone = index.sum(torch.ones_like(rewards)) < 2
    weighted_mean = index.sum(weights * rewards) / total.clamp(min=1)
    baseline = torch.where(alone | (total == 0), 0.0, weighted_mean)
    flat = index.all_equal(rewards) & ~alone
    return torch.where(index.expand(flat), 0.0, rewards - index.expand(baseline))


def gpg(rewards: Tensor, groups: Tensor) -> Tensor:
    """(rows,) alpha · (R_i - mean_g) with alpha = rows / max(rows with R != 0, 1).

    alpha corrects for rows without signal. As in verl a negative reward counts as non-zero, so use
    it with rewards where 0 means "failed".
    """
    rewards = finite("rewards", rewards)
    offset, _ = centered(rewards, Groups.of(groups, rewards.device))
    return offset * rewards.numel() / (rewards != 0).sum().clamp(min=1)


def reinforce_pp_baseline(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """(rows,) R_i - mean_g, whitened over the batch's trainable tokens (REINFORCE++ baseline).

    `lengths` (rows,) weighs each row by its trainable tokens. Whitening subtracts the batch mean,
    so that a group without signal gets the same non-zero advantage on all its rows. This is the
    published estimator.
    """
    rewards = finite("rewards", rewards)
    offset, _ = centered(rewards, Groups.of(groups, rewards.device))
    return whiten(offset, lengths.to(rewards.device))


def gdpo(
    rewards: Mapping[str, Tensor],
    groups: Tensor,
    reward_weights: Mapping[str, float] | None = None,
    lengths: Tensor | None = None,
    *,
    whiten_over: Literal["tokens", "rows", "none"] = "tokens",
    normalize_by_std: bool = True,
    eps: float = STD_EPS,
) -> Tensor:
    """(rows,) GDPO: normalize each named reward in its group, weigh, add, whiten over the batch.

        u = sum_k w_k · N_g(r_k), with N_g as in grpo

    `whiten_over` selects the last step:

        tokens   (u - mean) / sqrt(var + 1e-8) over trainable tokens (verl); needs `lengths` (rows,)
        rows     (u - mean) / (std + eps) over rows (Classmate-CoT)
        none     u

    Weights default to 1 each and come after the normalization, as published. The Classmate-CoT code
    weighs before it normalizes, which cancels the weight.

    Raises: ValueError if `rewards` is empty, a weight names no reward, or `lengths` is missing.
    """
    if not rewards:
        raise ValueError("gdpo needs at least one named reward; `rewards` is empty")
    reward_weights = reward_weights or {}
    unknown = sorted(set(reward_weights) - set(rewards))
    if unknown:
        known = ", ".join(sorted(rewards))
        raise ValueError(f"gdpo weight {unknown[0]!r} names no reward; known: {known}")
    parts = []
    for name, values in rewards.items():
        normalized = grpo(values, groups, normalize_by_std=normalize_by_std, eps=eps)
        parts.append(reward_weights.get(name, 1.0) * normalized)
    total = torch.stack(parts).sum(0)
    if whiten_over == "none":
        return total
    if whiten_over == "rows":
        return normalize_rows(total, eps)
    if lengths is None:
        raise ValueError("gdpo over tokens needs `lengths`: the trainable tokens per row")
    return whiten(total, lengths.to(total.device))


def grpo_split(
    rewards: Tensor,
    groups: Tensor,
    on_policy: Tensor,
    *,
    normalize_by_std: bool = True,
    eps: float = STD_EPS,
) -> Tensor:
    """(rows,) GRPO with the mean and std of the group's on-policy rows, applied to all its rows.

    Used by LUFFY and RL with SFT loss. `on_policy` (rows,) bool. If the on-policy rewards are all
    equal, they get exactly 0, std is 1, and the other rows get R - mean. With fewer than two
    on-policy rows the mean is 0 and std is 1 (LUFFY raises KeyError for a group without any).
    """
    rewards = finite("rewards", rewards)
    on_policy = on_policy.to(rewards.device).bool()
    index = Groups.of(groups, rewards.device)
    members = on_policy.to(rewards.dtype)
    counts = index.sum(members)
    alone = counts < 2
    best = index.max(torch.where(on_policy, rewards, -torch.inf))
    worst = -index.max(torch.where(on_policy, -rewards, -torch.inf))
    flat = (best == worst) & ~alone
    mean = torch.where(alone, 0.0, index.sum(rewards * members) / counts.clamp(min=1))
    mean = torch.where(flat, best, mean)  # exact, where the sum would round
    offset = rewards - index.expand(mean)
    if not normalize_by_std:
        return offset
    variance = index.sum(offset.square() * members) / (counts - 1).clamp(min=1)
    std = torch.where(alone | flat, 1.0, variance.sqrt())
    return offset / (index.expand(std) + eps)


@dataclass(frozen=True)
class Advantage:
    """An advantage estimator and what it needs, declared so that a run is checked before it starts.

    Args:
        function: called with the columns of `reads` and the settings of `options` by name.
        reads: columns it is called with. `groups`, `mask`, `rows`, `num_rows` and `lengths`
            (trainable tokens per row) describe the batch; the others are columns of the batch.
        level: "row" if the function returns (rows,), "token" if it returns TokenAdvantages.
        options: settings of the method that it is called with, such as `gamma` for method.gamma.
        needs: what a method must offer beyond columns. critic: `values`. greedy: the reward of one
            greedy response per problem. named_rewards: `rewards` is a dict. group>=2: useless for
            groups of one. sum_probs_squared: sums of squared probabilities. classmate: a second
            reward and the mask of the thought. source: who wrote each row. environment: rewards
            and states per turn.
        reads_if_present: columns it is called with only if the run has them, such as
            `importance_weights`, which a run with a rollout correction has.

    A user's own estimator is declared the same way and given as method.advantage=file.py:NAME,
    where NAME is the function or the declaration.
    """

    function: Callable[..., Any]
    reads: tuple[str, ...]
    level: Literal["row", "token"] = "row"
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    reads_if_present: tuple[str, ...] = ()


def _token_level(
    function: Callable[..., Any],
    reads: tuple[str, ...],
    options: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    reads_if_present: tuple[str, ...] = (),
) -> Advantage:
    return Advantage(function, reads, "token", options, needs, reads_if_present)


def _classmate(function: Callable[..., Any], *more_options: str) -> Advantage:
    reads = ("main_rewards", "classmate_rewards", "groups", "mask", "cot_mask", "rows")
    options = ("classmate_weight", "normalize_by_std", "classmate_tokens", *more_options)
    return _token_level(function, reads, options, ("classmate",))


_REWARDS = ("rewards", "groups")
_LENGTHS = (*_REWARDS, "lengths")
_BY_STD = ("normalize_by_std",)
_TOKENS = ("token_rewards", "mask", "rows", "num_rows")
_OPTIMAL = (*_TOKENS, "old_logprobs", "sum_probs_squared", "groups")
_SQUARES = ("sum_probs_squared",)
_WEIGHTS = ("importance_weights",)

ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(grpo, _REWARDS, options=_BY_STD),
    "drgrpo": Advantage(drgrpo, _REWARDS),
    "lite_ppo": Advantage(lite_ppo, _REWARDS),
    "no_baseline": Advantage(no_baseline, ("rewards",)),
    "grpo_passk": Advantage(grpo_passk, _REWARDS, options=_BY_STD, needs=("group>=2",)),
    "rloo": Advantage(rloo, _REWARDS),
    "opo": Advantage(opo, _LENGTHS),
    "gpg": Advantage(gpg, _REWARDS),
    "reinforce_pp_baseline": Advantage(reinforce_pp_baseline, _LENGTHS),
    "gdpo": Advantage(
        gdpo, _LENGTHS, options=("reward_weights", *_BY_STD), needs=("named_rewards",)
    ),
    "grpo_split": Advantage(
        grpo_split, (*_REWARDS, "on_policy"), options=_BY_STD, needs=("source",)
    ),
    "gae": _token_level(
        token_advantages.gae, (*_TOKENS, "values"), ("gamma", "lam"), needs=("critic",)
    ),
    "reinforce_pp": _token_level(token_advantages.reinforce_pp, _TOKENS, ("gamma",)),
    "remax": _token_level(token_advantages.remax, (*_TOKENS, "greedy_rewards"), needs=("greedy",)),
    "optimal_token_baseline": _token_level(
        token_advantages.optimal_token_baseline,
        _OPTIMAL,
        needs=_SQUARES,
        reads_if_present=_WEIGHTS,
    ),
    "tir_optimal_token_baseline": _token_level(
        token_advantages.tir_optimal_token_baseline,
        _OPTIMAL,
        needs=_SQUARES,
        reads_if_present=_WEIGHTS,
    ),
    "classmate_separated": _classmate(classmate_advantages.separated),
    "classmate_non_neg": _classmate(classmate_advantages.non_neg),
    "classmate_with": _classmate(classmate_advantages.with_classmate),
    "classmate_gdpo": _classmate(classmate_advantages.gdpo, "normalize_answer"),
    "classmate_gdpo_wo_bn": _classmate(classmate_advantages.separated),
}
