"""Rewards of Classmate-CoT before they become advantages.

Averages scores over classmates and samples, applies the condition, and pairs problems.
"""

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from postgrad.algorithms.groups import Groups

CONDITIONS = (
    "always",
    "no_classmate",
    "no_classmate_when_main_incorrect",
    "neg_classmate_when_main_incorrect",
)


def combine(scores: Tensor, weights: Sequence[float], no_output_score: float = 0.0) -> Tensor:
    """(rows,) weighted mean over classmates of the mean score over samples.

    `scores` is (rows, classmates, samples). NaN means that there was no continuation and counts as
    `no_output_score`. Empty `weights` are equal weights; others are divided by their sum.
    """
    per_classmate = torch.where(scores.isnan(), no_output_score, scores).mean(-1)
    share = torch.tensor(list(weights) or [1.0] * scores.shape[1], dtype=scores.dtype)
    return per_classmate @ (share / share.sum())


def gate(main: Tensor, classmate: Tensor, condition: str) -> Tensor:
    """(rows,) the part of the classmates' reward that counts.

    always: all of it. no_classmate: nothing. The other conditions keep it where the main reward is
    above 0; elsewhere it becomes 0 (no_...) or is negated (neg_...).

    Raises: ValueError for an unknown condition.
    """
    if condition not in CONDITIONS:
        raise ValueError(f"unknown condition {condition!r}; known: {', '.join(CONDITIONS)}")
    if condition == "no_classmate":
        return torch.zeros_like(classmate)
    if condition == "always":
        return classmate
    otherwise = torch.zeros_like(classmate)
    if condition == "neg_classmate_when_main_incorrect":
        otherwise = -classmate
    return torch.where(main > 0, classmate, otherwise)


def pair(names: Sequence[str], random: Random) -> dict[str, str]:
    """Return the partner of each name: one random cycle through all distinct names.

    Only a single name is its own partner.
    """
    # Sorted by random(), because shuffle() differs between Python versions.
    order = sorted(sorted(set(names)), key=lambda _: random.random())
    return dict(zip(order, [*order[1:], order[0]], strict=True))


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation; 0 if one side does not vary."""
    a = a.double() - a.double().mean()
    b = b.double() - b.double().mean()
    scale = a.norm() * b.norm()
    return float((a @ b) / scale) if scale > 0 else 0.0


def channel_metrics(main: Tensor, classmate: Tensor, groups: Tensor) -> dict[str, float]:
    """Metrics: correlation of the two rewards, and the share of groups where each is constant."""
    index = Groups.of(groups, main.device)
    return {
        "groups/flat_main": float(index.all_equal(main).double().mean()),
        "groups/flat_classmate": float(index.all_equal(classmate).double().mean()),
        "classmate/correlation": correlation(main, classmate),
    }
