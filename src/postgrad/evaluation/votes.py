"""The answer a response votes for in a majority: found as its verifier finds it, in one spelling."""

from collections.abc import Callable

from postgrad.problem import Problem
from postgrad.verifiers.answers import (
    boxed_answer,
    chosen_option,
    final_answer,
    gsm8k_answer,
    hash_answer,
    last_number,
    tagged_answers,
)
from postgrad.verifiers.equality import MAX_ANSWER, normalize, number, split_unit

Find = Callable[[str, Problem], str | None]


def _after_thinking(response: str, problem: Problem) -> str | None:
    _, *after = response.split("</think>", 2)
    return final_answer(after[0]) if after else None


# Verifiers of other names judge what only they can find, so their sets have no majority.
FINDERS: dict[str, Find] = {
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
    "oat": lambda response, problem: boxed_answer(response.partition("</think>")[2] or response),
    "think_math": _after_thinking,
    "r1_zero_math": lambda response, problem: next(iter(tagged_answers(response)[1]), None),
}


def vote(verifier: str, response: str, problem: Problem) -> str | None:
    """The answer in one spelling: 1,234.0 and 1234 are one vote, so are \\dfrac12 and 1/2. None: no answer, no vote."""
    find = FINDERS.get(verifier)
    found = find(response, problem) if find else None
    if not found or verifier == "exact" or len(found) > MAX_ANSWER:
        return found or None
    bare = split_unit(found)[0]
    value = number(bare)
    return str(value) if value is not None else normalize(bare) or found


def can_vote(verifier: str) -> bool:
    """Whether the answers of this verifier's responses can be told apart."""
    return verifier in FINDERS
