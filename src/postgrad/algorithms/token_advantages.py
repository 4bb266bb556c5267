"""Advantages per token: GAE, REINFORCE++, ReMax and the optimal token baselines.

Columns are flat, (tokens,). The tokens of one row are adjacent and in time order, `rows` is the row
of each token, and `mask` is true where the policy wrote the token and the loss may use it. Masked
tokens (tool output, templates) are skipped: the token before and the token after are adjacent in
time. Masked tokens get advantage and return 0, and their values are never read.

The reward of a response belongs on its last trainable token; `outcome_rewards` puts it there. A
reward on a masked token would be lost (verl loses it), so every estimator refuses it (ValueError).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from postgrad.algorithms.groups import Groups, finite, whiten

BASELINE_EPS = 1e-8


class TokenAdvantages(NamedTuple):
    """`advantages` (tokens,) for the policy loss, `returns` (tokens,) as targets of the critic.

    Both are 0 on masked tokens.
    """

    advantages: Tensor
    returns: Tensor


def outcome_rewards(rewards: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """(tokens,) each row's reward on its last trainable token, 0 elsewhere.

    The reward of a row without trainable tokens is dropped.
    """
    rewards = finite("rewards", rewards)
    positions = torch.arange(rows.numel(), device=rows.device)
    trainable = torch.where(mask.bool(), positions, -1)
    # (rows,) position of the last trainable token, -1 if there is none
    last = torch.full((num_rows,), -1, dtype=torch.int64, device=rows.device)
    last = last.scatter_reduce(0, rows, trainable, "amax")
    return torch.where(positions == last[rows], rewards[rows], 0.0)


def turn_end_rewards(
    turn_rewards: Tensor, turns: Tensor, mask: Tensor, rows: Tensor, num_rows: int
) -> Tensor:
    """Return (tokens,): the reward of each turn on its last trainable token.

    `turn_rewards` is (rows, turns), `turns` (tokens,) the turn of each token, -1 where the policy
    wrote none. The reward of a turn without trainable tokens goes to the last trainable token
    before it, or else to the first one after it. The rewards of a row without trainable tokens are
    dropped.
    """
    rewards = finite("turn_rewards", turn_rewards)
    placed = torch.zeros(rows.numel(), dtype=rewards.dtype, device=rewards.device)
    where = mask.bool().nonzero()[:, 0]
    for row in range(num_rows):
        own = where[rows[where] == row]
        if not own.numel():
            continue
        for turn in range(rewards.shape[1]):
            count = int((turns[own] <= turn).sum())
            placed[own[max(0, count - 1)]] += rewards[row, turn]
    return placed


def _trainable(token_rewards: Tensor, mask: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return trainable tokens: positions, rewards, and 1.0 where the next is in the same row.

    Raises: ValueError for a reward on a masked token.
    """
    token_rewards = finite("token_rewards", token_rewards)
    mask = mask.bool()
    lost = (token_rewards != 0) & ~mask
    if bool(lost.any()):
        position = int(lost.nonzero()[0, 0])
        raise ValueError(
            f"reward on masked token {position} (row {int(rows[position])}) would be lost; "
            "put it on a trainable token (outcome_rewards)"
        )
    where = mask.nonzero().squeeze(1)
    owner = rows[where]
    continues = torch.zeros(where.numel(), dtype=token_rewards.dtype, device=token_rewards.device)
    continues[:-1] = (owner[1:] == owner[:-1]).to(token_rewards.dtype)
    return where, token_rewards[where], continues


def _scan_back(values: Tensor, factors: Tensor) -> Tensor:
    """(tokens,) y_t = values_t + factors_t · y_{t+1}; a factor of 0 ends a row.

    Computed for all tokens at once, in log2(tokens) passes.
    """
    shift = 1
    while shift < values.numel():
        # After this pass y_t is the sum of 2·shift terms, and factors_t multiplies the next one.
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
    """(tokens,) running sum within each row, including the token itself."""
    same = torch.zeros_like(values)
    same[1:] = (rows[1:] == rows[:-1]).to(values.dtype)
    return _scan_back(values.flip(0), same.flip(0)).flip(0)


def _scatter(values: Tensor, where: Tensor, like: Tensor) -> Tensor:
    """Return a column of all tokens, shaped as `like`: `values` at `where`, 0 elsewhere."""
    zeros = torch.zeros(like.shape, dtype=values.dtype, device=values.device)
    return zeros.index_copy(0, where, values)


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
    """GAE over the trainable tokens t of each row, with V = 0 after the last one.

    delta_t = r_t + gamma · V_{t+1} - V_t
    a_t = delta_t + gamma · lam · a_{t+1}
    returns = a + V
    advantages = a, whitened over the batch's trainable tokens if whiten_advantages
    """
    where, rewards, continues = _trainable(token_rewards, mask, rows)
    baseline = values.detach()[where].to(rewards.dtype)
    following = torch.zeros_like(baseline)
    following[:-1] = baseline[1:]
    deltas = rewards + gamma * following * continues - baseline
    raw = _scan_back(deltas, gamma * lam * continues)
    advantages = whiten(raw, torch.ones_like(raw)) if whiten_advantages else raw
    return TokenAdvantages(
        _scatter(advantages, where, token_rewards), _scatter(raw + baseline, where, token_rewards)
    )


def reinforce_pp(
    token_rewards: Tensor, mask: Tensor, rows: Tensor, num_rows: int, *, gamma: float = 1.0
) -> TokenAdvantages:
    """REINFORCE++: G_t = r_t + gamma · G_{t+1}; advantages are G whitened over the batch.

    The returns are G, not whitened.
    """
    where, rewards, continues = _trainable(token_rewards, mask, rows)
    returns = _scan_back(rewards, gamma * continues)
    advantages = whiten(returns, torch.ones_like(returns))
    return TokenAdvantages(
        _scatter(advantages, where, token_rewards), _scatter(returns, where, token_rewards)
    )


def remax(
    token_rewards: Tensor, mask: Tensor, rows: Tensor, num_rows: int, greedy_rewards: Tensor
) -> TokenAdvantages:
    """ReMax: A_t = sum of r_s for s >= t, minus b_i, the reward of the prompt's greedy response.

    `greedy_rewards` (rows,) has b_i.
    """
    where, rewards, continues = _trainable(token_rewards, mask, rows)
    baseline = finite("greedy_rewards", greedy_rewards).to(rewards)
    returns = _scan_back(rewards, continues)
    return TokenAdvantages(
        _scatter(returns - baseline[rows[where]], where, token_rewards),
        _scatter(returns, where, token_rewards),
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
    """Optimal token baseline: the group's returns at time t, weighed by the gradient norms so far.

        w_t = 1 - 2 pi_t + sum_v pi_v^2, the squared norm of onehot - pi
        W_t = sum of w_s for s <= t over the row's trainable tokens
        B_t = sum over the group's rows of G_t W_t / (sum of W_t + 1e-8)
        A_t = G_t - B_t

    Time t is the position in the response. With `importance_weights` rho, w_t is multiplied by
    rho_t^2. `sum_probs_squared` (tokens,) is entropy.sum_probs_squared of the policy that gave
    `old_logprobs`; `groups` is (rows,). If only one row of the group has a trainable token at time
    t, B is 0: a baseline needs two members. verl does so beyond the second-longest row, and gives
    A = 0 in gaps.
    """
    lengths = torch.zeros(num_rows, dtype=torch.int64, device=rows.device)
    lengths = lengths.index_add(0, rows, torch.ones_like(rows))
    ends = lengths.cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
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
    """optimal_token_baseline for responses with tool output.

    Time counts trainable tokens only, so that turns of different rows have the same time.
    """
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
    """Return the optimal token baseline.

    Tokens of a group with the same `time` (tokens,) share it.
    """
    where, rewards, continues = _trainable(token_rewards, mask, rows)
    returns = _scan_back(rewards, continues)
    energy = 1 - 2 * old_logprobs[where].exp() + sum_probs_squared[where]
    if importance_weights is not None:
        energy = energy * importance_weights[where].square()
    weight = _cumulative(energy.to(rewards.dtype), rows[where])
    row_group = Groups.of(groups, rewards.device)
    num_times = int(time.max()) + 1 if time.numel() else 1
    # Tokens with the same group and time are one set, with one baseline.
    peers = Groups.of(row_group.index[rows[where]] * num_times + time[where], rewards.device)
    baseline = peers.sum(returns * weight) / (peers.sum(weight) + BASELINE_EPS)
    baseline = torch.where(peers.sum(torch.ones_like(rewards)) < 2, 0.0, baseline)
    advantages = returns - peers.expand(baseline)
    return TokenAdvantages(
        _scatter(advantages, where, token_rewards), _scatter(returns, where, token_rewards)
    )
