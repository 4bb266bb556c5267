"""Rows of responses that the data give: pairs of chosen and rejected, labeled responses."""

from collections.abc import Sequence

from postgrad.errors import ConfigError, RunError
from postgrad.methods.base import Method, MethodSettings
from postgrad.problem import named
from postgrad.types import DEMONSTRATION, Problem, Trajectory

PAIR = ("chosen", "rejected")


def is_pair(problem: Problem) -> bool:
    return all(name in problem.extra for name in PAIR)


def check_pairs(method: Method, problems: Sequence[Problem], key: str) -> None:
    """Refuses problems without a chosen and a rejected response. Raises ConfigError."""
    for problem in problems:
        if not is_pair(problem):
            raise ConfigError(
                f"{named(problem)} has no chosen and rejected response; "
                f"{method.settings.name} needs both in every row of {key} "
                "(`postgrad data prepare own kind=pairs` keeps only the rows that have them)"
            )


def has_equal_sides(problem: Problem) -> bool:
    """Whether a problem is a pair whose chosen response is the rejected one."""
    return is_pair(problem) and len({str(problem.extra[name]) for name in PAIR}) == 1


def check_equal_weights(method: Method) -> None:
    """Refuses method.aggregation, which losses over whole responses do not read."""
    aggregation = method.settings.aggregation
    if aggregation != MethodSettings.aggregation:
        raise ConfigError(
            f"method.aggregation={aggregation} has no effect: {method.settings.name} weighs all "
            "rows equally; remove it"
        )


def pair_rows(method: Method, problem: Problem) -> list[Trajectory]:
    """The chosen row, then the rejected one."""
    return [
        given_row(method, problem, str(problem.extra[name]), name, index)
        for index, name in enumerate(PAIR)
    ]


def given_row(method: Method, problem: Problem, text: str, name: str, index: int) -> Trajectory:
    """A response of the data as a row. Raises RunError if it is too long."""
    tokens = method.ports.prompts.encode_reply(problem, text)
    limit = method.config.rollout.max_response_tokens
    if len(tokens) > limit:
        raise RunError(
            f"the {name} response of {named(problem)} has {len(tokens)} tokens; "
            f"raise rollout.max_response_tokens (now {limit})"
        )
    prompt = method.ports.prompts.encode(problem)
    row = Trajectory(problem.uid, prompt, tokens, source=DEMONSTRATION, finish="given")
    row.index = index
    return row
