"""Random ragged batches for property tests, and slow reference functions in plain Python."""

import os
import statistics
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from .helpers import F64, row_index

# Few and always the same ones by default, to be quick; POSTGRAD_EXAMPLES=500 searches further.
examples = settings(
    max_examples=int(os.environ.get("POSTGRAD_EXAMPLES", "8")),
    derandomize="POSTGRAD_EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
)


@dataclass
class Ragged:
    """One random batch: ragged rows with masks, groups in any order, rewards with many ties."""

    lengths: list[int]
    mask: Tensor
    groups: Tensor
    rewards: Tensor
    seed: int

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> Tensor:
        return row_index(*self.lengths)

    @property
    def trainable(self) -> Tensor:
        return torch.zeros(self.num_rows, dtype=torch.int64).index_add(
            0, self.rows, self.mask.long()
        )

    def noise(self, offset: int = 0, scale: float = 1.0) -> Tensor:
        """(tokens,) normal numbers that belong to this batch."""
        generator = torch.Generator().manual_seed(self.seed + offset)
        return scale * torch.randn(len(self.mask), generator=generator, dtype=F64)

    def logprobs(self, offset: int = 0) -> Tensor:
        return -self.noise(offset).abs() - 0.01

    def order_of_tokens(self, order: list[int]) -> Tensor:
        """Where the tokens go when rows are put into `order`."""
        parts = torch.arange(len(self.mask)).split(self.lengths)
        return torch.cat([parts[i] for i in order]) if order else torch.zeros(0, dtype=torch.int64)

    def reordered(self, order: list[int]) -> "Ragged":
        where = self.order_of_tokens(order)
        return Ragged(
            [self.lengths[i] for i in order],
            self.mask[where],
            self.groups[order],
            self.rewards[order],
            self.seed,
        )


@st.composite
def ragged(draw, min_rows: int = 0, max_rows: int = 8, max_length: int = 5) -> Ragged:
    num_rows = draw(st.integers(min_rows, max_rows))
    lengths = draw(st.lists(st.integers(0, max_length), min_size=num_rows, max_size=num_rows))
    total = sum(lengths)
    mask = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    groups = draw(
        st.lists(st.sampled_from([-5, 0, 3, 10**12]), min_size=num_rows, max_size=num_rows)
    )
    reward = st.sampled_from([0.0, 1.0, 0.1, 0.7]) | st.floats(-3, 3)
    rewards = draw(st.lists(reward, min_size=num_rows, max_size=num_rows))
    return Ragged(
        lengths,
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(groups, dtype=torch.int64),
        torch.tensor(rewards, dtype=F64),
        draw(st.integers(0, 10**6)),
    )


def members(groups: list[int], i: int) -> list[int]:
    return [j for j, g in enumerate(groups) if g == groups[i]]


def slow_grpo(
    rewards: list[float], groups: list[int], by_std: bool, eps: float = 1e-6
) -> list[float]:
    out = []
    for i, reward in enumerate(rewards):
        peers = [rewards[j] for j in members(groups, i)]
        alone = len(peers) == 1
        centered = reward if alone else reward - statistics.fmean(peers)
        out.append(
            centered / ((1.0 if alone else statistics.stdev(peers)) + eps) if by_std else centered
        )
    return out


def slow_whiten(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [0.0] * len(values)
    mean, variance = statistics.fmean(values), statistics.variance(values)
    return [(v - mean) / (variance + 1e-8) ** 0.5 for v in values]


def slow_gae(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float
) -> list[float]:
    """One row, backwards, exactly as the recursion reads."""
    out, following, advantage = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            advantage = rewards[t] + gamma * following - values[t] + gamma * lam * advantage
            following = values[t]
            out[t] = advantage
    return out
