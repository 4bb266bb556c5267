"""Advantages of whole responses: one number a row, from one reward a row. Token-level estimators are in token_advantages.py.

Notation: R_i the reward of row i, g its group, n_g the group's size. `rewards` is (rows,) float, `groups` is (rows,) int64 with any
integers in any order. Every function returns (rows,); spread it over the row's trainable tokens.

One rule for all of them (groups.py): a group of one has baseline 0 and standard deviation 1, so A = R (or R / (1 + eps) when the
estimator divides); a group whose rewards are all equal gives exactly 0; an outcome reward sits on the last TRAINABLE token
(token_advantages.outcome_rewards). Estimators that whiten over the batch after the group step apply the rule before whitening.
All of them refuse rewards that are not finite (ValueError). ADVANTAGES at the end names them all for a driver.
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
    """(rows,) (R_i - mean_g) / (std_g + eps), std with n - 1; without `normalize_by_std` R_i - mean_g."""
    rewards = finite("rewards", rewards)
    offset, std = centered(rewards, Groups.of(groups, rewards.device))
    return offset / (std + eps) if normalize_by_std else offset


def drgrpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """(rows,) R_i - mean_g (Dr. GRPO). Pair it with the aggregation seq-mean-token-sum-norm and no KL loss."""
    return grpo(rewards, groups, normalize_by_std=False)


def grpo_passk(
    rewards: Tensor, groups: Tensor, *, normalize_by_std: bool = True, eps: float = STD_EPS
) -> Tensor:
    """(rows,) only the best row of a group gets (R_best - R_second) / (std_g + eps), everyone else 0.

    A tie at the top gives 0 to all. A group of one follows the one rule (R_second is 0, std is 1) where verl raises; a driver that
    wants the refusal reads `needs` in ADVANTAGES.
    """
    rewards = finite("rewards", rewards)
    index = Groups.of(groups, rewards.device)
    best = index.max(rewards)
    is_best = rewards == index.expand(best)
    num_best = index.sum(is_best.to(rewards.dtype))
    second = index.max(torch.where(is_best, -torch.inf, rewards))
    second = torch.where(num_best > 1, best, second)  # a tie is its own runner-up
    alone = index.sum(torch.ones_like(rewards)) < 2
    gap = best - torch.where(alone, 0.0, second)
    _, std = centered(rewards, index)
    advantages = torch.where(is_best, index.expand(gap), 0.0)
    return advantages / (std + eps) if normalize_by_std else advantages


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """(rows,) R_i - mean of the other rows of the group = n_g / (n_g - 1) · (R_i - mean_g); a group of one keeps R.

    verl's vectorized variant gives 0 to a group of one; here there is one rule.
    """
    rewards = finite("rewards", rewards)
    index = Groups.of(groups, rewards.device)
    counts = index.expand(index.sum(torch.ones_like(rewards)))
    offset, _ = centered(rewards, index)
    return torch.where(counts > 1, offset * counts / (counts - 1).clamp(min=1), offset)


def opo(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """(rows,) R_i - sum_j(L_j R_j) / sum_j(L_j) over the group: the length-weighted baseline of OPO.

    `lengths` (rows,) counts trainable tokens. Where a whole group has none its baseline is 0; the row has no token to train anyway.
    """
    rewards = finite("rewards", rewards)
    index = Groups.of(groups, rewards.device)
    weights = lengths.to(rewards)
    total = index.sum(weights)
    alone = index.sum(torch.ones_like(rewards)) < 2
    baseline = torch.where(
        alone | (total == 0), 0.0, index.sum(weights * rewards) / total.clamp(min=1)
    )
    flat = index.all_equal(rewards) & ~alone
    return torch.where(index.expand(flat), 0.0, rewards - index.expand(baseline))


def gpg(rewards: Tensor, groups: Tensor) -> Tensor:
    """(rows,) alpha · (R_i - mean_g), alpha = rows / max(rows with R != 0, 1): rescales for the share of rows without signal.

    As in verl a negative reward counts as non-zero, so alpha means what it says only for rewards where 0 is "failed".
    """
    rewards = finite("rewards", rewards)
    offset, _ = centered(rewards, Groups.of(groups, rewards.device))
    return offset * rewards.numel() / (rewards != 0).sum().clamp(min=1)


def reinforce_pp_baseline(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """(rows,) R_i - mean_g, whitened over the trainable tokens of the batch (REINFORCE++ with group baseline).

    `lengths` (rows,) weighs each row by its trainable tokens. Whitening moves the zero: a group without signal gets the same
    non-zero advantage on all its rows whenever the token-weighted batch mean is not 0. That is the published estimator, not a slip.
    """
    rewards = finite("rewards", rewards)
    offset, _ = centered(rewards, Groups.of(groups, rewards.device))
    return whiten(offset, lengths.to(rewards.device))


def gdpo(
    rewards: Mapping[str, Tensor],
    groups: Tensor,
    weights: Mapping[str, float] | None = None,
    lengths: Tensor | None = None,
    *,
    whiten_over: Literal["tokens", "rows", "none"] = "tokens",
    normalize_by_std: bool = True,
    eps: float = STD_EPS,
) -> Tensor:
    """(rows,) GDPO: normalize each named reward within its group, weigh, add, then whiten over the batch.

        u = sum_k w_k · N_g(r_k),  N_g as in `grpo`        the published order: weights come after the normalization
        tokens: (u - mean) / sqrt(var + 1e-8) over trainable tokens (verl), needs `lengths` (rows,)
        rows:   (u - mean) / (std + eps) over rows (Classmate-CoT);   none: u

    Weights default to 1 each. The Classmate fork weighs before normalizing, which cancels the weight.
    Raises: ValueError when `rewards` is empty, a weight names no reward, or `lengths` is missing for tokens.
    """
    if not rewards:
        raise ValueError("gdpo needs at least one named reward")
    weights = weights or {}
    unknown = sorted(set(weights) - set(rewards))
    if unknown:
        raise ValueError(
            f"gdpo weight {unknown[0]!r} names no reward; there are: {', '.join(sorted(rewards))}"
        )
    parts = [
        weights.get(name, 1.0) * grpo(r, groups, normalize_by_std=normalize_by_std, eps=eps)
        for name, r in rewards.items()
    ]
    total = torch.stack(parts).sum(0)
    if whiten_over == "none":
        return total
    if whiten_over == "rows":
        return normalize_rows(total, eps)
    if lengths is None:
        raise ValueError(
            "gdpo whitens over tokens and needs `lengths`, the number of trainable tokens of each row"
        )
    return whiten(total, lengths.to(total.device))


def grpo_split(
    rewards: Tensor,
    groups: Tensor,
    on_policy: Tensor,
    *,
    normalize_by_std: bool = True,
    eps: float = STD_EPS,
) -> Tensor:
    """(rows,) GRPO with mean and std of the group's on-policy rows only, applied to all its rows (LUFFY, RL with SFT loss).

    `on_policy` (rows,) bool. On-policy rewards that are all equal have no spread: they get exactly 0, std counts as 1, and the
    other rows get R - mean. Fewer than two on-policy rows: mean 0, std 1 (LUFFY raises KeyError on a group without any).
    """
    rewards = finite("rewards", rewards)
    on_policy = on_policy.to(rewards.device).bool()
    index = Groups.of(groups, rewards.device)
    members = on_policy.to(rewards.dtype)
    counts = index.sum(members)
    alone = counts < 2
    best = index.max(torch.where(on_policy, rewards, -torch.inf))
    flat = (best == -index.max(torch.where(on_policy, -rewards, -torch.inf))) & ~alone
    mean = torch.where(alone, 0.0, index.sum(rewards * members) / counts.clamp(min=1))
    mean = torch.where(flat, best, mean)  # exact, where the sum would round
    offset = rewards - index.expand(mean)
    if not normalize_by_std:
        return offset
    variance = index.sum(offset.square() * members) / (counts - 1).clamp(min=1)
    return offset / (index.expand(torch.where(alone | flat, 1.0, variance.sqrt())) + eps)


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator and what it wants, so that a driver can check before a run.

    `columns` are to be passed by name: `groups`, `mask`, `rows`, `num_rows` and `lengths` (trainable tokens a row) come from the
    batch's own shape, the others are columns some stage must have written. `level` row returns (rows,), token returns
    token_advantages.TokenAdvantages. `needs`, beyond columns: critic (values), greedy (the reward of one greedy response a
    problem), named_rewards (`rewards` is a dict), group>=2 (meaningless for groups of one), sum_probs_squared (unfused logits),
    classmate (a second reward, the mask of the thought), source (who wrote each row).
    """

    function: Callable[..., Any]
    columns: tuple[str, ...]
    level: Literal["row", "token"]
    needs: tuple[str, ...] = ()


_TOKENS = ("token_rewards", "mask", "rows", "num_rows")
_OPTIMAL = (
    "token_rewards",
    "old_logprobs",
    "sum_probs_squared",
    "mask",
    "rows",
    "num_rows",
    "groups",
)
_CLASSMATE = ("main_rewards", "classmate_rewards", "groups", "mask", "cot_mask", "rows")

ADVANTAGES: dict[str, Estimator] = {
    "grpo": Estimator(grpo, ("rewards", "groups"), "row"),
    "drgrpo": Estimator(drgrpo, ("rewards", "groups"), "row"),
    "grpo_passk": Estimator(grpo_passk, ("rewards", "groups"), "row", ("group>=2",)),
    "rloo": Estimator(rloo, ("rewards", "groups"), "row"),
    "opo": Estimator(opo, ("rewards", "groups", "lengths"), "row"),
    "gpg": Estimator(gpg, ("rewards", "groups"), "row"),
    "reinforce_pp_baseline": Estimator(
        reinforce_pp_baseline, ("rewards", "groups", "lengths"), "row"
    ),
    "gdpo": Estimator(gdpo, ("rewards", "groups", "lengths"), "row", ("named_rewards",)),
    "grpo_split": Estimator(grpo_split, ("rewards", "groups", "on_policy"), "row", ("source",)),
    "gae": Estimator(
        token_advantages.gae,
        ("token_rewards", "values", "mask", "rows", "num_rows"),
        "token",
        ("critic",),
    ),
    "reinforce_pp": Estimator(token_advantages.reinforce_pp, _TOKENS, "token"),
    "remax": Estimator(token_advantages.remax, (*_TOKENS, "greedy_rewards"), "token", ("greedy",)),
    "optimal_token_baseline": Estimator(
        token_advantages.optimal_token_baseline, _OPTIMAL, "token", ("sum_probs_squared",)
    ),
    "tir_optimal_token_baseline": Estimator(
        token_advantages.tir_optimal_token_baseline, _OPTIMAL, "token", ("sum_probs_squared",)
    ),
    "classmate_separated": Estimator(
        classmate_advantages.separated, _CLASSMATE, "token", ("classmate",)
    ),
    "classmate_non_neg": Estimator(
        classmate_advantages.non_neg, _CLASSMATE, "token", ("classmate",)
    ),
    "classmate_with": Estimator(
        classmate_advantages.with_classmate, _CLASSMATE, "token", ("classmate",)
    ),
    "classmate_gdpo": Estimator(classmate_advantages.gdpo, _CLASSMATE, "token", ("classmate",)),
    "classmate_gdpo_wo_bn": Estimator(
        classmate_advantages.separated, _CLASSMATE, "token", ("classmate",)
    ),
}
