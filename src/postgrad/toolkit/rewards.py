"""The course's reward functions: (response, ground_truth, fast=True) -> format_reward, answer_reward and reward, each 0 or 1.

The verifiers of training judge (docs/verifiers.md). The two digits format and answer are the four classes: 00, 01, 10, 11.
"""

import atexit
from functools import cache

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.pool import VerifierPool

TIMEOUT_S = 5.0  # of the algebra of one response

Truth = str | float | list[str | float] | tuple[str | float, ...]


def r1_zero_reward_fn(response: str, ground_truth: Truth, fast: bool = True) -> dict[str, float]:
    """Right form is `</think> <answer>...</answer>`; the reward wants both the form and the answer.

    Without `fast` answers that text cannot decide go to algebra, in a child process with a time limit: what it cannot decide
    in time counts as another answer. Of a list of truths one must match.

    Raises: ValueError for a truth that nothing can be compared with, such as an empty one.
    """
    return _reward("r1_zero" if fast else "r1_zero_math", response, ground_truth)


def question_only_reward_fn(
    response: str, ground_truth: Truth, fast: bool = True
) -> dict[str, float]:
    """For the bare question: right form is a closed \\boxed{...}, whose content is the answer. Else as r1_zero_reward_fn."""
    return _reward("boxed" if fast else "math", response, ground_truth)


def _reward(verifier: str, response: str, ground_truth: Truth) -> dict[str, float]:
    truths = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not truths or not all(isinstance(truth, str | int | float) for truth in truths):
        raise ValueError(
            f"a ground truth is a text, a number or a list of them, not {ground_truth!r}"
        )
    items = [(response, Problem("toolkit", (), str(truth))) for truth in truths]
    verdicts = _pool().verify(items, [verifier] * len(items))
    for verdict in verdicts:
        if isinstance(verdict, Failure) and verdict.kind == "invalid":
            raise ValueError(verdict.reason)
    scores = [verdict for verdict in verdicts if isinstance(verdict, Score)]
    best = {
        name: max((score.parts[name] for score in scores), default=0.0)
        for name in ("format", "answer")
    }
    return {
        "format_reward": best["format"],
        "answer_reward": best["answer"],
        "reward": max((score.value for score in scores), default=0.0),
    }


@cache
def _pool() -> VerifierPool:
    """Its process starts with the first response that needs algebra and ends with this one."""
    pool = VerifierPool(1, TIMEOUT_S)
    atexit.register(pool.close)
    return pool
