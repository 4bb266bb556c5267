"""Verifiers for the form of a response: format, length, emphasis.

They are terms to add to an answer's reward with a weight of their own: `math + 0.1*format`.
"""

import re

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.grading.answers import boxed_answer, tagged_answers

_BOLD = re.compile(r"\*\*(?=\S)[^*\n]{1,2000}\*\*")


def tag_format(response: str, problem: Problem) -> Score | Failure:
    """1 if the response has the form `</think> <answer>...</answer>`, whatever the answer is."""
    return Score(float(tagged_answers(response)[0]))


def box_format(response: str, problem: Problem) -> Score | Failure:
    """1 if the last \\boxed is closed and not empty."""
    return Score(float(bool(boxed_answer(response))))


def think_format(response: str, problem: Problem) -> Score | Failure:
    """1 if a thought that is not empty is closed exactly once and text follows it.

    `<think>` may be there once, at the beginning, or not at all (the prompt may have opened it).
    """
    thought, closing_tag, answer = response.partition("</think>")
    num_openings = thought.count("<think>")
    opens_at_start = num_openings == 1 and thought.strip().startswith("<think>")
    well_formed = (
        bool(closing_tag)
        and bool(thought.replace("<think>", "").strip())
        and (num_openings == 0 or opens_at_start)
        and "think>" not in answer
        and bool(answer.strip())
    )
    return Score(float(well_formed))


def length(response: str, problem: Problem, limit: float = 4000.0) -> Score | Failure:
    """Return the length in characters as a share of `limit`, at most 1; give a negative weight."""
    if not limit > 0:
        return Failure("invalid", f"length(limit={limit:g}): the limit must be above 0")
    return Score(min(len(response) / limit, 1.0), {"characters": float(len(response))})


def overlong(
    response: str, problem: Problem, limit: float = 4000.0, buffer: float = 1000.0
) -> Score | Failure:
    """DAPO's soft length penalty, in characters.

    0 up to limit - buffer, then linear down to -1 at `limit`, and -1 beyond. The penalty in tokens
    of the sampled response is method.overlong_buffer.
    """
    if not 0 < buffer <= limit:
        return Failure(
            "invalid",
            f"overlong(limit={limit:g}, buffer={buffer:g}): the buffer must be above 0 and at most "
            "the limit",
        )
    penalty = (limit - buffer - len(response)) / buffer
    return Score(max(-1.0, min(0.0, penalty)))


def bold(response: str, problem: Problem) -> Score | Failure:
    """Return the number of spans in **bold**, a trait to train towards or away from."""
    return Score(float(len(_BOLD.findall(response))))
