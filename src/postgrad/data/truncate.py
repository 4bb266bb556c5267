"""Truncates prompts that are longer than the limit: token ids in, token ids out."""

from collections.abc import Sequence


def truncate(
    ids: Sequence[int], limit: int, side: str, num_start: int = 0, num_end: int = 0
) -> list[int]:
    """Returns at most `limit` of the ids.

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
    """The smallest limit that keeps both ends and one token of the prompt between them."""
    if side == "middle":
        return 2 * max(num_start, num_end) + 1
    return num_start + num_end + 1
