"""Advantages a token: GAE, REINFORCE++, ReMax and the optimal token baselines.

Columns are flat, (tokens,): tokens of one row lie next to each other in time order, `rows` is the row of each, `mask` is true where
the policy wrote the token and the loss may see it. Masked tokens (tool output, templates) are skipped: time jumps over them, they
get advantage and return 0, and their values are never read.

The outcome reward of a response belongs on its last TRAINABLE token, which is where `outcome_rewards` puts it. A reward on a masked
token would be lost without a sound (it is in verl), so every estimator here refuses it (ValueError).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from postgrad.algorithms.groups import Groups, finite, whiten

BASELINE_EPS = 1e-8


class TokenAdvantages(NamedTuple):
    """`advantages` (tokens,) for the policy loss; `returns` (tokens,) the target of a critic. Both 0 on masked tokens."""

    advantages: Tensor
    returns: Tensor


def outcome_rewards(rewards: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """(tokens,) each row's reward on its last trainable token, 0 elsewhere. A row without trainable tokens has no place for it."""
    rewards = finite("rewards", rewards)
    positions = torch.arange(rows.numel(), device=rows.device)
    last = torch.full((num_rows,), -1, dtype=torch.int64, device=rows.device)
    last = last.scatter_reduce(
        0, rows, torch.where(mask.bool(), positions, -1), "amax"
    )  # (rows,) -1 where nothing is trainable
    return torch.where(positions == last[rows], rewards[rows], 0.0)


def _trainable(token_rewards: Tensor, mask: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of the trainable tokens, their rewards, and whether the next trainable token is of the same row (1.0 or 0.0)."""
    token_rewards = finite("token_rewards", token_rewards)
    mask = mask.bool()
    lost = (token_rewards != 0) & ~mask
    if bool(lost.any()):
        at = int(lost.nonzero()[0, 0])
        raise ValueError(
            f"reward on masked token {at} (row {int(rows[at])}) would be lost; put it on a trainable token (outcome_rewards)"
        )
    where = mask.nonzero().squeeze(1)
    owner = rows[where]
    goes_on = torch.zeros(where.numel(), dtype=token_rewards.dtype, device=token_rewards.device)
    goes_on[:-1] = (owner[1:] == owner[:-1]).to(token_rewards.dtype)
    return where, token_rewards[where], goes_on


def _scan_back(values: Tensor, factors: Tensor) -> Tensor:
    """(tokens,) y_t = values_t + factors_t · y_{t+1}, for all tokens at once by doubling; factor 0 ends a row."""
    shift = 1
    while shift < values.numel():
        # After this pass y_t covers 2·shift terms, and the factor reaches as far.
        later = torch.zeros_like(values)
        later[:-shift] = values[shift:]
        reach = torch.zeros_like(factors)
        reach[:-shift] = factors[shift:]
        values = values + factors * later
        factors = factors * reach
        if not bool(factors.any()):
            break
        shift *= 2
    return values


def _cumulative(values: Tensor, rows: Tensor) -> Tensor:
    """(tokens,) running sum within each row, the token itself included."""
    same = torch.zeros_like(values)
    same[1:] = (rows[1:] == rows[:-1]).to(values.dtype)
    return _scan_back(values.flip(0), same.flip(0)).flip(0)


def _place(values: Tensor, where: Tensor, like: Tensor) -> Tensor:
    """Trainable tokens back among all tokens, 0 on the masked ones."""
    return torch.zeros(like.shape, dtype=values.dtype, device=values.device).index_copy(
        0, where, values
    )


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten_advantages: bool = True,
) -> TokenAdvantages:
    """Generalized advantage estimation over the trainable tokens t of each row (V after the last one is 0).

    delta_t = r_t + gamma · V_{t+1} - V_t        a_t = delta_t + gamma · lam · a_{t+1}
    returns = a + V (before whitening)           advantages = whitened a over the batch's trainable tokens, or a
    """
    where, rewards, goes_on = _trainable(token_rewards, mask, rows)
    baseline = values.detach()[where].to(rewards.dtype)
    following = torch.zeros_like(baseline)
    following[:-1] = baseline[1:]
    deltas = rewards + gamma * following * goes_on - baseline
    raw = _scan_back(deltas, gamma * lam * goes_on)
    advantages = whiten(raw, torch.ones_like(raw)) if whiten_advantages else raw
    return TokenAdvantages(
        _place(advantages, where, token_rewards), _place(raw + baseline, where, token_rewards)
    )


def reinforce_pp(
    token_rewards: Tensor, mask: Tensor, rows: Tensor, num_rows: int, *, gamma: float = 1.0
) -> TokenAdvantages:
    """REINFORCE++: G_t = r_t + gamma · G_{t+1} over trainable tokens, advantages = whitened G over the batch, returns = G."""
    where, rewards, goes_on = _trainable(token_rewards, mask, rows)
    returns = _scan_back(rewards, gamma * goes_on)
    advantages = whiten(returns, torch.ones_like(returns))
    return TokenAdvantages(
        _place(advantages, where, token_rewards), _place(returns, where, token_rewards)
    )


def remax(
    token_rewards: Tensor, mask: Tensor, rows: Tensor, num_rows: int, greedy_rewards: Tensor
) -> TokenAdvantages:
    """ReMax: A_t = sum of r_s for s >= t, minus b_i. `greedy_rewards` (rows,): b_i, the reward of the prompt's greedy response."""
    where, rewards, goes_on = _trainable(token_rewards, mask, rows)
    baseline = finite("greedy_rewards", greedy_rewards).to(rewards)
    returns = _scan_back(rewards, goes_on)
    return TokenAdvantages(
        _place(returns - baseline[rows[where]], where, token_rewards),
        _place(returns, where, token_rewards),
    )


def optimal_token_baseline(
    token_rewards: Tensor,
    old_logprobs: Tensor,
    sum_probs_squared: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    groups: Tensor,
    *,
    importance_weights: Tensor | None = None,
) -> TokenAdvantages:
    """Optimal token baseline: at time t the group's returns weighed by the gradient energy spent so far.

        w_t = 1 - 2 pi_t + sum_v pi_v^2   (the squared norm of onehot - pi), times rho_t^2 with importance weights
        W_t = sum of w_s for s <= t over the row's trainable tokens
        B_t = sum over the group's rows of G_t W_t / (sum of W_t + 1e-8)        A_t = G_t - B_t

    Time t is the position in the response. `sum_probs_squared` (tokens,) is entropy.sum_probs_squared of the same policy as
    `old_logprobs`; `groups` is (rows,). Where only one row of the group has a trainable token at time t, B is 0 (the one rule: a
    baseline needs two members; verl does so beyond the second-longest row, and leaves A = 0 in gaps).
    """
    starts = (
        torch.zeros(num_rows, dtype=torch.int64, device=rows.device)
        .index_add(0, rows, torch.ones_like(rows))
        .cumsum(0)
    )
    starts = torch.cat([starts.new_zeros(1), starts[:-1]])
    time = torch.arange(rows.numel(), device=rows.device) - starts[rows]
    return _token_baseline(
        token_rewards, old_logprobs, sum_probs_squared, mask, rows, groups, importance_weights, time
    )


def tir_optimal_token_baseline(
    token_rewards: Tensor,
    old_logprobs: Tensor,
    sum_probs_squared: Tensor,
    mask: Tensor,
    rows: Tensor,
    num_rows: int,
    groups: Tensor,
    *,
    importance_weights: Tensor | None = None,
) -> TokenAdvantages:
    """optimal_token_baseline for responses with tool output: time counts trainable tokens only, so turns line up across rows."""
    time = (_cumulative(mask.to(torch.float64), rows) - 1).round().to(torch.int64)
    return _token_baseline(
        token_rewards, old_logprobs, sum_probs_squared, mask, rows, groups, importance_weights, time
    )


def _token_baseline(
    token_rewards: Tensor,
    old_logprobs: Tensor,
    sum_probs_squared: Tensor,
    mask: Tensor,
    rows: Tensor,
    groups: Tensor,
    importance_weights: Tensor | None,
    time: Tensor,
) -> TokenAdvantages:
    """The optimal token baseline with `time` (tokens,) saying which tokens of a group share one baseline."""
    where, rewards, goes_on = _trainable(token_rewards, mask, rows)
    returns = _scan_back(rewards, goes_on)
    energy = 1 - 2 * old_logprobs[where].exp() + sum_probs_squared[where]
    if importance_weights is not None:
        energy = energy * importance_weights[where].square()
    weight = _cumulative(energy.to(rewards.dtype), rows[where])
    row_group = Groups.of(groups, rewards.device)
    moment = Groups.of(
        row_group.index[rows[where]] * (int(time.max()) + 1 if time.numel() else 1) + time[where],
        rewards.device,
    )
    baseline = moment.sum(returns * weight) / (moment.sum(weight) + BASELINE_EPS)
    baseline = torch.where(moment.sum(torch.ones_like(rewards)) < 2, 0.0, baseline)
    advantages = returns - moment.expand(baseline)
    return TokenAdvantages(
        _place(advantages, where, token_rewards), _place(returns, where, token_rewards)
    )
