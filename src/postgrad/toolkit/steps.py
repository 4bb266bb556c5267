"""Rewards, losses and the two micro-batch steps, over padded (rows, positions) tensors.

A step divides by its own rows and by `gradient_accumulation_steps`, so k micro-batches of B rows are one batch of kB. A row without
response tokens adds 0 and is still counted, so that this holds for it too.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from postgrad.algorithms.advantages import grpo
from postgrad.algorithms.groups import finite
from postgrad.algorithms.losses import policy_gradient, ppo_clip
from postgrad.algorithms.masked import masked_mean, masked_normalize, row_mean
from postgrad.errors import did_you_mean

LOSS_TYPES = ("no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip")


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages within groups of `group_size` consecutive responses.

    Returns:
        advantages (N,): r - group mean, with `normalize_by_std` divided by (std with n - 1) + `advantage_eps` (without: Dr. GRPO);
        raw (N,): reward_fn(response, truth)["reward"]; both float32;
        metadata: mean, std, min and max of the raw rewards, mean format_reward and answer_reward where they are given, and
        zero_variance, the share of groups whose rewards are all equal: they teach nothing. A group of one is such a group.

    Raises: ValueError when the lists differ, do not divide into groups, or hold a reward that is not finite.
    """
    count = len(rollout_responses)
    if count != len(repeated_ground_truths):
        raise ValueError(
            f"{count} responses for {len(repeated_ground_truths)} ground truths; repeat the truth for each response"
        )
    if group_size < 1 or count == 0 or count % group_size:
        raise ValueError(f"{count} responses do not divide into groups of {group_size}")
    scores = [
        reward_fn(response, truth)
        for response, truth in zip(rollout_responses, repeated_ground_truths, strict=True)
    ]
    raw = finite(
        "rewards", torch.tensor([float(score["reward"]) for score in scores], dtype=torch.float32)
    )
    # Training gives a group of one its reward as advantage; here the mean is the group's own, so nothing is left.
    if group_size == 1:
        advantages = torch.zeros_like(raw)
    else:
        advantages = grpo(
            raw,
            torch.arange(count) // group_size,
            normalize_by_std=normalize_by_std,
            eps=advantage_eps,
        )
    by_group = raw.view(-1, group_size)
    metadata = {
        "mean": float(raw.mean()),
        "std": float(raw.std()) if count > 1 else 0.0,
        "min": float(raw.min()),
        "max": float(raw.max()),
        "zero_variance": float((by_group.amax(1) == by_group.amin(1)).float().mean()),
    }
    for name in ("format_reward", "answer_reward"):
        if all(name in score for score in scores):
            metadata[name] = sum(float(score[name]) for score in scores) / count
    return advantages, raw, metadata


def compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor
) -> Tensor:
    """(rows, positions) -A · logp, from (rows, 1) rewards or advantages and (rows, positions) log-probs."""
    return policy_gradient(
        policy_log_probs, _column(raw_rewards_or_advantages, policy_log_probs)
    ).values


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """(rows, positions) -min(ρA, clip(ρ, 1 - cliprange, 1 + cliprange) · A), ρ = exp(new - old); A is (rows, 1).

    The old log-probs carry no gradient. Metadata: `clipped` (rows, positions) bool, where the clipped branch is strictly smaller;
    its mean over the response is the clip fraction. There is no dual clip.
    """
    return _ratio_loss(advantages, policy_log_probs, old_log_probs, cliprange)


def _ratio_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    column = _column(advantages, policy_log_probs)
    loss = ppo_clip(
        policy_log_probs,
        old_log_probs,
        column,
        clip_low=cliprange,
        clip_high=cliprange,
        dual_clip=None,
    )
    return loss.values, {"clipped": loss.metrics["clip_fraction"].bool()}


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(rows, positions) loss and metadata of one of LOSS_TYPES.

    `no_baseline` needs raw_rewards, `reinforce_with_baseline` advantages, `grpo_clip` advantages, old_log_probs and cliprange;
    `grpo_no_clip` is the handout's ablation -ρA. What a type does not need is ignored.

    Raises: ValueError for an unknown type, or when something the type needs is missing.
    """
    if loss_type == "no_baseline":
        return compute_naive_policy_gradient_loss(
            _given("raw_rewards", raw_rewards, loss_type), policy_log_probs
        ), {}
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"unknown loss_type {loss_type!r}; {did_you_mean(loss_type, LOSS_TYPES)}")
    advantages = _given("advantages", advantages, loss_type)
    if loss_type == "reinforce_with_baseline":
        return compute_naive_policy_gradient_loss(advantages, policy_log_probs), {}
    old_log_probs = _given("old_log_probs", old_log_probs, loss_type)
    if loss_type == "grpo_no_clip":
        return _ratio_loss(advantages, policy_log_probs, old_log_probs, None)
    if cliprange is None:
        raise ValueError("loss_type grpo_clip needs cliprange, for example 0.2")
    return compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-mean over rows of (sum of the response's log-probs / constant) / accumulation steps. Calls backward().

    Returns: the scaled loss, detached, and metadata: `num_response_tokens`. Gradients add up in `.grad` in place.
    """
    rows = masked_normalize(
        policy_log_probs, response_mask, dim=-1, normalize_constant=normalize_constant
    )
    return _backward(-rows, response_mask, gradient_accumulation_steps)


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    constant_normalize_factor: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """compute_policy_gradient_loss averaged over each response, then over rows, / accumulation steps. Calls backward().

    With `constant_normalize_factor` (Dr. GRPO: the longest generation) each response is summed and divided by it instead.

    Returns: the scaled loss, detached, and metadata: `num_response_tokens` and, for losses with a ratio, `clipped`
    (rows, positions) and `clip_fraction` over the response tokens.
    """
    mask = response_mask.bool()
    values, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    if constant_normalize_factor is None:
        row_of = torch.arange(len(values), device=values.device).repeat_interleave(values.shape[1])
        rows = row_mean(values.flatten(), mask.flatten(), row_of, len(values))
    else:
        rows = masked_normalize(values, mask, dim=-1, normalize_constant=constant_normalize_factor)
    loss, counts = _backward(rows, mask, gradient_accumulation_steps)
    if "clipped" in metadata:
        metadata["clip_fraction"] = masked_mean(metadata["clipped"].float(), mask).nan_to_num(0.0)
    return loss, metadata | counts


def _backward(
    rows: Tensor, mask: Tensor, gradient_accumulation_steps: int
) -> tuple[Tensor, dict[str, Tensor]]:
    if gradient_accumulation_steps < 1:
        raise ValueError(
            f"gradient_accumulation_steps is {gradient_accumulation_steps}; it is at least 1"
        )
    loss = rows.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), {"num_response_tokens": mask.bool().sum()}


def _column(values: Tensor, log_probs: Tensor) -> Tensor:
    if values.shape not in ((len(log_probs), 1), log_probs.shape):
        raise ValueError(
            f"rewards or advantages are {tuple(values.shape)}; log-probs {tuple(log_probs.shape)} want (rows, 1)"
        )
    return values


def _given(name: str, value: Tensor | None, loss_type: str) -> Tensor:
    if value is None:
        raise ValueError(f"loss_type {loss_type} needs {name}")
    return value
