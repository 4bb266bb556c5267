"""Verifiers for mathematics: text and numbers first, then math-verify's computer algebra.

Only the pool's child processes import this. A hostile answer can keep algebra busy for hours or use
all memory. There is no safe way to stop it from within, so nothing here sets a timer: the pool
kills the child. Answers are never evaluated as Python.
"""

import logging
import re
import warnings
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

import sympy
import sympy.physics.units  # simplify() imports it, and it needs the parser replaced below
from math_verify import LatexExtractionConfig, parse, verify
from sympy.parsing import sympy_parser

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.answers import (
    after_thought,
    boxed_answer,
    final_answer,
    has_box,
    result,
    stated_answer,
    truth_of,
    unusable,
)
from postgrad.verifiers.equality import as_latex, compare, normalize, split_unit
from postgrad.verifiers.numbers import number

# Nested brackets: real answers have at most five, and each doubles the LaTeX parser's time.
MAX_DEPTH = 12

# Numbers too large to compute: towers of powers, exponents or factorials of five digits or more.
_HUGE = re.compile(
    r"[0-9)}]\s*\^[\s{(]*[0-9]+\s*[)}]*\s*\^|\^[\s{(]*-?[0-9]{5,}"
    r"|[0-9]{5,}\s*[)}]*\s*!|!\s*[)}]*\s*!"
)
_POWER_T = re.compile(r"\^\s*(?:T|\{\s*T\s*\})")
_PRIME = re.compile(r"(?<=[A-Za-z)\]}'])\s*(?:'|\^\s*\{?\s*\\prime)")
_EQUALS = re.compile(r"(?<![<>!])=")
_THOUSANDS = re.compile(r"[0-9]\{?,\}?[0-9]{3}(?![0-9])")
_BRACED_COMMAND = re.compile(r"\\[a-z]+(?:\{[^{}]*\})+")
_BRACKET = re.compile(r"[\[({]|\\lbrace|\\begin")
# Units are split off before (equality.py). math-verify's own list of units has c, d, m, t and other
# letters, which are mostly variables: k t is not k.
_LATEX = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=replace(LatexExtractionConfig().normalization_config, units=False),
    )
]


def _numeral(text: str, *_: Any, **__: Any) -> Any:
    """Replacement for sympy's string parser: reads 3, 3/2 and 1.5 and refuses everything else."""
    if re.fullmatch(r"\s*[+-]?[0-9]+(?:/[0-9]+)?\s*", text):
        return sympy.Rational(text.strip())
    if re.fullmatch(r"\s*[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)\s*", text):
        return sympy.Float(text.strip())
    return _refuse()


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("answers are not evaluated as Python")


# sympy evaluates strings with eval(), and the LaTeX parser passes it numerals. No eval here.
sympy_parser.parse_expr = _numeral
sympy_parser.eval_expr = _refuse
for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", module="sympy")


def math(response: str, problem: Problem) -> Score | Failure:
    """1 if the last \\boxed answer equals the ground truth by text, number or algebra.

    Part `format`: there is such a box.
    """
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    found = boxed_answer(response)
    return result(found is not None and equal(found, truth), format=found is not None)


def math_answer(response: str, problem: Problem) -> Score | Failure:
    """As `math`; without a box, the text after "Answer:" counts, else the last number.

    LUFFY's reward version 4, and DAPO's prompts. Part `format`: the answer is in a box or stated.
    """
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    plain = has_box(response) or stated_answer(response) is not None
    found = final_answer(response)
    return result(found is not None and equal(found, truth), format=plain and found is not None)


def oat(response: str, problem: Problem) -> Score | Failure:
    """OAT-style, for evaluation: as `math`, on the text after the first `</think>`."""
    return math(after_thought(response), problem)


def geometry3k(response: str, problem: Problem) -> Score | Failure:
    """0.9 for the answer in the last box, and 0.1 for `<think>...</think>` with a box after it."""
    score = math(response, problem)
    if isinstance(score, Failure):
        return score
    before, closing, after = response.partition("</think>")
    good = bool(closing) and before.strip().startswith("<think>") and bool(boxed_answer(after))
    return Score(0.9 * score.value + 0.1 * good, {"answer": score.value, "format": float(good)})


def think_math(response: str, problem: Problem) -> Score | Failure:
    """LUFFY's reward: 0 without `</think>`; else the answer after it, boxed or stated, counts.

    Text after a second `</think>` does not count.
    """
    truth = truth_of(problem)
    if not truth:
        return unusable(problem, "an answer")
    _, *after = response.split("</think>", 2)
    found = final_answer(after[0]) if after else None
    return result(found is not None and equal(found, truth), format=bool(after))


def equal(given: str, truth: str) -> bool:
    """Return whether two answers are equal. Answers that are too large for algebra are not."""
    equal_by_text = compare(given, truth)
    return _equal_by_algebra(given, truth) if equal_by_text is None else equal_by_text


@lru_cache(maxsize=1024)  # samples of a problem often have the same answer
def _equal_by_algebra(given: str, truth: str) -> bool:
    given, _ = split_unit(as_latex(given))
    truth, _ = split_unit(as_latex(truth))
    if is_too_large(given) or is_too_large(truth):
        return False
    equals_sign = _EQUALS.search(given)
    if equals_sign and not _EQUALS.search(truth) and not _is_name(given[: equals_sign.start()]):
        return False
    if _num_primes(given) != _num_primes(truth):
        return False
    if not verify(parse_latex(truth), parse_latex(given), timeout_seconds=None):
        return False
    return not _differ_as_lists(given, truth)


def _differ_as_lists(given: str, truth: str) -> bool:
    """Return whether two lists without brackets differ in how often an element is there.

    math-verify reads them as sets, and 1,1,2 is not 1,2,2. Thousands, 1,000, are no list.
    """
    if "\\pm" in given + truth or _THOUSANDS.search(given) or _THOUSANDS.search(truth):
        return False
    lists: list[list[str]] = []
    for text in (given, truth):
        normalized = normalize(text)
        if _BRACKET.search(_BRACED_COMMAND.sub("", normalized)):
            return False
        lists.append(normalized.split(","))
    if max(map(len, lists)) == 1:
        return False
    if len(lists[0]) != len(lists[1]):
        return True
    counts = [Counter(str(number(item) or item) for item in items) for items in lists]
    return counts[0].keys() == counts[1].keys() and counts[0] != counts[1]


def is_too_large(text: str) -> bool:
    return bool(_HUGE.search(text)) or _depth(text) > MAX_DEPTH


def _num_primes(text: str) -> int:
    """Return the number of primes in an answer's value: math-verify drops them, and f' is not f.

    Primes in the name of the value, f'(x) = ..., do not count.
    """
    return len(_PRIME.findall(_EQUALS.split(text)[-1]))


def _is_name(left: str) -> bool:
    """Return whether `left =` names the right side: x, f(3), \\gcd(4,6), 2+3.

    a+2b=0 is an equation, and 0 is not its answer.
    """
    bare = re.sub(r"\\[A-Za-z]+|_\{[^{}]*\}|_.|\([^()]*\)", "", left)
    return not re.search(r"[A-Za-z]", bare) or not re.search(r"[-+*/^0-9]", bare)


@lru_cache(maxsize=256)
def parse_latex(text: str) -> list[Any]:
    """Return math-verify's parse of an answer, as LaTeX only: its plain expressions use eval().

    The parser drops the transpose A^T, and with it the power 2^T; it keeps ^t.
    """
    text = _POWER_T.sub("^{t}", text)
    return parse(
        f"\\boxed{{{text}}}",
        _LATEX,
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )


def _depth(text: str) -> int:
    """Return the depth of nested brackets."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest
