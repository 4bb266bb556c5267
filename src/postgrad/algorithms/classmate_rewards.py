"""Rewards of Classmate-CoT before they become advantages: several classmates and samples into one number, the gate, the pairing."""

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
    """(rows,) sum over classmates k of w_k · mean over samples of the score.

    `scores` is (rows, classmates, samples), NaN where there was no continuation: it counts as `no_output_score`. Empty `weights` are equal
    ones; others are taken as shares of their sum.
    """
    each = torch.where(scores.isnan(), no_output_score, scores).mean(-1)
    share = torch.tensor(list(weights) or [1.0] * scores.shape[1], dtype=scores.dtype)
    return each @ (share / share.sum())


def gate(main: Tensor, classmate: Tensor, condition: str) -> Tensor:
    """(rows,) what of the classmate's reward counts, by whether the main reward is above 0.

    Raises: ValueError for an unknown condition.
    """
    if condition not in CONDITIONS:
        raise ValueError(f"unknown condition {condition!r}; there are: {', '.join(CONDITIONS)}")
    if condition == "no_classmate":
        return torch.zeros_like(classmate)
    if condition == "always":
        return classmate
    otherwise = (
        -classmate
        if condition == "neg_classmate_when_main_incorrect"
        else torch.zeros_like(classmate)
    )
    return torch.where(main > 0, classmate, otherwise)


def pair(names: Sequence[str], random: Random) -> dict[str, str]:
    """Each name's partner: a permutation of the distinct names that is one cycle, so that only a name that is alone is its own."""
    order = sorted(
        sorted(set(names)), key=lambda _: random.random()
    )  # only random() is the same in every Python version
    return dict(zip(order, [*order[1:], order[0]], strict=True))


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation; 0 where one side does not vary."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    scale = a.norm() * b.norm()
    return float((a @ b) / scale) if scale > 0 else 0.0


def channel_metrics(main: Tensor, classmate: Tensor, groups: Tensor) -> dict[str, float]:
    """How the two rewards go together, and the share of groups in which each is the same for all."""
    index = Groups.of(groups, main.device)
    flat = {"main": index.all_equal(main), "classmate": index.all_equal(classmate)}
    shares = {f"groups/flat_{name}": float(column.double().mean()) for name, column in flat.items()}
    return shares | {"classmate/correlation": correlation(main, classmate)}
