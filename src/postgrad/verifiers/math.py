"""Verifiers for mathematics: text and numbers first, then math-verify's algebra. Only the pool's child processes import this.

A hostile answer can keep algebra busy for hours or eat all memory; there is no safe way to stop it from within, so nothing here
sets a timer: the pool kills the child. Answers are never evaluated as Python.
"""

import logging
import re
import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

import sympy
import sympy.physics.units  # simplify() imports it late, and it needs the string parser that is replaced below
from math_verify import LatexExtractionConfig, parse, verify
from sympy.parsing import sympy_parser

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.answers import (
    boxed_answer,
    final_answer,
    has_box,
    result,
    stated_answer,
    tagged_answers,
    truth_of,
    unusable,
)
from postgrad.verifiers.equality import as_latex, compare, split_unit

MAX_DEPTH = 12  # brackets inside each other: real answers have five at the most, and the LaTeX parser's time doubles with each

# Numbers that no one can write out: a tower of powers, an exponent or a factorial of five digits and more.
_HUGE = re.compile(
    r"[0-9)}]\s*\^[\s{(]*[0-9]+\s*[)}]*\s*\^|\^[\s{(]*-?[0-9]{5,}|[0-9]{5,}\s*[)}]*\s*!|!\s*[)}]*\s*!"
)
_POWER_T = re.compile(r"\^\s*(?:T|\{\s*T\s*\})")
_PRIME = re.compile(r"(?<=[A-Za-z)\]}'])\s*(?:'|\^\s*\{?\s*\\prime)")
_EQUALS = re.compile(r"(?<![<>!])=")
# Units are split off before (equal.py); the reader's own list has c, d, m, t and other letters, which are mostly variables: k t is not k.
_LATEX = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=replace(LatexExtractionConfig().normalization_config, units=False),
    )
]


def _numeral(text: str, *_: Any, **__: Any) -> Any:
    """What sympy's string parser is replaced with: reads 3, 3/2 and 1.5, refuses everything else."""
    if re.fullmatch(r"\s*[+-]?[0-9]+(?:/[0-9]+)?\s*", text):
        return sympy.Rational(text.strip())
    if re.fullmatch(r"\s*[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)\s*", text):
        return sympy.Float(text.strip())
    return _refuse()


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("answers are not evaluated as Python")


# sympy turns strings into numbers, and into anything else, with eval(), and the LaTeX reader hands it numerals. No eval here.
sympy_parser.parse_expr = _numeral
sympy_parser.eval_expr = _refuse
for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", module="sympy")


def math(response: str, problem: Problem) -> Score | Failure:
    """1 when the last \\boxed answer equals the ground truth by text, number or algebra. `format`: there is such a box."""
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    found = boxed_answer(response)
    return result(found is not None and equal(found, truth), format=found is not None)


def math_answer(response: str, problem: Problem) -> Score | Failure:
    """As `math`, and where no box is opened, what follows "Answer:" or "answer is", or else the last number, is graded.

    LUFFY's reward version 4, and DAPO's prompts. `format`: the answer is in a box or stated.
    """
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    plain = has_box(response) or stated_answer(response) is not None
    found = final_answer(response)
    return result(found is not None and equal(found, truth), format=plain and found is not None)


def oat(response: str, problem: Problem) -> Score | Failure:
    """OAT-style, for evaluation: the last \\boxed after the first `</think>` counts, or of the whole response without that tag."""
    before, closing, after = response.partition("</think>")
    return math(after if closing else before, problem)


def geometry3k(response: str, problem: Problem) -> Score | Failure:
    """0.9 for the answer in the last box, 0.1 for the form `<think>...</think>` with a box after it."""
    score = math(response, problem)
    if isinstance(score, Failure):
        return score
    before, closing, after = response.partition("</think>")
    good = bool(closing) and before.strip().startswith("<think>") and bool(boxed_answer(after))
    return Score(0.9 * score.value + 0.1 * good, {"answer": score.value, "format": float(good)})


def think_math(response: str, problem: Problem) -> Score | Failure:
    """LUFFY's reward: 0 without `</think>`; else the solution after it, up to a second one, is graded, boxed or stated in words."""
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    _, *after = response.split("</think>", 2)
    found = final_answer(after[0]) if after else None
    return result(found is not None and equal(found, truth), format=bool(after))


def r1_zero_math(response: str, problem: Problem) -> Score | Failure:
    """R1-Zero's reward with algebra: 1 when `</think> <answer>...</answer>` is right and so is the answer in it."""
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    good, answers = tagged_answers(response)
    right = any(equal(answer, truth) for answer in answers)
    return Score(float(good and right), {"format": float(good), "answer": float(right)})


def equal(given: str, truth: str) -> bool:
    """Whether two answers are the same. What text cannot decide and algebra could not finish counts as different."""
    verdict = compare(given, truth)
    if verdict is not None:
        return verdict
    given, truth = split_unit(as_latex(given))[0], split_unit(as_latex(truth))[0]
    if any(_HUGE.search(text) or _depth(text) > MAX_DEPTH for text in (given, truth)):
        return False
    if (
        not _EQUALS.search(truth)
        and (sign := _EQUALS.search(given))
        and not _names_value(given[: sign.start()])
    ):
        return False
    if _primes(given) != _primes(truth):
        return False
    return bool(verify(_parse(truth), _parse(given), timeout_seconds=None))


def _primes(text: str) -> int:
    """How many primes an answer's value has: algebra drops them, and f' is not f. What names the value, f'(x) = ..., does not count."""
    return len(_PRIME.findall(_EQUALS.split(text)[-1]))


def _names_value(left: str) -> bool:
    """Whether `left =` names the right side (x, f(3), \\gcd(4,6), 2+3); a+2b=0 is an equation, and 0 not its answer."""
    bare = re.sub(r"\\[A-Za-z]+|_\{[^{}]*\}|_.|\([^()]*\)", "", left)
    return not re.search(r"[A-Za-z]", bare) or not re.search(r"[-+*/^0-9]", bare)


@lru_cache(maxsize=256)
def _parse(text: str) -> list[Any]:
    """math-verify's reading of an answer. No plain-expression reading: that one goes through eval().

    The reader drops a transpose of letters, A^T, and with it the power 2^T; ^t it keeps, and it knows no capitals.
    """
    text = _POWER_T.sub("^{t}", text)
    return parse(f"\\boxed{{{text}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest
