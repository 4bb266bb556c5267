"""PF-PPO: rows are drawn again by their reward before an update, so that clear ones count more."""

import torch
from torch import Tensor

MODES = ("pow", "max_min", "max_random")


def resampling_weights(rewards: Tensor, mode: str, power: float = 2.0) -> Tensor:
    """(rows,) the weight of each row in a draw with replacement of as many rows.

        pow         |R|^power
        max_min     1 for the highest and the lowest reward of the batch, else 0
        max_random  0.4 for the highest reward of the batch, else 0.1

    1e-8 is added, so that a batch without any weight is drawn from uniformly. `mode` is one of
    MODES; only pow reads `power`.
    """
    rewards = rewards.double()
    highest = rewards == rewards.max()
    if mode == "pow":
        weights = rewards.abs().pow(power)
    elif mode == "max_min":
        weights = (highest | (rewards == rewards.min())).double()
    else:
        weights = torch.where(highest, 0.4, 0.1).double()
    return weights + 1e-8
