"""Votes for maj@k: equal answers give equal votes, however they are written."""

import pytest
from refused import refused
from tables import tabled

import postgrad
from postgrad.problem import Problem
from postgrad.results.votes import EXTRACTORS, can_vote, vote
from postgrad.verifiers.table import VERIFIERS


def problem(truth: str) -> Problem:
    return Problem("p", ({"role": "user", "content": "?"},), truth)


@tabled("verifier, truth, responses, expected")
def test_equal_answers_give_equal_votes(verifier, truth, responses, expected):
    for response in responses:
        assert vote(verifier, response, problem(truth)) == expected


@pytest.mark.parametrize("verifier", EXTRACTORS)
def test_response_without_answer_has_no_vote(verifier):
    response = "" if verifier == "exact" else "I do not know"
    truth = "A" if verifier == "choice" else "1"
    assert vote(verifier, response, problem(truth)) is None


def test_answer_before_the_end_of_a_thought_is_no_vote():
    """As for the verifier, which gives no score for it."""
    assert vote("oat", "so \\boxed{4}</think>", problem("4")) is None


def test_extractors_are_named_after_verifiers():
    assert set(EXTRACTORS) <= set(VERIFIERS)
    assert not can_vote("mine.py:score")
    assert vote("mine.py:score", "7", problem("7")) is None


@pytest.mark.parametrize(
    ("verifier", "response", "expected"),
    [
        ("math", "so \\boxed{1,234.0}", "1234"),
        ("0.1*format + math", "so \\boxed{4}", "4"),
        ("auto + 0.1*format", "#### 5", "5"),
        ("auto", "I do not know", None),
    ],
)
def test_extract_answer_takes_a_setting_and_needs_no_ground_truth(verifier, response, expected):
    unlabeled = Problem("p", ({"role": "user", "content": "?"},), "", "openai/gsm8k")
    assert postgrad.extract_answer(response, unlabeled, verifier) == expected


@pytest.mark.parametrize("verifier", ["mine.py:score", "format", "0.5*format + 1", "llm_judge"])
def test_extract_answer_refuses_verifiers_without_answers(verifier):
    with refused("unsupported", "reward.verifier"):
        postgrad.extract_answer("7", problem("7"), verifier)
