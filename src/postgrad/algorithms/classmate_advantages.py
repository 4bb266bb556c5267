"""Advantages of Classmate-CoT: the main reward on the whole response, the classmate's on the tokens of the thought.

`main_rewards` m and `classmate_rewards` c are (rows,), `mask` R is (tokens,) the trainable tokens, `cot_mask` C is (tokens,) the
tokens of the thought the classmate saw (only C and R together counts), `rows` (tokens,). N is group normalization as in
advantages.grpo; the default, as in the reference, is without the standard deviation. With a = N(m), b = N(c), w = `weight`:

    separated        (a + w·b) on C,         a on the rest        also known as gdpo_wo_bn
    non_neg          (a + w·max(b, 0)) on C, a on the rest
    with_classmate   N(m + w·c) on C,        a on the rest
    gdpo             z on C,                 a on the rest        z = (a + w·b) normalized over all rows of the batch

`spread="all"` puts the C value on every trainable token. The weight comes AFTER the normalization (the published order of GDPO);
the reference weighs before it, so its weight cancels when the standard deviation is on. The gate on c is the caller's. Equal
rewards give exactly 0; a group of one keeps its reward (groups.py); gdpo of a single row is 0 where the reference gives NaN.
"""

from typing import Literal

import torch
from torch import Tensor

from postgrad.algorithms.groups import STD_EPS, Groups, centered, finite, normalize_rows
from postgrad.algorithms.token_advantages import TokenAdvantages

Spread = Literal["cot", "all"]


def _normalize(name: str, rewards: Tensor, groups: Tensor, by_std: bool) -> Tensor:
    rewards = finite(name, rewards)
    offset, std = centered(rewards, Groups.of(groups, rewards.device))
    return offset / (std + STD_EPS) if by_std else offset


def _place(
    on_cot: Tensor, elsewhere: Tensor, mask: Tensor, cot_mask: Tensor, rows: Tensor, spread: Spread
) -> TokenAdvantages:
    """(rows,) values onto (tokens,): `on_cot` on the thought (or everywhere), `elsewhere` on the other trainable tokens."""
    if spread not in ("cot", "all"):
        raise ValueError(
            f"spread is {spread!r}; it is 'cot' (the thought's tokens) or 'all' (every trainable token)"
        )
    thought = cot_mask.bool() if spread == "cot" else torch.ones_like(mask, dtype=torch.bool)
    tokens = torch.where(thought, on_cot[rows], elsewhere[rows])
    advantages = torch.where(mask.bool(), tokens, 0.0)
    return TokenAdvantages(advantages, advantages)


def separated(
    main_rewards: Tensor,
    classmate_rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    cot_mask: Tensor,
    rows: Tensor,
    *,
    weight: float = 1.0,
    normalize_by_std: bool = False,
    spread: Spread = "cot",
) -> TokenAdvantages:
    """(tokens,) a·R + weight·b·C: each reward normalized alone (grpo_main_classmate_separated, the same as gdpo_wo_bn)."""
    main = _normalize("main_rewards", main_rewards, groups, normalize_by_std)
    classmate = _normalize("classmate_rewards", classmate_rewards, groups, normalize_by_std)
    return _place(main + weight * classmate, main, mask, cot_mask, rows, spread)


def non_neg(
    main_rewards: Tensor,
    classmate_rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    cot_mask: Tensor,
    rows: Tensor,
    *,
    weight: float = 1.0,
    normalize_by_std: bool = False,
    spread: Spread = "cot",
) -> TokenAdvantages:
    """(tokens,) a·R + weight·max(b, 0)·C: the classmate may praise a thought, never punish it."""
    main = _normalize("main_rewards", main_rewards, groups, normalize_by_std)
    classmate = _normalize("classmate_rewards", classmate_rewards, groups, normalize_by_std).clamp(
        min=0
    )
    return _place(main + weight * classmate, main, mask, cot_mask, rows, spread)


def with_classmate(
    main_rewards: Tensor,
    classmate_rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    cot_mask: Tensor,
    rows: Tensor,
    *,
    weight: float = 1.0,
    normalize_by_std: bool = False,
    spread: Spread = "cot",
) -> TokenAdvantages:
    """(tokens,) N(m + weight·c) on the thought, N(m) on the rest (grpo_w_classmate, the form of the published runs)."""
    main = _normalize("main_rewards", main_rewards, groups, normalize_by_std)
    both = finite("main_rewards", main_rewards) + weight * finite(
        "classmate_rewards", classmate_rewards
    )
    return _place(
        _normalize("rewards", both, groups, normalize_by_std), main, mask, cot_mask, rows, spread
    )


def gdpo(
    main_rewards: Tensor,
    classmate_rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    cot_mask: Tensor,
    rows: Tensor,
    *,
    weight: float = 1.0,
    normalize_by_std: bool = False,
    spread: Spread = "cot",
    normalize_answer: bool = False,
) -> TokenAdvantages:
    """(tokens,) z on the thought, a on the rest; z = a + weight·b normalized over the batch's rows.

    In the reference the thought then has unit variance and the answer has not; `normalize_answer` normalizes a over the rows too.
    """
    main = _normalize("main_rewards", main_rewards, groups, normalize_by_std)
    classmate = _normalize("classmate_rewards", classmate_rewards, groups, normalize_by_std)
    answer = normalize_rows(main) if normalize_answer else main
    return _place(normalize_rows(main + weight * classmate), answer, mask, cot_mask, rows, spread)
