"""Another ground truth for a problem, also in the columns that reward functions read."""

from dataclasses import replace
from typing import Any

from postgrad.data.rows.shapes import truth_column
from postgrad.problem import Problem

VERL_COLUMN = "reward_model"  # an object; its field ground_truth is the truth


def with_ground_truth(problem: Problem, truth: str) -> Problem:
    """Return the problem with this ground truth, also in the columns of its row that hold it.

    A verifier reads the field, verl's functions read `extra`, and TRL's functions read the row.
    """
    row = dict(problem.row)
    if row:
        column = truth_column(row)
        row["ground_truth"] = truth
        row[column] = {**row[column], "ground_truth": truth} if column == VERL_COLUMN else truth
    extra = problem.extra
    if "ground_truth" in _object(extra.get(VERL_COLUMN)):
        extra = {**extra, VERL_COLUMN: {**extra[VERL_COLUMN], "ground_truth": truth}}
    return replace(problem, ground_truth=truth, row=row, extra=extra)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
