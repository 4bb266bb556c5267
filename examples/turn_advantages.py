"""Two advantages for trajectories of several turns with rewards of their own, in one file.

    postgrad train grpo method.advantage=examples/turn_advantages.py:turn_grpo \\
        environment=examples/guess.py:Guess data.train=seeds:1000 model.path=MODEL
    postgrad train grpo method.advantage=examples/turn_advantages.py:gigpo ...

`turn_rewards` (rows, turns) is the reward of each turn, 0 after a row's last turn. `turn_states`
(rows, turns) has equal integers for turns that began with the same observation, -1 after a row's
last turn. `turns` (tokens,) is the turn of each token, -1 where the policy wrote none. G_k is the
return of turn k, 0 for a row that ended before it:

    G_k = r_k + gamma · G_{k+1}

A group of one has the baseline 0 and the standard deviation 1, as everywhere (`centered`).
"""

import torch

from postgrad.algorithms.advantages import Advantage
from postgrad.algorithms.groups import STD_EPS, Groups, centered, finite
from postgrad.algorithms.token_advantages import TokenAdvantages

TURN_WEIGHT = 1.0  # of gigpo's advantage per turn


def turn_returns(turn_rewards, gamma):
    """Return G_k as (rows, turns)."""
    returns = finite("turn_rewards", turn_rewards).clone()
    for turn in range(returns.shape[1] - 2, -1, -1):
        returns[:, turn] += gamma * returns[:, turn + 1]
    return returns


def turn_grpo(turn_rewards, turns, mask, rows, groups, *, gamma=1.0, normalize_by_std=True):
    """Return (G_k - mean_g G_k) / (std_g G_k + eps), over the group's rows at turn k.

    Without division if normalize_by_std is false.
    """
    returns = turn_returns(turn_rewards, gamma)
    advantages = torch.zeros_like(returns)
    index = Groups.of(groups, returns.device)
    for turn in range(returns.shape[1]):
        offset, std = centered(returns[:, turn], index)
        advantages[:, turn] = offset / (std + STD_EPS) if normalize_by_std else offset
    return to_tokens(advantages, returns, turns, mask, rows)


def gigpo(
    turn_rewards, turn_states, turns, mask, rows, groups, *, gamma=1.0, normalize_by_std=True
):
    """GiGPO (Feng et al. 2025): return A_episode + TURN_WEIGHT · A_turn.

    A_episode compares the total rewards of the group's rows. A_turn compares the returns G_k of all
    turns of the group that began in the same state; a state that occurs once gives 0. Each is
    divided by its standard deviation, unless normalize_by_std is false.
    """
    returns = turn_returns(turn_rewards, gamma)
    totals = turn_returns(turn_rewards, 1.0)[:, 0]
    index = Groups.of(groups, returns.device)
    episode, std = centered(totals, index)
    if normalize_by_std:
        episode = episode / (std + STD_EPS)
    row, turn = (turn_states >= 0).nonzero(as_tuple=True)
    num_states = int(turn_states.max()) + 1 if turn_states.numel() else 1
    states = Groups.of(index.index[row] * num_states + turn_states[row, turn], returns.device)
    offset, std = centered(returns[row, turn], states)
    is_single = states.expand(states.sum(torch.ones_like(offset))) < 2
    offset = torch.where(is_single, 0.0, offset)
    if normalize_by_std:
        offset = offset / (std + STD_EPS)
    advantages = episode[:, None].expand_as(returns).clone()
    advantages[row, turn] += TURN_WEIGHT * offset
    return to_tokens(advantages, returns, turns, mask, rows)


def to_tokens(advantages, returns, turns, mask, rows):
    """Return the values (rows, turns) of each token's row and turn; 0 on masked tokens."""
    turn = turns.long().clamp(min=0)
    shown = mask.bool() & (turns >= 0)
    return TokenAdvantages(
        torch.where(shown, advantages[rows, turn], 0.0),
        torch.where(shown, returns[rows, turn], 0.0),
    )


COLUMNS = ("turn_rewards", "turns", "mask", "rows", "groups")
OPTIONS = ("gamma", "normalize_by_std")  # settings of the method
NEEDS = ("environment",)  # refused without one

turn_grpo_advantage = Advantage(turn_grpo, COLUMNS, "token", OPTIONS, NEEDS)
gigpo_advantage = Advantage(gigpo, (*COLUMNS, "turn_states"), "token", OPTIONS, NEEDS)
