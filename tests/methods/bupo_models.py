"""Models and batches of the tests of BuPO."""

from pathlib import Path

import torch
from method_runs import SMALL, Bound, bound
from tiny_runs import config_of

from postgrad.model.metrics import MetricAccumulator
from postgrad.model.policy import LocalPolicy
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import Batch

LAYERS = 3


ONE = ("method.num_blocks=1", "method.phase_one_steps=1", "optimizer.lr=1e-2")


def bupo(model: Path, *overrides: str, value=None) -> Bound:
    return bound("bupo", model, *ONE, *overrides, **({} if value is None else {"value": value}))


def gradients(policy: LocalPolicy, batch: Batch, step: int) -> dict[str, torch.Tensor | None]:
    """Every parameter's gradient of one optimizer step at a step of the run; cleared."""
    view = policy.objective.view(step)
    policy._freeze_unused(view)
    policy.accumulate(
        policy.objective.prepare(batch.select(range(len(batch)))), view, MetricAccumulator()
    )
    out = {
        name: None if m.grad is None else m.grad.clone()
        for name, m in policy.optimizer.masters.items()
    }
    policy.optimizer.adam.zero_grad(set_to_none=True)
    return out


def is_above(name: str, num_blocks: int) -> bool:
    return name == "model.norm.weight" or any(
        name.startswith(f"model.layers.{i}.") for i in range(num_blocks, LAYERS)
    )


SMALL_RUN = (
    "optimizer.lr=1e-2",
    "training.steps=4",
    "training.checkpoint_every=1",
    "training.keep_checkpoints=9",
)


def run(
    recipe: str,
    model: Path,
    runs: Path,
    verifiers: Path,
    *overrides: str,
    reporter: Reporter | None = None,
):
    own = (f"reward.verifier={verifiers}:graded", f"runs={runs}")
    return train(
        config_of(recipe, model, *SMALL, *SMALL_RUN, *own, *overrides), reporter or Reporter()
    )
