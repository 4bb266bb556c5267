"""Responses as AlpacaEval reads them: a JSON array of instruction, output, generator, dataset."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postgrad.evaluation.folder import write
from postgrad.judge.llm import question_of
from postgrad.problem import Problem


def is_alpaca(problems: Sequence[Problem]) -> bool:
    """Return whether every problem is a row of an AlpacaEval file.

    The output of such a row is the reference's answer.
    """
    return all({"generator", "dataset"} <= _row_fields(problem).keys() for problem in problems)


def write_answers(
    file: Path,
    problems: Sequence[Problem],
    rows: Sequence[dict[str, Any]],
    generator: str,
    name: str,
) -> None:
    """Write the first response to each problem.

    `generator` names the model. `name` is the dataset of problems that have none. Another
    evaluation can use the file as its set; these outputs are then its reference answers.
    """
    first = {row["uid"]: row["response"] for row in rows if row["sample"] == 0}
    answers: list[dict[str, Any]] = []
    for problem in problems:
        fields = _row_fields(problem)
        answers.append(
            {
                "instruction": fields.get("instruction") or question_of(problem),
                "output": first[problem.uid],
                "generator": generator,
                "dataset": fields.get("dataset", name),
            }
        )
    write(file, json.dumps(answers, indent=1, ensure_ascii=False) + "\n")


def _row_fields(problem: Problem) -> dict[str, Any]:
    """Return the row's extra fields; a prepared file has them in `extra_info`."""
    info = problem.extra.get("extra_info")
    return problem.extra | (info if isinstance(info, dict) else {})
