"""Rewards of the CS336 assignment: r1_zero and question_only, which are its fast grading by sympy,
and r1_zero_math, which is its slow grading by math-verify.

Only the pool's child processes import this; see math.py.
"""

import re
from collections.abc import Callable

import sympy

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.grading.algebra import parse_latex, same_value, time_limit
from postgrad.verifiers.grading.answers import (
    boxed_answer,
    has_box,
    result,
    single_number,
    tagged_answers,
    truth_of,
    unusable,
)
from postgrad.verifiers.grading.equality import as_latex, compare, normalize, split_list, split_unit
from postgrad.verifiers.grading.math import equal, is_too_large

MAX_LETTERS = 2  # different variables in an answer that sympy simplifies; as in the assignment

_COMMAND = re.compile(r"\\[A-Za-z]+")
_POWER = re.compile(r"\^(?:\{-?[0-9A-Za-z]\}|-?[0-9](?![0-9])|[A-Za-z])(?!\s*\^)")
_SENTENCE = re.compile(r"\s*[A-Z][A-Za-z']+,?\s")


def r1_zero(response: str, problem: Problem) -> Score | Failure:
    """R1-Zero's reward: 1 if the tags are right and the answer is, by text or by sympy.

    Parts: `format`, `answer`.
    """
    return _tagged_score(response, problem, tagged_answers, fast_equal)


def r1_zero_math(response: str, problem: Problem) -> Score | Failure:
    """As r1_zero, with math-verify; of an answer that is a sentence the last number counts."""
    return _tagged_score(response, problem, _answers_and_sentence, equal)


def question_only(response: str, problem: Problem) -> Score | Failure:
    """1 if the last \\boxed answer is right, by text or by sympy. Part `format`: there is a box."""
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    found = boxed_answer(response)
    return result(found is not None and fast_equal(found, truth), format=found is not None)


def _tagged_score(
    response: str,
    problem: Problem,
    find: Callable[[str], tuple[bool, list[str]]],
    is_equal: Callable[[str, str], bool],
) -> Score | Failure:
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    good, answers = find(response)
    right = any(is_equal(answer, truth) for answer in answers)
    return Score(float(good and right), {"format": float(good), "answer": float(right)})


def _answers_and_sentence(response: str) -> tuple[bool, list[str]]:
    """Return tagged_answers, and for "She sold 72 clips." also 72.

    A list of numbers, "It is 41 or 42", gives none.
    """
    good, answers = tagged_answers(response)
    inner = response.rpartition("<answer>")[2].partition("</answer>")[0]
    if good and not has_box(inner) and _SENTENCE.match(inner):
        found = single_number(inner)
        answers += [found] if found is not None else []
    return good, answers


def fast_equal(given: str, truth: str) -> bool:
    """Return whether two answers are equal by text, number or sympy's simplify().

    As in the assignment: a tuple or list is compared element by element in its order; with more
    than MAX_LETTERS variables or a power of more than one character only the text counts; an
    integer equals nothing that has to be computed, so that 2^3 is not 8.
    """
    equal_by_text = compare(given, truth)
    if equal_by_text is not None:
        return equal_by_text
    given_items, given_brackets = _elements(given)
    true_items, true_brackets = _elements(truth)
    if given_brackets != true_brackets or len(given_items) != len(true_items):
        return False
    return all(map(_same_element, given_items, true_items))


def _elements(text: str) -> tuple[list[str], str]:
    """Return the elements of a tuple, interval or list, and its brackets; one for other answers."""
    text = normalize(split_unit(as_latex(text))[0])
    brackets = ""
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        brackets = text[0] + text[-1]
    inner = text[1:-1] if brackets else text
    items = split_list(inner)
    return (items, brackets) if len(items) > 1 else ([text], "")


def _same_element(given: str, truth: str) -> bool:
    equal_by_text = compare(given, truth)
    if equal_by_text is not None:
        return equal_by_text
    if not (_is_simple(given) and _is_simple(truth)) or _is_integer(given) != _is_integer(truth):
        return False
    one, other = parse_latex(given), parse_latex(truth)
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return False
    with time_limit():
        by_value = same_value(one, other)
        if by_value is not None:
            return by_value
        return sympy.simplify(one - other) == 0  # pyrefly: ignore[unsupported-operation]
    return False


def _is_simple(text: str) -> bool:
    """Return whether sympy may simplify this: few variables and small powers, so that it ends."""
    letters = set(re.findall(r"[A-Za-z]", _COMMAND.sub("", text)))
    num_small_powers = len(_POWER.findall(text))
    return (
        len(letters) <= MAX_LETTERS
        and num_small_powers == text.count("^")
        and not is_too_large(text)
    )


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]+", text) is not None
