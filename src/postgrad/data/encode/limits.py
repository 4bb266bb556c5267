"""Prompts and responses that are longer than their limits: refused, dropped or truncated."""

from collections.abc import Sequence

from postgrad.errors import TooLarge
from postgrad.problem import Problem, problem_label


def indices_within(
    problems: Sequence[Problem],
    lengths: Sequence[int],
    what: str,
    key: str,
    limit: int,
    overlong: str,
) -> list[int]:
    """Return the indices of the problems within the limit.

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
        raise TooLarge(
            f"{len(too_long)} of {len(problems)} {what} are longer than {key}={limit}, "
            f"the first is {problem_label(problems[first])} with {lengths[first]} tokens; {fix}",
            at=key,
        )
    return [i for i, length in enumerate(lengths) if length <= limit]


def truncate(
    ids: Sequence[int], limit: int, side: str, num_start: int = 0, num_end: int = 0
) -> list[int]:
    """Return at most `limit` of the ids.

        left    keeps the first num_start ids and the last limit - num_start
        middle  keeps the first limit // 2 and the last limit - limit // 2
        right   keeps the first limit - num_end and the last num_end

    Args:
        ids: token ids of a prompt.
        limit: most ids to return.
        side: where ids are removed: left, middle or right.
        num_start: ids to keep at the beginning: a BOS token.
        num_end: ids to keep at the end: the tokens that open the assistant's turn.
    """
    if len(ids) <= limit:
        return list(ids)
    num_last = {"left": limit - num_start, "middle": limit - limit // 2, "right": num_end}[side]
    return [*ids[: limit - num_last], *ids[len(ids) - num_last :]]


def min_limit(side: str, num_start: int, num_end: int) -> int:
    """Return the smallest limit that keeps both ends and one token of the prompt between them."""
    if side == "middle":
        return 2 * max(num_start, num_end) + 1
    return num_start + num_end + 1
