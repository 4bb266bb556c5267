"""Makes a pair of a row with several ranked or rated replies, as Nectar and UltraFeedback have.

Which two replies are compared is a choice: the best and the worst one, or the best one and one of
the others, as Zephyr's data were made.
"""

import math
from collections.abc import Sequence
from typing import Any

from postgrad.data.choices import hash_below
from postgrad.data.rows import Row, RowError

BEST_WORST, BEST_RANDOM = "best_worst", "best_random"
REPLY_FIELDS = ("response", "answer", "text", "completion")
RANK = "rank"  # of 1 is best; of the others, the highest is best
RATINGS = (RANK, "overall_score", "fine-grained_score", "score", "rating", "reward")
# Lists of texts, and the lists of their ratings in a column of their own (distilabel).
TEXT_COLUMNS = ("generations", "responses", "completions", "answers")
RATING_COLUMNS = ("ratings", "rating", "scores", "score", "rewards")


def are_replies(value: Any) -> bool:
    """Whether a value is a list of replies with their ratings, as in UltraFeedback and Nectar."""
    if not isinstance(value, list) or len(value) < 2:
        return False
    return all(
        isinstance(one, dict) and not {"role", "from"} & one.keys() and _text_field(one)
        for one in value
    )


def with_ranked_pair(row: Row, pairs: str, rating: str = "") -> Row:
    """The row with two of its replies as `chosen` and `rejected`, without the list.

    Replies without a rating are left out. Of equally good replies, the first one counts.

    Args:
        row: the columns by name.
        pairs: `best_worst`, or `best_random`: any reply that is worse than the best one. Which one
            depends on the texts only.
        rating: the field or column with the ratings; "" if there is only one.

    Raises:
        RowError: there are no two replies, it is not clear how they are rated, or all are rated
            alike.
    """
    column, texts, values, by_rank = _read_replies(row, rating)
    scores = [_score(value, by_rank) for value in values]
    rated = [(text, score) for text, score in zip(texts, scores, strict=True) if score is not None]
    if len(rated) < 2:
        raise RowError(f"{column} has fewer than two replies with a rating")
    best = max(rated, key=lambda one: one[1])
    worse = [one for one in rated if one[1] < best[1]]
    if not worse:
        raise RowError(f"all replies of {column} are rated alike")
    if pairs == BEST_WORST:
        other = min(worse, key=lambda one: one[1])
    else:
        other = worse[hash_below("\0".join(str(text) for text, _ in rated), len(worse))]
    kept = {name: value for name, value in row.items() if name != column}
    return {**kept, "chosen": best[0], "rejected": other[0]}


def _read_replies(row: Row, rating: str) -> tuple[str, list[Any], list[Any], bool]:
    """(column, texts, their ratings, whether the lowest rating is best)."""
    for column, value in row.items():
        if are_replies(value):
            name = _only_rating([name for name in RATINGS if name in value[0]], rating, column)
            texts = [one.get(_text_field(one)) for one in value]
            return column, texts, [one.get(name) for one in value], name == RANK
    for column in TEXT_COLUMNS:
        texts = row.get(column)
        if not isinstance(texts, list) or len(texts) < 2:
            continue
        lists = [name for name in RATING_COLUMNS if _has_length(row.get(name), len(texts))]
        name = _only_rating(lists, rating, column)
        if not _has_length(row.get(name), len(texts)):
            raise RowError(f"{name} must be a list with one rating for each reply of {column}")
        return column, texts, row[name], False
    raise RowError("no column has a list of replies with their ratings")


def _only_rating(found: Sequence[str], rating: str, column: str) -> str:
    if rating:
        return rating
    if len(found) == 1:
        return found[0]
    if not found:
        raise RowError(f"the replies of {column} have no rating; name its field with rating=NAME")
    raise RowError(
        f"the replies of {column} have several ratings; choose one with rating={found[0]} "
        f"or rating={found[1]}"
    )


def _has_length(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


def _text_field(reply: Row) -> str:
    return next((name for name in REPLY_FIELDS if name in reply), "")


def _score(value: Any, by_rank: bool) -> float | None:
    """A rating as a number, higher for better replies; None if it is missing or no number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if math.isnan(number) or isinstance(value, bool):
        return None
    return -number if by_rank else number
