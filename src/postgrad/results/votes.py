"""The answer of a response, extracted as its verifier does and normalized, as maj@k counts it."""

from collections.abc import Callable

from postgrad.errors import Unsupported
from postgrad.problem import Problem
from postgrad.verifiers.expression import parse_reward
from postgrad.verifiers.grading.answers import (
    after_thought,
    boxed_answer,
    final_answer,
    gsm8k_answer,
    hash_answer,
    last_number,
    tagged_answers,
)
from postgrad.verifiers.grading.choice import chosen_option
from postgrad.verifiers.grading.equality import MAX_ANSWER, drop_name, normalize, split_unit
from postgrad.verifiers.grading.numbers import number
from postgrad.verifiers.table import choose

Extractor = Callable[[str, Problem], str | None]


def _after_thinking(response: str, problem: Problem) -> str | None:
    _, *after = response.split("</think>", 2)
    return final_answer(after[0]) if after else None


# The answers of other verifiers cannot be extracted here, so their sets have no maj@k.
EXTRACTORS: dict[str, Extractor] = {
    "exact": lambda response, problem: response.strip() or None,
    "numeric": lambda response, problem: last_number(response),
    "boxed": lambda response, problem: boxed_answer(response),
    "gsm8k": lambda response, problem: gsm8k_answer(response)[0],
    "gsm8k_strict": lambda response, problem: hash_answer(response),
    "gsm8k_flexible": lambda response, problem: last_number(response),
    "choice": chosen_option,
    "r1_zero": lambda response, problem: next(iter(tagged_answers(response)[1]), None),
    "math": lambda response, problem: boxed_answer(response),
    "math_answer": lambda response, problem: final_answer(response),
    "oat": lambda response, problem: boxed_answer(after_thought(response)),
    "think_math": _after_thinking,
    "r1_zero_math": lambda response, problem: next(iter(tagged_answers(response)[1]), None),
}


def vote(verifier: str, response: str, problem: Problem) -> str | None:
    """Return the normalized answer of a response, or None if it has none.

    Equal answers become equal strings: 1,234.0 and 1234, \\dfrac12 and 1/2, or x=5 and 5.
    """
    extract = EXTRACTORS.get(verifier)
    answer = extract(response, problem) if extract else None
    if not answer:
        return None
    if verifier == "exact" or len(answer) > MAX_ANSWER:
        return answer
    without_unit = split_unit(drop_name(answer))[0]
    value = number(without_unit)
    if value is not None:
        return str(value)
    return normalize(without_unit) or answer


def can_vote(verifier: str) -> bool:
    """Return whether the answers of this verifier's responses can be extracted."""
    return verifier in EXTRACTORS


def extract_answer(response: str, problem: Problem, verifier: str = "auto") -> str | None:
    """Return the final answer of a response, as its verifier reads it; None if it has none.

    Equal answers are equal strings, so they can be counted: 1,234.0 and 1234, or x=5 and 5. Whether
    the answer is right plays no part, so the problem needs no ground truth.

    Args:
        response: the text of the response.
        problem: gives the verifier for `auto`, and the options of a multiple choice.
        verifier: as the setting reward.verifier. Of a sum the first term that compares answers
            counts.

    Raises:
        ConfigError: the verifier does not compare answers, such as a function of your own, or
            `auto` knows none for the problem.
    """
    terms = [term.name for term in parse_reward(verifier).terms]
    names = [choose(problem) if term == "auto" else term for term in terms]
    for name in names:
        if can_vote(name):
            return vote(name, response, problem)
    raise Unsupported(
        f"reward.verifier={verifier} does not say how the answer is extracted from a response; "
        f"use one of {', '.join(EXTRACTORS)}"
    )
