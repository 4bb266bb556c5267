"""Prompts that are longer than the limit, cut to it: token ids in, token ids out."""

from collections.abc import Sequence


def truncate(
    ids: Sequence[int], limit: int, way: str, start: int = 0, ending: int = 0
) -> list[int]:
    """`limit` of the ids; all of them where there are no more.

        left    the first `start` ids and the last limit - start
        middle  the first limit // 2 and the last limit - limit // 2: of an odd limit the end has one more
        right   the first limit - ending and the last `ending`

    Args:
        way: where ids are left out: left, middle or right.
        start: ids at the beginning that stay: a BOS.
        ending: ids at the end that stay: what opens the model's turn.
    """
    if len(ids) <= limit:
        return list(ids)
    last = {"left": limit - start, "middle": limit - limit // 2, "right": ending}[way]
    return [*ids[: limit - last], *ids[len(ids) - last :]]


def min_limit(way: str, start: int, ending: int) -> int:
    """The smallest limit that leaves start, ending and one token of the prompt itself."""
    return 2 * max(start, ending) + 1 if way == "middle" else start + ending + 1
