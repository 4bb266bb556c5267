"""Advantages per turn, for trajectories of several turns with rewards of their own.

`turn_rewards` (rows, turns) is the reward of each turn, 0 after a row's last turn. `turns`
(tokens,) is the turn of each token, -1 where the policy wrote none. G_k is the return of turn k:

    G_k = r_k + gamma · G_{k+1}

A row that ended before turn k has return 0 there.
"""

import torch
from torch import Tensor

from postgrad.algorithms.groups import STD_EPS, Groups, centered, finite
from postgrad.algorithms.token_advantages import TokenAdvantages


def turn_returns(turn_rewards: Tensor, gamma: float) -> Tensor:
    """(rows, turns) G_k = r_k + gamma · G_{k+1}."""
    returns = finite("turn_rewards", turn_rewards).clone()
    for turn in range(returns.shape[1] - 2, -1, -1):
        returns[:, turn] += gamma * returns[:, turn + 1]
    return returns


def turn_grpo(
    turn_rewards: Tensor,
    turns: Tensor,
    mask: Tensor,
    rows: Tensor,
    groups: Tensor,
    *,
    gamma: float = 1.0,
    normalize_by_std: bool = True,
    eps: float = STD_EPS,
) -> TokenAdvantages:
    """GRPO per turn: (G_k - mean_g G_k) / (std_g G_k + eps), over the group's rows at turn k.

    Without division if normalize_by_std is false. The returns are G.
    """
    returns = turn_returns(turn_rewards, gamma)
    advantages = torch.zeros_like(returns)
    index = Groups.of(groups, returns.device)
    for turn in range(returns.shape[1]):
        offset, std = centered(returns[:, turn], index)
        advantages[:, turn] = offset / (std + eps) if normalize_by_std else offset
    return _to_tokens(advantages, returns, turns, mask, rows)


def gigpo(
    turn_rewards: Tensor,
    turn_states: Tensor,
    turns: Tensor,
    mask: Tensor,
    rows: Tensor,
    groups: Tensor,
    *,
    gamma: float = 1.0,
    turn_weight: float = 1.0,
    normalize_by_std: bool = True,
    eps: float = STD_EPS,
) -> TokenAdvantages:
    """GiGPO: A = A_episode + turn_weight · A_turn, each a group's offset / (std + eps).

    A_episode compares the total rewards of the group's rows. A_turn compares the returns G_k of all
    turns of the group that began in the same state; a state that occurs once gives 0.

    `turn_states` (rows, turns) has equal integers for equal states, -1 after a row's last turn.
    """
    returns = turn_returns(turn_rewards, gamma)
    totals = turn_returns(turn_rewards, 1.0)[:, 0]
    index = Groups.of(groups, returns.device)
    episode, std = centered(totals, index)
    if normalize_by_std:
        episode = episode / (std + eps)
    row, turn = (turn_states >= 0).nonzero(as_tuple=True)
    num_states = int(turn_states.max()) + 1 if turn_states.numel() else 1
    states = Groups.of(index.index[row] * num_states + turn_states[row, turn], returns.device)
    offset, std = centered(returns[row, turn], states)
    alone = states.expand(states.sum(torch.ones_like(offset))) < 2
    offset = torch.where(alone, 0.0, offset)
    if normalize_by_std:
        offset = offset / (std + eps)
    advantages = episode[:, None].expand_as(returns).clone()
    advantages[row, turn] += turn_weight * offset
    return _to_tokens(advantages, returns, turns, mask, rows)


def turn_end_rewards(
    turn_rewards: Tensor, turns: Tensor, mask: Tensor, rows: Tensor, num_rows: int
) -> Tensor:
    """(tokens,) the reward of each turn on its last trainable token.

    The reward of a turn without trainable tokens goes to the last trainable token before it, or
    else to the first one after it. The rewards of a row without trainable tokens are dropped.
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


def _to_tokens(
    advantages: Tensor, returns: Tensor, turns: Tensor, mask: Tensor, rows: Tensor
) -> TokenAdvantages:
    """The values (rows, turns) of each token's row and turn; 0 on masked tokens."""
    turn = turns.long().clamp(min=0)
    keep = mask.bool() & (turns >= 0)
    return TokenAdvantages(
        torch.where(keep, advantages[rows, turn], 0.0), torch.where(keep, returns[rows, turn], 0.0)
    )
