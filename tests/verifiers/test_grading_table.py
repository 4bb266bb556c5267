"""The score of every verifier, row by row.

The rows of grading.tsv are verl's T10, LUFFY's T11, Classmate's 8.10, BuPO's invariant 22, cs336's
lists, the answer formats of each data set, and near misses. Where a reference differs, the remark
says how and why.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from tables import table

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.scorer import Scorer
from postgrad.verifiers.table import VERIFIERS

TAGS = "t </think> <answer>{}</answer>"


def read_table() -> list[tuple[str, str, str, float]]:
    """Return (verifier, response, ground truth, expected value) of each row of grading.tsv."""
    table = []
    for line in Path(__file__).with_name("grading.tsv").read_text().splitlines()[1:]:
        if not line.startswith("# "):
            verifier, score, truth, response, *_ = line.split("\t")
            table.append((verifier, json.loads(response), json.loads(truth), float(score)))
    return table


TABLE = read_table()
# The sandbox, an environment or another package gives their scores; they have tests of their own.
SCORED_ELSEWHERE = {"code", "environment", "reasoning_gym"}


def test_the_table_covers_every_verifier_that_reads_text():
    verifiers = Counter(row[0].split(".")[0].split("(")[0] for row in TABLE)
    assert len(TABLE) >= 150
    assert set(VERIFIERS) - SCORED_ELSEWHERE <= set(verifiers)
    assert len(set(TABLE)) == len(TABLE), "a row stands there twice"


@pytest.mark.slow
def test_every_row_of_the_table(math_pool):
    wrong = []
    for verifier in dict.fromkeys(row[0] for row in TABLE):
        rows = [row for row in TABLE if row[0] == verifier]
        with Scorer(verifier) as scorer:
            scorer.use_backend(math_pool)
            results = scorer.score(
                [Problem("p", (), truth) for _, _, truth, _ in rows],
                [response for _, response, _, _ in rows],
            )
        for row, result in zip(rows, results, strict=True):
            value = result.value if isinstance(result, Score) else None
            if value != pytest.approx(row[3], abs=1e-12):
                wrong.append((*row, result))
    assert wrong == [], "\n".join(map(str, wrong))


# The course's lists, from its own grader: (answer, truth), right in both of its modes, ...
BOTH_MODES = table(__file__, "both_modes")
# ... right with math-verify only (of these, ours takes numbers that are equal in both modes), ...
SLOW_MODE = table(__file__, "slow_mode")
SLOW_MODE_THERE = table(__file__, "slow_mode_there")
# ... and wrong in both.
NO_MODE = table(__file__, "no_mode")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pairs", "fast", "slow"),
    [(BOTH_MODES, 1, 1), (SLOW_MODE, 0, 1), (SLOW_MODE_THERE, None, 1), (NO_MODE, 0, 0)],
    ids=["both", "slow", "slow there", "none"],
)
def test_the_modes_of_the_course(grade, pairs, fast, slow):
    tagged = [(TAGS.format(answer), truth) for answer, truth in pairs]
    fast_scores = grade("r1_zero", tagged)
    slow_scores = grade("r1_zero_math", tagged)
    if fast is not None:
        assert [pair for pair, score in zip(pairs, fast_scores, strict=True) if score != fast] == []
    assert [pair for pair, score in zip(pairs, slow_scores, strict=True) if score != slow] == []
    assert all(map(float.__le__, fast_scores, slow_scores)), "right in fast mode, wrong in slow"


def test_four_classes_are_named_parts(math_pool):
    responses = [TAGS.format("8"), TAGS.format("9"), "<answer>8</answer>", "nothing"]
    for verifier in ("r1_zero", "r1_zero_math"):
        results = math_pool.verify(
            [(response, Problem("p", (), "8")) for response in responses], [verifier] * 4
        )
        assert [(r.parts["format"], r.parts["answer"]) for r in results] == [
            (1, 1),
            (1, 0),
            (0, 1),
            (0, 0),
        ]


@pytest.mark.parametrize(
    "verifier",
    [name for name in VERIFIERS if name not in ("format", "box_format", "think_format", "bold")],
)
def test_an_empty_ground_truth_is_a_failure(verifier, math_pool):
    """It is no wrong answer; verifiers that read no ground truth give a score."""
    (result,) = math_pool.verify([("\\boxed{8} #### 8", Problem("p", (), " "))], [verifier])
    reads = verifier not in ("length", "overlong")
    assert isinstance(result, Failure) is reads, (verifier, result)


def test_forms_of_code_tests():
    from postgrad.verifiers.grading.code import suite_of

    asserts = suite_of(Problem("p", (), json.dumps(["assert f(1) == 2"])))
    assert asserts is not None and asserts.asserts == ("assert f(1) == 2",)
    pairs = suite_of(Problem("p", (), "", extra={"tests": [{"input": "1\n", "output": "2\n"}]}))
    assert pairs is not None and pairs.stdio == ({"input": "1\n", "output": "2\n"},)
    apps = suite_of(Problem("p", (), json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})))
    assert apps is not None and apps.stdio == ({"input": "1\n", "output": "2\n"},)
    mbpp = suite_of(
        Problem(
            "p", (), "", extra={"test_list": ["assert f(1) == 2"], "test_imports": ["import math"]}
        )
    )
    assert mbpp is not None and "import math" in mbpp.setup
    humaneval = suite_of(
        Problem(
            "p",
            (),
            "",
            extra={"test": "def check(c): ...", "entry_point": "f", "prompt": "def f(x):\n"},
        )
    )
    assert humaneval is not None and humaneval.asserts[0].endswith("check(f)")
    plain = suite_of(Problem("p", (), "assert f(1) == 2\nassert f(2) == 3"))
    assert plain is not None and len(plain.asserts) == 1
    unpaired = json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n"]})
    assert suite_of(Problem("p", (), unpaired)) is None
    assert suite_of(Problem("p", (), "42")) is None and suite_of(Problem("p", (), "[]")) is None


def test_program_of_an_indented_block_loses_the_indentation_of_its_fence():
    from postgrad.verifiers.grading.code import find_program

    item = "1. Here:\n   ```python\n   def f(x):\n       return x\n\n   ```\n"
    assert find_program(item) == ("def f(x):\n    return x", True)
    continued = "```python\n    return x\n```"  # a continuation of HumanEval's prompt
    assert find_program(continued) == ("    return x", True)
