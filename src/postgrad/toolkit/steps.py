"""Rewards, losses and the two micro-batch steps, over padded (rows, positions) tensors.

A step divides its loss by its number of rows and by `gradient_accumulation_steps`, so k
micro-batches of B rows give the gradient of one batch of kB rows. A row without response
tokens adds 0 to the loss and counts as a row, so this also holds with such rows.
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
    """Return advantages, raw rewards and metadata of groups of `group_size` responses.

    The responses of one group are consecutive.

    Returns:
        advantages (N,) float32: reward minus group mean. With `normalize_by_std` they are
        divided by the group's std (n - 1) + `advantage_eps`; without it this is Dr. GRPO.
        raw (N,) float32: reward_fn(response, truth)["reward"].
        metadata: mean, std, min and max of the raw rewards; mean format_reward and
        answer_reward if every score has them; zero_variance, the fraction of groups whose
        rewards are all equal and so have no gradient. A group of one counts as one of these.

    Raises: ValueError when the lists differ in length, do not divide into groups, or contain
        a reward that is not finite.
    """
    count = len(rollout_responses)
    if count != len(repeated_ground_truths):
        raise ValueError(
            f"{count} responses for {len(repeated_ground_truths)} ground truths; "
            "repeat the truth for each response"
        )
    if group_size < 1 or count == 0 or count % group_size:
        raise ValueError(
            f"group_size is {group_size}: {count} responses do not divide into groups of it"
        )
    scores = [
        reward_fn(response, truth)
        for response, truth in zip(rollout_responses, repeated_ground_truths, strict=True)
    ]
    rewards = [float(score["reward"]) for score in scores]
    raw = finite("rewards", torch.tensor(rewards, dtype=torch.float32))
    # For a group of one, training uses the reward itself as advantage. The assignment
    # subtracts the group's mean, which leaves 0.
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
    """Return (rows, positions) -A · logp.

    Rewards or advantages are (rows, 1), log-probs (rows, positions).
    """
    _check_shape(raw_rewards_or_advantages, policy_log_probs)
    return policy_gradient(policy_log_probs, raw_rewards_or_advantages).values


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (rows, positions) -min(ρA, clip(ρ, 1 - cliprange, 1 + cliprange) · A) and metadata.

    ρ = exp(new - old); A is (rows, 1). The old log-probs get no gradient. There is no dual clip.
    Metadata: `clipped` (rows, positions) bool, true where the clipped branch is strictly
    smaller. Its mean over the response tokens is the clip fraction.
    """
    return _ratio_loss(advantages, policy_log_probs, old_log_probs, cliprange)


def _ratio_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    _check_shape(advantages, policy_log_probs)
    loss = ppo_clip(
        policy_log_probs,
        old_log_probs,
        advantages,
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
    """Return the (rows, positions) loss and the metadata of one of LOSS_TYPES.

    `no_baseline` needs raw_rewards. `reinforce_with_baseline` needs advantages.
    `grpo_clip` needs advantages, old_log_probs and cliprange. `grpo_no_clip` is the handout's
    ablation -ρA and needs advantages and old_log_probs. Other arguments are ignored.

    Raises: ValueError for an unknown type, or when an argument the type needs is None.
    """
    if loss_type == "no_baseline":
        raw_rewards = _required("raw_rewards", raw_rewards, loss_type)
        return compute_naive_policy_gradient_loss(raw_rewards, policy_log_probs), {}
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"unknown loss_type {loss_type!r}; {did_you_mean(loss_type, LOSS_TYPES)}")
    advantages = _required("advantages", advantages, loss_type)
    if loss_type == "reinforce_with_baseline":
        return compute_naive_policy_gradient_loss(advantages, policy_log_probs), {}
    old_log_probs = _required("old_log_probs", old_log_probs, loss_type)
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
    """Compute the SFT loss of one micro-batch and call backward().

    Each row's loss is the negative sum of its response log-probs / `normalize_constant`.
    The loss is the mean over rows / `gradient_accumulation_steps`.

    Returns: the scaled loss, detached, and metadata with `num_response_tokens`.
        Gradients accumulate in `.grad`.
    """
    log_likelihoods = masked_normalize(
        policy_log_probs, response_mask, dim=-1, normalize_constant=normalize_constant
    )
    return _backward(-log_likelihoods, response_mask, gradient_accumulation_steps)


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
    """Compute the policy-gradient loss of one micro-batch and call backward().

    The token losses of compute_policy_gradient_loss are averaged over each response, then over
    the rows, and divided by `gradient_accumulation_steps`. With `constant_normalize_factor`
    (Dr. GRPO: the maximum generation length) each response's sum is divided by it instead.

    Returns: the scaled loss, detached, and metadata: `num_response_tokens` and, for losses with
        a ratio, `clipped` (rows, positions) and `clip_fraction` over the response tokens.
    """
    mask = response_mask.bool()
    values, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    if constant_normalize_factor is None:
        row_of = torch.arange(len(values), device=values.device).repeat_interleave(values.shape[1])
        row_losses = row_mean(values.flatten(), mask.flatten(), row_of, len(values))
    else:
        row_losses = masked_normalize(
            values, mask, dim=-1, normalize_constant=constant_normalize_factor
        )
    loss, counts = _backward(row_losses, mask, gradient_accumulation_steps)
    if "clipped" in metadata:
        metadata["clip_fraction"] = masked_mean(metadata["clipped"].float(), mask).nan_to_num(0.0)
    return loss, metadata | counts


def _backward(
    row_losses: Tensor, mask: Tensor, gradient_accumulation_steps: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call backward() on the mean of the (rows,) losses / gradient_accumulation_steps."""
    if gradient_accumulation_steps < 1:
        raise ValueError(
            f"gradient_accumulation_steps is {gradient_accumulation_steps}; give at least 1"
        )
    loss = row_losses.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), {"num_response_tokens": mask.bool().sum()}


def _check_shape(values: Tensor, log_probs: Tensor) -> None:
    """Refuses a shape such as (rows,), which would broadcast over positions instead of rows."""
    expected = (len(log_probs), 1)
    if values.shape not in (expected, log_probs.shape):
        raise ValueError(
            f"rewards or advantages have shape {tuple(values.shape)}; "
            f"log-probs {tuple(log_probs.shape)} need shape {expected}"
        )


def _required(name: str, value: Tensor | None, loss_type: str) -> Tensor:
    if value is None:
        raise ValueError(f"loss_type {loss_type} needs {name}")
    return value
