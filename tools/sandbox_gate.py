"""Counts the right programs of published data sets that the sandbox cannot test.

    python tools/sandbox_gate.py HumanEval.jsonl mbpp.jsonl ClassEval_data.json

Every canonical solution runs against its own tests. It is left out if it fails them in plain Python
as well, in one process (a missing package, a file). Of the others at most 1% may be unsupported or
fail; otherwise the exit code is 1. The files are openai/human-eval's, google-research's MBPP and
FudanSELab/ClassEval's.
"""

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.problem import Problem
from postgrad.sandbox.local import Sandbox
from postgrad.sandbox.outcome import Limits
from postgrad.verifiers.grading.code import suite_of

MAX_SHARE = 0.01
PASSED, UNSUPPORTED, FAILED, LEFT_OUT = "passed", "unsupported", "failed", "left out"


@dataclass(frozen=True)
class Case:
    """A right program with its tests."""

    name: str
    program: str
    tests: tuple[str, ...]
    setup: str = ""
    entry_point: str = ""


def read_cases(path: Path) -> Iterator[Case]:
    """Yield the cases of a file, whichever of the three sets it is."""
    text = path.read_text()
    rows = json.loads(text) if text.startswith("[") else map(json.loads, text.splitlines())
    for row in rows:
        if "canonical_solution" in row:
            yield _problem_case(row, row["prompt"] + row["canonical_solution"])
        elif "solution_code" in row:
            yield _class_case(row)
        else:
            yield _problem_case({**row, "prompt": ""}, row.get("code") or row["reference_code"])


def _problem_case(row: dict[str, Any], program: str) -> Case:
    suite = suite_of(Problem(str(row["task_id"]), (), "", "code", (), row))
    assert suite
    name = f"MBPP/{row['task_id']}" if isinstance(row["task_id"], int) else row["task_id"]
    return Case(name, program, suite.asserts, suite.setup, suite.entry_point)


def _class_case(row: dict[str, Any]) -> Case:
    """Return the case of one class: each method of its unittest classes is a test."""
    program = "\n".join([*row["import_statement"], row["solution_code"]])
    setup = "\n".join([*row["import_statement"], row["test"]])
    tests = [
        f"{node.name}({method.name!r}).debug()"
        for node in ast.parse(row["test"]).body
        if isinstance(node, ast.ClassDef) and node.name in row["test_classes"]
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name.startswith("test")
    ]
    return Case(row["task_id"], program, tuple(tests), setup)


def judge(box: Sandbox, case: Case) -> tuple[str, str]:
    """Return how a case ends, with the reason."""
    results = box.test_asserts(case.program, case.tests, case.setup, case.entry_point)
    bad = [result for result in results if not result.passed]
    if not bad:
        return PASSED, ""
    plain = "\n".join([case.program, case.setup, *case.tests])
    if box.run(plain).code != 0:
        return LEFT_OUT, bad[0].reason
    unsupported = [result for result in bad if result.unsupported]
    if unsupported:
        return UNSUPPORTED, unsupported[0].reason
    return FAILED, bad[0].reason


def main() -> int:
    parser = argparse.ArgumentParser(
        description="count the right programs that the sandbox cannot test"
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    box = Sandbox(Limits(time_s=20.0))
    total: Counter[str] = Counter()
    for path in options.files:
        cases = list(read_cases(path))
        with ThreadPoolExecutor(options.jobs) as threads:
            ends = list(threads.map(lambda case: judge(box, case), cases))
        counts = Counter(end for end, _ in ends)
        total += counts
        print(path.name, ", ".join(f"{counts[end]} {end}" for end in sorted(counts)))
        for case, (end, reason) in zip(cases, ends, strict=True):
            if end != PASSED:
                print(f"    {case.name} {end}: {reason}")
    num_lost = total[UNSUPPORTED] + total[FAILED]
    num_right = num_lost + total[PASSED]
    print(f"{num_lost} of {num_right} right programs cannot be tested ({num_lost / num_right:.2%})")
    return int(num_lost > MAX_SHARE * num_right)


if __name__ == "__main__":
    sys.exit(main())
