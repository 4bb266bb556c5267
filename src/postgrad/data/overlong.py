"""Drops or refuses problems whose prompts or responses are too long."""

from collections.abc import Sequence
from typing import Protocol

from postgrad.errors import ConfigError
from postgrad.problem import Problem, named


class RowEncoder(Protocol):
    """Encodes the prompts of a method's rows and drops problems that are too long."""

    def encode(self, problem: Problem) -> list[int]: ...

    def response_length(self, problem: Problem) -> int: ...

    def num_truncated(self, problems: Sequence[Problem]) -> int: ...

    def drop_overlong(self, problems: Sequence[Problem]) -> tuple[list[Problem], int]: ...

    def drop_overlong_demonstrations(
        self, problems: Sequence[Problem], limit: int
    ) -> tuple[list[Problem], int]: ...


def drop_longer(
    problems: Sequence[Problem],
    lengths: Sequence[int],
    what: str,
    key: str,
    limit: int,
    overlong: str,
) -> tuple[list[Problem], int]:
    """(problems within the limit, number dropped).

    Args:
        problems: the problems.
        lengths: tokens of each problem.
        what: what is measured, for the error message.
        key: the setting that holds the limit.
        limit: most tokens.
        overlong: the value of data.overlong; problems are dropped only if it is `drop`.

    Raises:
        ConfigError: one is too long and data.overlong is not drop, or all are too long.
    """
    too_long = [i for i, length in enumerate(lengths) if length > limit]
    dropping = overlong == "drop"
    if too_long and (not dropping or len(too_long) == len(problems)):
        first = too_long[0]
        fix = f"set {key}={max(lengths)}"
        if not dropping:
            fix += " or data.overlong=drop"
        raise ConfigError(
            f"{len(too_long)} of {len(problems)} {what} are longer than {key}={limit}, "
            f"the first is {named(problems[first])} with {lengths[first]} tokens; {fix}"
        )
    dropped = set(too_long)
    return [problem for i, problem in enumerate(problems) if i not in dropped], len(dropped)
