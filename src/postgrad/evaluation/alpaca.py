"""Answers in the form of AlpacaEval's own tool: one JSON array of {instruction, output, generator, dataset}."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postgrad.evaluation.folder import write
from postgrad.judge.llm import question_of
from postgrad.problem import Problem


def is_alpaca(problems: Sequence[Problem]) -> bool:
    """Whether every problem was a row of such a file, whose output is the reference's answer."""
    return all({"generator", "dataset"} <= _facts(problem).keys() for problem in problems)


def write_answers(
    file: Path,
    problems: Sequence[Problem],
    rows: Sequence[dict[str, Any]],
    generator: str,
    name: str,
) -> None:
    """The first response to each problem; `generator` names the model, `name` stands where a problem has no `dataset`.

    The file is a set itself: its outputs are then the reference that another model is compared with.
    """
    first = {row["uid"]: row["response"] for row in rows if row["sample"] == 0}
    answers = [
        {
            "instruction": _facts(problem).get("instruction") or question_of(problem),
            "output": first[problem.uid],
            "generator": generator,
            "dataset": _facts(problem).get("dataset", name),
        }
        for problem in problems
    ]
    write(file, json.dumps(answers, indent=1, ensure_ascii=False) + "\n")


def _facts(problem: Problem) -> dict[str, Any]:
    """What a row says beside question and truth; a prepared file has it one level deeper."""
    info = problem.extra.get("extra_info")
    return problem.extra | (info if isinstance(info, dict) else {})
