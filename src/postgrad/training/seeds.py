"""The global random generators of a step."""

import random

import numpy as np
import torch

from postgrad.rollout.engine import trajectory_seed


def seed_step(run_seed: int, number: int) -> None:
    """Seed the global generators, so that a method which uses them draws the same when resumed."""
    seed = trajectory_seed(run_seed, number, "step", 0)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
