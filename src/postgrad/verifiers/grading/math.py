"""Verifiers for mathematics: text and numbers first, then values and algebra.

Only the pool's child processes import this; see algebra.py.
"""

import re
from collections import Counter
from functools import lru_cache

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.grading.algebra import same_algebra
from postgrad.verifiers.grading.answers import (
    after_thought,
    boxed_answer,
    final_answer,
    has_box,
    result,
    stated_answer,
    truth_of,
    unusable,
)
from postgrad.verifiers.grading.equality import as_latex, compare, normalize, split_list, split_unit
from postgrad.verifiers.grading.numbers import number

# Nested brackets: real answers have at most five, and each doubles the LaTeX parser's time.
MAX_DEPTH = 12

# Numbers too large to compute: towers of powers, exponents or factorials of five digits or more.
_HUGE = re.compile(
    r"[0-9)}]\s*\^[\s{(]*[0-9]+\s*[)}]*\s*\^|\^[\s{(]*-?[0-9]{5,}"
    r"|[0-9]{5,}\s*[)}]*\s*!|!\s*[)}]*\s*!"
)
_PRIME = re.compile(r"(?<=[A-Za-z)\]}'])\s*(?:'|\^\s*\{?\s*\\prime)")
_EQUALS = re.compile(r"(?<![<>!])=")
_THOUSANDS = re.compile(r"[0-9]\{?,\}?[0-9]{3}(?![0-9])")
_BRACED_COMMAND = re.compile(r"\\[a-z]+(?:\{[^{}]*\})+")
_BRACKET = re.compile(r"[\[({]|\\lbrace|\\begin")
# Formulas between dollar signs, and what may join them to one list: all but words.
_FORMULA = re.compile(r"(?<!\\)\$([^$]+)(?<!\\)\$")
_JOINED = re.compile(r"(?:[^A-Za-z]|\band\b|\bor\b)*")


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
    """Compare the only formula of each, or several in their order: all must be equal.

    So are the elements of a list that the parser cannot read as a whole.
    """
    given_formulas, true_formulas = _formulas(given), _formulas(truth)
    if len(given_formulas) != len(true_formulas):
        return False
    if len(true_formulas) > 1:
        return all(map(equal, given_formulas, true_formulas))
    given, _ = split_unit(as_latex(given_formulas[0]))
    truth, _ = split_unit(as_latex(true_formulas[0]))
    if is_too_large(given) or is_too_large(truth):
        return False
    equals_sign = _EQUALS.search(given)
    if equals_sign and not _EQUALS.search(truth) and not _is_name(given[: equals_sign.start()]):
        return False
    if _num_primes(given) != _num_primes(truth):
        return False
    is_same = same_algebra(given, truth)
    if is_same is None:
        given_items, true_items = split_list(given), split_list(truth)
        is_list = len(given_items) == len(true_items) > 1
        return is_list and all(map(equal, given_items, true_items))
    return is_same and not _differ_as_lists(given, truth)


def _formulas(text: str) -> list[str]:
    """Return the formulas between dollar signs in prose; else the text itself, without the signs.

    $1$ and $2$ are one list, and so one formula.
    """
    if _JOINED.fullmatch(_FORMULA.sub("", text)):
        return [_FORMULA.sub(r"\1", text)]
    return _FORMULA.findall(text) or [text]


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
