"""The arithmetic generator: correct answers, fixed widths, disjoint splits, fixed lists."""

import hashlib
import re

import pytest
from refused import refused

from postgrad.data.problems import load_problems
from postgrad.data.sources.arithmetic import (
    LEVELS,
    Expression,
    arithmetic_problems,
    arithmetic_source,
)
from postgrad.problem import Problem
from postgrad.verifiers.table import choose

SPLITS = ("train", "validation", "test")
NUM_PROBLEMS = {1: 100, 2: 10_000, 3: 10_000, 4: 1_000, 5: 10_000, 6: 10_000}


class Digits(dict[int, dict[str, list[Problem]]]):
    """The problems of each level by split, made when they are first read."""

    def __missing__(self, level: int) -> dict[str, list[Problem]]:
        self[level] = {split: arithmetic_problems(level, "digits", split) for split in SPLITS}
        return self[level]


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits()


def calculate(expression: str) -> int:
    """A slow reference that parses the text."""
    match = re.fullmatch(r"(\d+|\(.+?\))([+*-])(\d+|\(.+?\))", expression)
    assert match
    left, op, right = match.groups()
    a, b = (calculate(side[1:-1]) if side[0] == "(" else int(side) for side in (left, right))
    return {"+": a + b, "-": a - b, "*": a * b}[op]


@pytest.mark.parametrize(
    "level",
    [level if level == 1 else pytest.param(level, marks=pytest.mark.slow) for level in LEVELS],
)
def test_digits_answers_and_widths(digits: Digits, level: int):
    problems = [p for split in SPLITS for p in digits[level][split]]
    assert len(problems) == NUM_PROBLEMS[level] == len({p.uid for p in problems})
    for p in problems:
        question = p.messages[0]["content"]
        assert question.endswith("=")
        assert calculate(question[:-1]) == int(p.ground_truth[::-1]) >= 0
        assert p.demonstrations == (p.ground_truth,)
    assert len({len(p.messages[0]["content"]) for p in problems}) == 1
    assert {len(p.ground_truth) for p in problems} == {LEVELS[level].answer_width}


def test_digits_example(digits: Digits):
    by_question = {p.messages[0]["content"]: p for split in SPLITS for p in digits[2][split]}
    problem = by_question["37+58="]
    assert (problem.ground_truth, problem.data_source) == ("590", "arithmetic/digits")
    assert problem.extra == {"level": 2, "expression": "37+58"}
    assert by_question["03+05="].ground_truth == "800"


def test_boxed_example():
    problem = next(
        p
        for split in SPLITS
        for p in arithmetic_problems(2, "boxed", split)
        if p.extra["expression"] == "37+58"
    )
    assert problem.messages == (
        {"role": "user", "content": "What is 37+58? Put the final answer in \\boxed{}."},
    )
    assert (problem.ground_truth, problem.data_source) == ("95", "arithmetic/boxed")
    assert problem.demonstrations == ("37+58 = 95, so the answer is \\boxed{95}.",)


@pytest.mark.slow
def test_splits_are_disjoint_in_all_levels_styles_and_orders(digits: Digits):
    """A held-out sum is not trained on in another level, in the other style, or as 58+37."""
    split_of: dict[str, str] = {}
    for level in LEVELS:
        for split in SPLITS:
            boxed = arithmetic_problems(level, "boxed", split) if level in (1, 2) else []
            for p in [*digits[level][split], *boxed]:
                text = p.extra["expression"]
                turned = re.sub(r"^(\d+)([+*])(\d+)$", r"\3\2\1", text)
                assert split_of.setdefault(text, split) == split
                assert split_of.setdefault(turned, split) == split


def test_key_ignores_operand_order_of_sums_and_products_only():
    assert Expression("+", 37, 58).key() == Expression("+", 58, 37).key()
    assert Expression("-", 58, 37).key() != Expression("-", 37, 58).key()
    inner, turned = Expression("+", 1, 2), Expression("+", 2, 1)
    assert Expression("*", inner, 3).key() == Expression("*", 3, turned).key()
    assert Expression("-", inner, 3).key() != Expression("-", 3, inner).key()


@pytest.mark.slow
def test_lists_never_change(digits: Digits):
    """Golden value: recorded runs and benchmarks use these problems in this order."""
    uids = "".join(p.uid for level in LEVELS for split in SPLITS for p in digits[level][split])
    assert hashlib.blake2b(uids.encode(), digest_size=8).hexdigest() == "8374a894ae0c35f1"


def test_source_defaults():
    assert (
        load_problems("arithmetic:1")
        == arithmetic_problems(1, "digits", "train")
        == arithmetic_source("arithmetic:1:digits:train")
    )
    assert load_problems("arithmetic:1:boxed") == arithmetic_problems(1, "boxed", "train")


def test_picture_example():
    """The same problems in the same order, drawn; their answers hold what must be read."""
    problems = arithmetic_problems(2, "picture", "test")
    digits = arithmetic_problems(2, "digits", "test")
    assert [p.ground_truth for p in problems] == [
        p.messages[0]["content"] + p.ground_truth for p in digits
    ]
    for problem in problems[:20]:
        (picture,) = problem.images
        assert picture.size == (48, 32)  # " 37" above "+58", in cells of 16 pixels
        assert problem.demonstrations == (problem.ground_truth,)
        assert choose(problem) == "exact"
    assert len({p.images[0].key for p in problems}) == len(problems)


def test_a_level_of_five_thousand_digits_is_refused():
    with refused("wrong_value"):
        load_problems("arithmetic:" + "9" * 5000)
