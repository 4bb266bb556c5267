"""Rewards for the form of a response: format, length, emphasis. Parts to be added to an answer's reward with a weight of their own."""

import re

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.answers import boxed_answer, tagged_answers

_BOLD = re.compile(r"\*\*(?=\S)[^*\n]{1,2000}\*\*")


def tag_format(response: str, problem: Problem) -> Score | Failure:
    """1 when the response has the form `</think> <answer>...</answer>`, whatever the answer is."""
    return Score(float(tagged_answers(response)[0]))


def box_format(response: str, problem: Problem) -> Score | Failure:
    """1 when the last \\boxed is closed and not empty."""
    return Score(float(bool(boxed_answer(response))))


def think_format(response: str, problem: Problem) -> Score | Failure:
    """1 when the thought is closed once and an answer follows: at most one `<think>`, at the beginning, one `</think>`, then text."""
    before, closing, after = response.partition("</think>")
    opened = before.strip().startswith("<think>") or "<think>" not in before
    good = (
        bool(closing)
        and opened
        and before.count("<think>") <= 1
        and "think>" not in after
        and bool(after.strip())
    )
    return Score(float(good))


def length(response: str, problem: Problem, limit: float = 4000.0) -> Score | Failure:
    """The length in characters as a share of `limit`, at most 1. With a negative weight it is a price for length."""
    if not limit > 0:
        return Failure("invalid", f"length(limit={limit:g}): the limit must be above 0")
    return Score(min(len(response) / limit, 1.0), {"characters": float(len(response))})


def overlong(
    response: str, problem: Problem, limit: float = 4000.0, buffer: float = 1000.0
) -> Score | Failure:
    """DAPO's soft penalty by characters: 0 up to limit - buffer, then down in a straight line to -1 at `limit` and beyond.

    By tokens, for the sampled response, it is method.overlong_buffer.
    """
    if not 0 < buffer <= limit:
        return Failure(
            "invalid",
            f"overlong(limit={limit:g}, buffer={buffer:g}): the buffer must be above 0 and at most the limit",
        )
    return Score(max(-1.0, min(0.0, (limit - buffer - len(response)) / buffer)))


def bold(response: str, problem: Problem) -> Score | Failure:
    """How many spans stand in **bold**; a trait that is trained towards or away from."""
    return Score(float(len(_BOLD.findall(response))))
