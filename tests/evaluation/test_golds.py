"""`data check` finds golds that the verifier refuses, wrong answers that it accepts, repeats and overlap."""

import pytest

from postgrad.evaluation.golds import FORM_ONLY, SAID, check, gold_response, near_miss
from postgrad.problem import Problem
from postgrad.verifiers.scorer import Scorer
from postgrad.verifiers.table import VERIFIERS


def problem(
    uid: str, truth: str, source: str = "openai/gsm8k", question: str = "", **extra: object
) -> Problem:
    messages = ({"role": "user", "content": question or f"What is {uid}?"},)
    return Problem(uid, messages, truth, source, extra=dict(extra))


def found(*problems: Problem, verifier: str = "auto", against: tuple[Problem, ...] = ()):
    with Scorer(verifier) as scorer:
        return check(
            problems, [f"f: row {i}" for i in range(1, len(problems) + 1)], scorer, against
        )


def test_right_golds_and_a_wrong_one():
    findings = found(problem("a", "1"), problem("b", "many"), problem("c", "C", "arc_c"))
    assert (findings.problems, findings.checked, findings.near) == (3, 3, 2)
    (row,) = findings.wrong
    assert (row.place, row.uid) == (
        "f: row 2",
        "b",
    ) and "'many' of problem b is not a number" in row.reason
    assert not findings.accepted


def accepts_all(response: str, problem: Problem) -> float:
    return 1.0


def test_a_verifier_that_accepts_everything_is_caught():
    findings = found(
        problem("a", "41"),
        problem("b", "Yes"),
        problem("c", "x^2"),
        verifier=f"{__file__}:accepts_all",
    )
    assert not findings.wrong and findings.near == 2
    assert [row.uid for row in findings.accepted] == ["a", "b"]
    assert "the gold answer is '41', and '\\\\boxed{42}' scores 1" in findings.accepted[0].reason


def test_demonstrations_are_judged_too():
    good, bad = (
        Problem(uid, ({"role": "user", "content": uid},), "7", "openai/gsm8k", (f"#### {n}",))
        for uid, n in (("g", 7), ("b", 8))
    )
    findings = found(good, bad)
    assert [row.uid for row in findings.wrong_demonstrations] == ["b"] and not findings.wrong


def test_repeats_and_overlap_ignore_style_case_and_spacing():
    first = problem("a", "1", question="What is  1+1 ?")
    again = problem(
        "b",
        "2",
        question="what is 1+1?\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    )
    other = problem("c", "1", question="What is 1-1?")
    findings = found(first, again, other, against=(problem("t", "1", question="WHAT IS 1-1"),))
    assert [(row.uid, row.reason) for row in findings.repeated] == [
        ("b", "asks the same as f: row 1, with another answer: '1', here '2'")
    ]
    assert [(row.uid, row.reason) for row in findings.shared] == [
        ("c", "its question is also that of t in the test set")
    ]


def test_what_cannot_be_judged_is_counted():
    judged = problem("a", "", "helpful_instructions", reward_model={"style": "model"})
    findings = found(judged, problem("b", "1", "my_set"), problem("c", "", "openai/gsm8k"))
    assert findings.checked == 0 and not findings.wrong
    assert findings.unchecked == {
        "helpful_instructions: a judge decides": 1,
        "my_set: no verifier is known for it; name one with verifier=NAME": 1,
        "openai/gsm8k: no ground truth": 1,
    }


def test_every_verifier_is_told_the_answer_in_a_way_it_knows():
    assert set(SAID) <= set(VERIFIERS) and set(FORM_ONLY) <= set(VERIFIERS)
    with Scorer() as scorer:
        for name in set(VERIFIERS) - {*FORM_ONLY, "code", "geometry3k"}:
            scorer.verifier = name
            item = problem("a", "B" if name == "choice" else "12")
            findings = check([item], ["f: row 1"], scorer)
            assert not findings.wrong and not findings.accepted and findings.near == 1, (
                gold_response(name, item)
            )


def test_form_is_not_an_answer():
    assert found(problem("a", "12"), verifier="length").unchecked == {
        "openai/gsm8k: length judges the form, not the answer": 1
    }


@pytest.mark.parametrize(
    ("truth", "miss"),
    [
        ("41", "\\boxed{42}"),
        ("-3", "\\boxed{-2}"),
        ("0.5", "\\boxed{1.5}"),
        ("Yes", "\\boxed{No}"),
        ("\\text{False}", "\\boxed{True}"),
        ("\\infty", None),
    ],
)
def test_near_misses(truth: str, miss: str | None):
    assert near_miss("math", problem("a", truth)) == miss
