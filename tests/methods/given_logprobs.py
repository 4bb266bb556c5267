"""Helpers of the tests of methods: losses of rows with given log-probs."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tiny_runs import config_of
from torch import Tensor

from postgrad.methods import find_method
from postgrad.methods.method import Method
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.types import POLICY, Batch, Trajectory


@dataclass
class Row:
    """A row by its token probabilities: current policy `p`, before the step `old`, and of its
    author.
    """

    source: int
    p: list[float]
    old: list[float]
    advantage: float
    mask: list[int] | None = None
    author: float | list[float] = 1.0
    group: int = 0

    def trajectory(self, index: int) -> Trajectory:
        size = len(self.p)
        sources = [self.source] * size if isinstance(self.source, int) else self.source
        author = [self.author] * size if isinstance(self.author, float) else self.author
        return Trajectory(
            f"p{self.group}",
            [1],
            [2] * size,
            self.group,
            index,
            source=sources[0] if len(set(sources)) == 1 else POLICY,
            behavior_logprobs=logs(author),
            loss_mask=None if self.mask is None else [bool(m) for m in self.mask],
            token_source=sources,
            tokens={
                "advantages": [self.advantage] * size,
                "old_logprobs": logs(self.old),
                "logprobs": logs(self.p),
            },
        )


def logs(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).log().tolist()


def table(rows: list[Row]) -> Batch:
    """In float64, where the specification's figures have six digits."""
    trajectories = [row.trajectory(i) for i, row in enumerate(rows)]
    batch = Batch.of(trajectories)
    for name in ("advantages", "old_logprobs", "logprobs"):
        batch.tokens[name] = torch.tensor(
            [x for t in trajectories for x in t.tokens[name]], dtype=torch.float64
        )
    batch.rows["mixed"] = torch.ones(len(batch), dtype=torch.bool)
    return batch


@dataclass
class Priced:
    loss: float
    gradient: Tensor
    metrics: dict[str, float]


@cache
def method_of(model: Path, recipe: str, *overrides: str) -> Method:
    config = config_of(recipe, model, *overrides)
    method = find_method(config.method.name)(config)
    method.check()
    return method


def priced(
    model: Path, recipe: str, rows: list[Row], *overrides: str, entropy: float = 0.0
) -> Priced:
    """Loss, gradient by log-prob and metrics of one optimizer step, by the recipe's method."""
    length = max(len(row.p) for row in rows)
    method, batch = (
        method_of(model, recipe, f"rollout.max_response_tokens={length}", *overrides),
        table(rows),
    )
    batch.tokens["place"] = torch.arange(batch.num_tokens)
    logprobs = batch.tokens["logprobs"].clone().requires_grad_()
    batch = method.objective.prepare(batch)
    given = logprobs[batch.tokens["place"]]
    metrics = MetricAccumulator()
    loss = method.objective.loss(
        batch,
        TokenOutputs(given, torch.full_like(given, entropy), torch.zeros_like(given)),
        metrics,
    )
    loss.backward()
    assert logprobs.grad is not None
    return Priced(float(loss.detach()), logprobs.grad, metrics.result())
