"""One line of a result file."""

import pytest

from postgrad.problem import Problem, Score
from postgrad.results.rows import result_row
from postgrad.verifiers.scorer import Scorer


@pytest.mark.parametrize(
    ("score", "pass_score", "right"),
    [(1.0, 1.0, True), (0.999, 1.0, False), (0.6 + 0.3, 0.9, True), (0.0, 0.0, True)],
)
def test_right_is_at_least_pass_score(score, pass_score, right):
    problem = Problem("p", (), "1")
    verdict = Score(score, {})
    row = result_row(problem, 0, "1", verdict, verifier="exact", pass_score=pass_score, prompt="q")
    assert row["right"] is right


def test_full_score_of_a_sum_is_right():
    """0.7 + 0.2 + 0.1 is less than 1 in floating point."""
    name = "0.7*numeric + 0.2*box_format + 0.1*boxed"
    problem = Problem("p", (), "4")
    with Scorer(name) as scorer:
        (verdict,) = scorer.score([problem], ["\\boxed{4}"])
    assert isinstance(verdict, Score) and min(verdict.parts.values()) == 1.0
    row = result_row(problem, 0, "", verdict, verifier=name, pass_score=1.0, prompt="q")
    assert row["right"]
