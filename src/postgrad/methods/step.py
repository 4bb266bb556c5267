"""What the stages of a step are given: the step, and the plan of each problem's group."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from postgrad.data.problem_queue import ProblemQueue
from postgrad.types import Batch, Problem, Trajectory


@dataclass
class Step:
    """One step of a run.

    `number` starts at 1; a validation is step 0. `data` is where problems are drawn from. `metrics`
    are logged at the end of the step. `failed` has the rows that could not be scored. In a refill,
    `num_scored` rows have a score already; after all of them, `num_left_out` rows have a score and
    are not in the batch.
    """

    number: int
    data: ProblemQueue = None  # type: ignore[assignment]  # set in every step of a run
    metrics: dict[str, float] = field(default_factory=dict)
    failed: list[Batch] = field(default_factory=list)
    num_scored: int = 0
    num_left_out: int = 0

    def problems(self, batch: Batch) -> list[Problem]:
        """Return the problem of each row."""
        return [self.data.find(uid) for uid in batch.rows["uid"]]


@dataclass
class Group:
    """The plan for one problem's group: rows that are given, and how many to sample.

    `prefixes` are first tokens for the first sampled rows; the engine continues them. The seeds of
    the samples follow from their indices, the first of which is `first_index`.
    """

    problem: Problem
    num_samples: int
    given_rows: list[Trajectory] = field(default_factory=list)
    prefixes: list[list[int]] = field(default_factory=list)
    first_index: int = 0

    @property
    def indices(self) -> range:
        """The indices of the samples."""
        return range(self.first_index, self.first_index + self.num_samples)


# Takes the result of the stage before and the step; returns the input of the next stage.
Stage = Callable[[Any, Step], Any]
