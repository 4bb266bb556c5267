"""What a step and a run return to the code that started them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from postgrad.types import Batch


@dataclass
class StepResult:
    """A finished step.

    Attributes:
        number: the number of the step, from 1.
        batch: its trajectories with all columns, after the update.
        metrics: its line of metrics.jsonl.
    """

    number: int
    batch: Batch
    metrics: dict[str, float]

    @property
    def rewards(self) -> Tensor:
        """(rows,) the reward of each trajectory; empty for methods without rewards."""
        return self.batch.rows.get("reward", torch.zeros(0))

    @property
    def responses(self) -> list[str]:
        """The text of each trajectory; empty for methods that do not sample."""
        return self.batch.rows.get("text", [])


@dataclass
class Result:
    """How a run ended."""

    folder: Path
    step: int
    num_steps: int  # training.steps
    interrupted: bool = False  # somebody stopped it; the same command continues it
    reached: bool = False  # a validation reached training.stop_at
    start: int = 0  # the step of the checkpoint that it continued from
