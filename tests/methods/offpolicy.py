"""Helpers of the tests of methods: losses of rows with given log-probs, and killed runs."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import torch
from torch import Tensor
from world import config_of, metrics_of, overrides_of

from postgrad.cli.main import main
from postgrad.methods import find_method
from postgrad.methods.base import Method
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes.head import TokenOutputs
from postgrad.training.driver import train
from postgrad.training.log import is_timing
from postgrad.training.report import Reporter
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
    batch = method.prepare(batch)
    given = logprobs[batch.tokens["place"]]
    metrics = MetricAccumulator()
    loss = method.loss(
        batch,
        TokenOutputs(given, torch.full_like(given, entropy), torch.zeros_like(given)),
        metrics,
    )
    loss.backward()
    assert logprobs.grad is not None
    return Priced(float(loss.detach()), logprobs.grad, metrics.result())


KILLER = """
import os, signal, sys
from postgrad.cli.main import main
from postgrad.training.log import RunLog
real = RunLog.write
def write(self, number, metrics):
    line = real(self, number, metrics)
    if number == {step} and "reward/mean" in metrics:
        os.kill(os.getpid(), signal.SIGKILL)
    return line
RunLog.write = write
sys.exit(main(sys.argv[1:]))
"""


def assert_a_killed_run_ends_the_same(
    recipe: str, model: Path, folder: Path, kill_at: int, overrides: list[str]
) -> list[dict]:
    """Kills a real process after a step was logged and before it was saved.

    The rerun is bit-exact.
    """
    whole, killed = folder / "whole", folder / "killed"
    train(config_of(recipe, model, *overrides, f"runs={whole}"), Reporter())
    again = ["train", recipe, *overrides_of(model, *overrides, f"runs={killed}")]
    command = [sys.executable, "-c", KILLER.format(step=kill_at), *again]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert metrics_of(killed / "test")[-1]["step"] == kill_at, "killed elsewhere"
    assert main(again) == 0
    steps = metrics_of(whole / "test")[-1]["step"]
    for name in ("policy/model.safetensors", "optimizer.safetensors", "state.json", "method.bin"):
        file = f"test/checkpoints/step-{steps}/{name}"
        assert (whole / file).read_bytes() == (killed / file).read_bytes(), name
    assert steady(whole / "test") == steady(killed / "test")
    for file in sorted((whole / "test" / "rollouts").iterdir()):
        assert pq.read_table(file).equals(
            pq.read_table(killed / "test" / "rollouts" / file.name)
        ), file.name
    return metrics_of(whole / "test")


def steady(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if not is_timing(k)} for line in metrics_of(folder)]
