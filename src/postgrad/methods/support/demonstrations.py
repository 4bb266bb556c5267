"""Demonstrations as tokens and as rows of a group."""

import math

from postgrad.errors import RunError
from postgrad.methods.base import Method, Step
from postgrad.problem import named
from postgrad.types import DEMONSTRATION, Problem, Trajectory


def fitting_traces(method: Method, problem: Problem, step: Step) -> list[list[int]]:
    """The problem's demonstrations as tokens, without those that are too long.

    The step counts the dropped ones. Raises RunError if method.overlong_demonstrations=error.
    """
    limit = method.config.rollout.max_response_tokens
    traces = method.ports.prompts.encode_demonstrations(problem)
    lengths = [len(trace) for trace in traces if len(trace) > limit]
    if lengths and method.settings.overlong_demonstrations == "error":
        raise RunError(
            f"the demonstration of {named(problem)} has {lengths[0]} tokens; raise "
            f"rollout.max_response_tokens (now {limit}) or set "
            "method.overlong_demonstrations=drop"
        )
    step.metrics["demonstration/dropped"] += len(lengths)
    return [trace for trace in traces if len(trace) <= limit]


def whole_demonstration(method: Method, problem: Problem, trace: list[int]) -> Trajectory:
    """A demonstration as a row. Its behavior log-probs are its author's, 0 if not recorded."""
    logprobs = None
    name = method.settings.demonstration_probs
    if name:
        logprobs = [math.log(p + 1e-6) for p in _author_probs(problem, name, len(trace))]
    return Trajectory(
        problem.uid,
        method.ports.prompts.encode(problem),
        trace,
        source=DEMONSTRATION,
        finish="given",
        behavior_logprobs=logprobs,
    )


def _author_probs(problem: Problem, name: str, num_tokens: int) -> list[float]:
    """The author's probability of each token. Raises RunError if their number is wrong."""
    probs = problem.extra.get(name) or []
    if len(probs) != num_tokens:
        raise RunError(
            f"{named(problem)} has {len(probs)} numbers in the column {name} "
            f"(method.demonstration_probs) for {num_tokens} tokens, with the end token; "
            "correct the data"
        )
    return probs
