"""Advantages of Classmate-CoT: main reward on the whole response, classmates' on the thought.

`main_rewards` m and `classmate_rewards` c are (rows,). `mask` R is (tokens,), the trainable tokens.
`cot_mask` C is (tokens,), the tokens of the thought that the classmates saw; only tokens in both C
and R count. `rows` is (tokens,). N is group normalization as in advantages.grpo, by default without
the standard deviation, as in the original code. With a = N(m), b = N(c), w = `classmate_weight`:

    separated        (a + w·b) on C,         a on the rest        also known as gdpo_wo_bn
    non_neg          (a + w·max(b, 0)) on C, a on the rest
    with_classmate   N(m + w·c) on C,        a on the rest
    gdpo             z on C,                 a on the rest        z = normalize_rows(a + w·b)

`classmate_tokens="all"` puts the value of C on every trainable token. The weight comes after the
normalization, as in the GDPO paper; the original code weighs before it, so that its weight cancels
when it divides by the standard deviation. The caller has applied the condition on c already.

Equal rewards give exactly 0; a group of one keeps its reward (groups.py); gdpo of a single row is 0
where the original code gives NaN.
"""

from typing import Literal

import torch
from torch import Tensor

from postgrad.algorithms.groups import STD_EPS, Groups, centered, finite, normalize_rows
from postgrad.algorithms.token_advantages import TokenAdvantages

ClassmateTokens = Literal["cot", "all"]


def _normalize(name: str, rewards: Tensor, groups: Tensor, by_std: bool) -> Tensor:
    """(rows,) N of the notation above. `name` is used in error messages."""
    rewards = finite(name, rewards)
    offset, std = centered(rewards, Groups.of(groups, rewards.device))
    return offset / (std + STD_EPS) if by_std else offset


def _to_tokens(
    on_cot: Tensor,
    on_rest: Tensor,
    mask: Tensor,
    cot_mask: Tensor,
    rows: Tensor,
    classmate_tokens: ClassmateTokens,
) -> TokenAdvantages:
    """Row values onto tokens: `on_cot` on the thought (or on all), `on_rest` on the others."""
    if classmate_tokens not in ("cot", "all"):
        raise ValueError(
            f"classmate_tokens={classmate_tokens!r} is unknown; "
            "use 'cot' (tokens of the thought) or 'all' (every trainable token)"
        )
    thought = torch.ones_like(mask, dtype=torch.bool)
    if classmate_tokens == "cot":
        thought = cot_mask.bool()
    tokens = torch.where(thought, on_cot[rows], on_rest[rows])
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
    classmate_weight: float = 1.0,
    normalize_by_std: bool = False,
    classmate_tokens: ClassmateTokens = "cot",
) -> TokenAdvantages:
    """(tokens,) a·R + w·b·C: each reward is normalized by itself.

    The original code calls it grpo_main_classmate_separated, and also gdpo_wo_bn.
    """
    main = _normalize("main_rewards", main_rewards, groups, normalize_by_std)
    classmate = _normalize("classmate_rewards", classmate_rewards, groups, normalize_by_std)
    return _to_tokens(
        main + classmate_weight * classmate, main, mask, cot_mask, rows, classmate_tokens
    )


def non_neg(
    main_rewards: Tensor,
    classmate_rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    cot_mask: Tensor,
    rows: Tensor,
    *,
    classmate_weight: float = 1.0,
    normalize_by_std: bool = False,
    classmate_tokens: ClassmateTokens = "cot",
) -> TokenAdvantages:
    """(tokens,) a·R + w·max(b, 0)·C: classmates can raise an advantage but never lower it."""
    main = _normalize("main_rewards", main_rewards, groups, normalize_by_std)
    classmate = _normalize("classmate_rewards", classmate_rewards, groups, normalize_by_std)
    praise = classmate.clamp(min=0)
    return _to_tokens(
        main + classmate_weight * praise, main, mask, cot_mask, rows, classmate_tokens
    )


def with_classmate(
    main_rewards: Tensor,
    classmate_rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    cot_mask: Tensor,
    rows: Tensor,
    *,
    classmate_weight: float = 1.0,
    normalize_by_std: bool = False,
    classmate_tokens: ClassmateTokens = "cot",
) -> TokenAdvantages:
    """(tokens,) N(m + w·c) on the thought, N(m) on the rest.

    The form of the published runs; the original code calls it grpo_w_classmate.
    """
    main = _normalize("main_rewards", main_rewards, groups, normalize_by_std)
    classmate = finite("classmate_rewards", classmate_rewards)
    both = finite("main_rewards", main_rewards) + classmate_weight * classmate
    on_cot = _normalize("rewards", both, groups, normalize_by_std)
    return _to_tokens(on_cot, main, mask, cot_mask, rows, classmate_tokens)


def gdpo(
    main_rewards: Tensor,
    classmate_rewards: Tensor,
    groups: Tensor,
    mask: Tensor,
    cot_mask: Tensor,
    rows: Tensor,
    *,
    classmate_weight: float = 1.0,
    normalize_by_std: bool = False,
    classmate_tokens: ClassmateTokens = "cot",
    normalize_answer: bool = False,
) -> TokenAdvantages:
    """(tokens,) z on the thought, a on the rest; z = a + w·b normalized over the batch's rows.

    Only the thought's advantages have unit variance then. `normalize_answer` normalizes a over the
    rows too.
    """
    main = _normalize("main_rewards", main_rewards, groups, normalize_by_std)
    classmate = _normalize("classmate_rewards", classmate_rewards, groups, normalize_by_std)
    answer = normalize_rows(main) if normalize_answer else main
    on_cot = normalize_rows(main + classmate_weight * classmate)
    return _to_tokens(on_cot, answer, mask, cot_mask, rows, classmate_tokens)
