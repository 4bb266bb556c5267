"""The columns that advantages read: rewards, the KL penalty in them, and the shape of the batch."""

from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.kl import adapt_kl_coef, kl_in_reward, mean_kl
from postgrad.algorithms.token_advantages import outcome_rewards, turn_end_rewards
from postgrad.errors import RunError, did_you_mean
from postgrad.methods.method import Step
from postgrad.methods.support.grpo_settings import kl_estimator
from postgrad.types import POLICY, Batch


def advantage_columns(method: Any, batch: Batch, step: Step) -> dict[str, Any]:
    """All columns of the batch, and what algorithms.advantages.Advantage lists, by name."""
    mask = batch.tokens["loss_mask"]
    turns: dict[str, Any] = {}
    if "turn_rewards" in batch.rows:
        turns = turn_columns(batch)
        outcome = turn_end_rewards(
            turns["turn_rewards"], turns["turns"], mask, batch.row_index, len(batch)
        )
    else:
        outcome = outcome_rewards(batch.rows["reward"], mask, batch.row_index, len(batch))
    token_rewards = outcome
    if method.settings.kl == "reward":
        token_rewards = _subtract_kl(method, outcome, batch, step)
    # Not the sum of token_rewards: a row whose tokens are all masked keeps its reward.
    rewards: Any = batch.rows["reward"] + batch.sum_tokens(token_rewards - outcome)
    if "named_rewards" in method.advantage.needs:
        rewards = {name: _reward_part(batch, name) for name in method.settings.reward_weights}
    return {
        **dict(batch.rows),
        **dict(batch.tokens),
        **turns,
        "rewards": rewards,
        "token_rewards": token_rewards,
        "groups": batch.rows["group"],
        "lengths": batch.sum_tokens(mask.long()),
        "on_policy": batch.rows["source"] == POLICY,
        "greedy_rewards": batch.rows.get("greedy_reward"),
        "importance_weights": batch.tokens.get("rollout_weights"),
        "mask": mask,
        "rows": batch.row_index,
        "num_rows": len(batch),
    }


def is_singleton_group(batch: Batch) -> Tensor:
    """(rows,) bool: the row is the only one of its group.

    If the verifier failed on all other rows of a group, the one that is left has no baseline. Its
    advantage would be its reward, however large rewards are; callers set it to 0.
    """
    _, group, sizes = batch.rows["group"].unique(return_inverse=True, return_counts=True)
    return sizes[group] < 2


def turn_columns(batch: Batch) -> dict[str, Tensor]:
    """Return columns of turns: `turns` (tokens,), `turn_rewards` and `turn_states` (rows, turns).

    What the reward of a row has beyond the rewards of its turns belongs to its last turn.
    """
    rewards: list[list[float]] = batch.rows["turn_rewards"]
    states: list[list[str]] = batch.rows["turn_states"]
    width = max(1, *(len(row) for row in rewards))
    turn_rewards = torch.zeros(len(batch), width)
    turn_states = torch.full((len(batch), width), -1, dtype=torch.int64)
    numbers: dict[str, int] = {}
    for row, (own_rewards, own_states) in enumerate(zip(rewards, states, strict=True)):
        for turn, (reward, state) in enumerate(zip(own_rewards, own_states, strict=True)):
            turn_rewards[row, turn] = reward
            turn_states[row, turn] = numbers.setdefault(state, len(numbers))
        last = max(0, len(own_rewards) - 1)
        turn_rewards[row, last] += batch.rows["reward"][row] - sum(own_rewards)
    return {
        "turns": batch.tokens["turn"].long(),
        "turn_rewards": turn_rewards,
        "turn_states": turn_states,
    }


def _subtract_kl(method: Any, token_rewards: Tensor, batch: Batch, step: Step) -> Tensor:
    """(tokens,) rewards with the KL penalty. Adapts the coefficient for the next step."""
    mask = batch.tokens["loss_mask"]
    token_rewards, kl = kl_in_reward(
        token_rewards,
        batch.tokens["old_logprobs"],
        batch.tokens["reference_logprobs"],
        mask,
        method.kl_coef,
        estimator=kl_estimator(method.settings),
    )
    measured = float(mean_kl(kl, mask, batch.row_index, len(batch)))
    step.metrics |= {"kl/reference": measured, "kl/coef": method.kl_coef}
    target = method.settings.kl_target
    if target is not None:
        method.kl_coef = adapt_kl_coef(method.kl_coef, measured, len(batch), target=target)
    return token_rewards


def _reward_part(batch: Batch, name: str) -> Tensor:
    """(rows,) one named part of the reward. Raises RunError if the verifier gave none."""
    if f"reward/{name}" not in batch.rows:
        prefix = "reward/"
        parts = [key.removeprefix(prefix) for key in batch.rows if key.startswith(prefix)]
        raise RunError(
            f"method.reward_weights.{name}: the verifier reports no such part; "
            f"{did_you_mean(name, parts)}"
        )
    return batch.rows[f"reward/{name}"]
