"""`data check` finds rejected gold answers, accepted wrong answers, duplicates and overlap."""

import pytest
from tables import tabled

from postgrad.evaluation.data_check import (
    FORMAT_ONLY,
    RESPONSE_FORMATS,
    check_data,
    gold_response,
    near_miss,
)
from postgrad.problem import Problem
from postgrad.verifiers.expression import parse_reward
from postgrad.verifiers.scorer import Scorer
from postgrad.verifiers.table import VERIFIERS


def problem(
    uid: str, truth: str, source: str = "openai/gsm8k", question: str = "", **extra: object
) -> Problem:
    messages = ({"role": "user", "content": question or f"What is {uid}?"},)
    return Problem(uid, messages, truth, source, extra=dict(extra))


def check(*problems: Problem, verifier: str = "auto", against: tuple[Problem, ...] = ()):
    with Scorer(verifier) as scorer:
        locations = [f"f: row {i}" for i in range(1, len(problems) + 1)]
        return check_data(problems, locations, scorer, against)


def test_rejected_gold_answer_is_found():
    report = check(problem("a", "1"), problem("b", "many"), problem("c", "C", "arc_c"))
    assert (report.num_problems, report.num_checked, report.num_near_misses) == (3, 3, 2)
    (row,) = report.rejected_golds
    assert (row.location, row.uid) == ("f: row 2", "b")
    assert "'many' of problem b is not a number" in row.reason
    assert not report.accepted_near_misses


def accepts_all(response: str, problem: Problem) -> float:
    return 1.0


@pytest.mark.slow
def test_verifier_that_accepts_everything_is_found():
    report = check(
        problem("a", "41"),
        problem("b", "Yes"),
        problem("c", "x^2"),
        verifier=f"{__file__}:accepts_all",
    )
    assert not report.rejected_golds and report.num_near_misses == 2
    assert [row.uid for row in report.accepted_near_misses] == ["a", "b"]
    assert (
        "the gold answer is '41', and '\\\\boxed{42}' scores 1"
        in report.accepted_near_misses[0].reason
    )


@tabled("verifier, truth, wrong")
def test_near_misses_of_worked_solutions(verifier, truth, wrong):
    assert near_miss(verifier, problem("a", truth)) == wrong


@pytest.mark.slow
def test_worked_solutions_are_checked_with_near_misses():
    golds = [problem("a", "24+48 = 72\n#### 72"), problem("b", "so \\boxed{3}", "arithmetic/boxed")]
    report = check(*golds)
    assert report.num_near_misses == 2
    assert not report.rejected_golds
    assert not report.accepted_near_misses
    cheated = check(*golds, verifier=f"{__file__}:accepts_all")
    assert [row.uid for row in cheated.accepted_near_misses] == ["a", "b"]


@pytest.mark.parametrize("verifier", ["llm_judge", "auto + 0.1*llm_judge"])
def test_what_a_judge_decides_is_not_checked(verifier):
    report = check(problem("a", "41"), verifier=verifier)
    assert report.num_checked == 0
    assert list(report.unchecked) == ["openai/gsm8k: a judge decides"]


def test_rejected_demonstration_is_found():
    def with_demonstration(uid: str, answer: int) -> Problem:
        messages = ({"role": "user", "content": uid},)
        return Problem(uid, messages, "7", "openai/gsm8k", (f"#### {answer}",))

    good = with_demonstration("g", 7)
    bad = with_demonstration("b", 8)
    report = check(good, bad)
    assert [row.uid for row in report.rejected_demonstrations] == ["b"]
    assert not report.rejected_golds


def test_duplicates_and_overlap_ignore_style_case_and_whitespace():
    first = problem("a", "1", question="What is  1+1 ?")
    again = problem(
        "b",
        "2",
        question="what is 1+1?\n\nPlease reason step by step, "
        "and put your final answer within \\boxed{}.",
    )
    other = problem("c", "1", question="What is 1-1?")
    report = check(first, again, other, against=(problem("t", "1", question="WHAT IS 1-1"),))
    assert [(row.uid, row.reason) for row in report.duplicates] == [
        ("b", "same question as f: row 1, with another answer: '1', here '2'")
    ]
    assert [(row.uid, row.reason) for row in report.in_test_set] == [
        ("c", "its question is also that of t in the test set")
    ]


def test_problems_that_cannot_be_checked_are_counted():
    judged = problem("a", "", "helpful_instructions", reward_model={"style": "model"})
    code = problem("d", '["assert f() == 1"]', "taco")
    report = check(judged, problem("b", "1", "my_set"), problem("c", "", "openai/gsm8k"), code)
    assert report.num_checked == 0 and not report.rejected_golds
    assert report.unchecked == {
        "helpful_instructions: a judge decides": 1,
        "my_set: no known verifier; give one with verifier=NAME": 1,
        "openai/gsm8k: no ground truth": 1,
        "taco: no solution that its tests could run": 1,
    }


@pytest.mark.slow
def test_gold_answer_has_the_format_every_verifier_expects():
    assert set(RESPONSE_FORMATS) <= set(VERIFIERS) and set(FORMAT_ONLY) <= set(VERIFIERS)
    with Scorer() as scorer:
        for name in set(VERIFIERS) - {*FORMAT_ONLY, "code", "geometry3k", "reasoning_gym"}:
            scorer.verifier = name
            scorer.reward = parse_reward(name)
            scorer.rules = scorer.reward.rules
            item = problem("a", "B" if name == "choice" else "12")
            report = check_data([item], ["f: row 1"], scorer)
            assert not report.rejected_golds
            assert not report.accepted_near_misses
            assert report.num_near_misses == 1, gold_response(name, item)


def test_format_verifiers_are_not_checked():
    assert check(problem("a", "12"), verifier="length").unchecked == {
        "openai/gsm8k: length scores the format, not the answer": 1
    }


@tabled("truth, miss")
def test_near_miss_of_each_kind_of_truth(truth: str, miss: str | None):
    assert near_miss("math", problem("a", truth)) == miss
