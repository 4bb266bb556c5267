"""Reward functions of the CS336 assignment: (response, ground_truth, fast=True) -> rewards.

Each returns format_reward, answer_reward and reward, 0 or 1. Format and answer together give
the assignment's four classes. The scores come from training's verifiers (docs/rewards.md).
"""

import atexit
from functools import cache

from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.pool import VerifierPool

TIMEOUT_S = 5.0  # time limit for the symbolic comparison of one response

Truth = str | float | list[str | float] | tuple[str | float, ...]


def r1_zero_reward_fn(response: str, ground_truth: Truth, fast: bool = True) -> dict[str, float]:
    """Scores a response in the form `</think> <answer>...</answer>`.

    `reward` is 1 when both format and answer are right. If `ground_truth` is a list, one of
    its items must match. Answers whose text differs are compared by sympy, with the assignment's
    limits; with `fast=False`, by math-verify. Both run in a child process with a time limit; a
    timeout counts as a wrong answer.

    Raises: ValueError for a ground truth that cannot be compared, such as an empty one.
    """
    return _reward("r1_zero" if fast else "r1_zero_math", response, ground_truth)


def question_only_reward_fn(
    response: str, ground_truth: Truth, fast: bool = True
) -> dict[str, float]:
    """Scores a response whose answer is in a closed \\boxed{...}; else like r1_zero_reward_fn."""
    return _reward("question_only" if fast else "math", response, ground_truth)


def _reward(verifier: str, response: str, ground_truth: Truth) -> dict[str, float]:
    truths = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not truths or not all(isinstance(truth, str | int | float) for truth in truths):
        raise ValueError(
            f"ground truth is {ground_truth!r}; give a string, a number or a list of them"
        )
    items = [(response, Problem("toolkit", (), str(truth))) for truth in truths]
    verdicts = _pool().verify(items, [verifier] * len(items))
    for verdict in verdicts:
        if isinstance(verdict, Failure) and verdict.kind == "invalid":
            raise ValueError(verdict.reason)
    scores = [verdict for verdict in verdicts if isinstance(verdict, Score)]
    return {
        "format_reward": max((score.parts["format"] for score in scores), default=0.0),
        "answer_reward": max((score.parts["answer"] for score in scores), default=0.0),
        "reward": max((score.value for score in scores), default=0.0),
    }


@cache
def _pool() -> VerifierPool:
    """Return the shared pool; its child process starts at first use and ends with this process."""
    pool = VerifierPool(1, TIMEOUT_S)
    atexit.register(pool.close)
    return pool
