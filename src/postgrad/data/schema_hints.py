"""What to do with the columns of a row that fits no schema, for the error message."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from postgrad.data.csv_rows import NESTED_COLUMNS
from postgrad.data.rows import Row

MAX_SCHEMAS = 4  # that a hint lists
REPLY_FIELDS = {"response", "answer", "text", "completion"}
RENAMES = (
    "rename to prompt and ground_truth, question and answer, prompt and completion, messages, "
    "or prompt, chosen and rejected (FILE:OLD=NEW); see docs/data.md, data prepare"
)


def rename_hint(
    row: Row, schemas: Sequence[tuple[str, tuple[str, ...]]], fits: Callable[[Row], bool]
) -> str:
    """What to rename: a misspelled column, or the columns of the schemas that share most of them.

    Args:
        row: the row.
        schemas: (name, columns) of each known schema.
        fits: whether a row fits one of them.
    """
    known = sorted({column for _, columns in schemas for column in columns})
    for column in map(str, row):
        similar = difflib.get_close_matches(column, known, n=1, cutoff=0.8)
        if similar and similar[0] not in row and _is_fixed(row, column, similar[0], fits):
            shown = column if column == column.strip() else repr(column)
            return f"did you mean {similar[0]} instead of {shown}? (FILE:{column}={similar[0]})"
    if fits({str(column).lower(): value for column, value in row.items()}):
        return "write the names of the columns in lower case (FILE:Answer=answer)"
    for present, missing in (("chosen", "rejected"), ("rejected", "chosen")):
        if present in row and missing not in row:
            return (
                f"a pair needs a column {missing} beside {present}; FILE:COLUMN={missing} names it"
            )
    for column, value in row.items():
        if _are_replies(value):
            return (
                f"{column} holds {len(value)} replies; write one row per pair with chosen and "
                "rejected, or one row per reply with response"
            )
    listed = _nearest(row, schemas)
    if not listed:
        return RENAMES
    return f"rename them (FILE:COLUMN=NEW_NAME) to one of: {'; '.join(listed)}"


def _is_fixed(row: Row, column: str, name: str, fits: Callable[[Row], bool]) -> bool:
    """Whether the row is read with this column under this name, and holds what such a one does.

    A column with a number (`output_1`) is one of several, not a misspelled one.
    """
    if column.rstrip("_0123456789") == name:
        return False
    if isinstance(row.get(column), list | dict) and name not in NESTED_COLUMNS:
        return False
    return fits({name if key == column else key: value for key, value in row.items()})


def _are_replies(value: Any) -> bool:
    """Whether a value is a list of replies with their ratings, as in UltraFeedback and Nectar."""
    if not isinstance(value, list) or len(value) < 2:
        return False
    return all(isinstance(one, dict) and REPLY_FIELDS & one.keys() for one in value)


def _nearest(row: Row, schemas: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """The schemas that share most columns with the row and lack the fewest."""
    sharing: dict[tuple[str, ...], str] = {}
    for name, columns in schemas:
        if set(columns) & row.keys() and set(columns) - row.keys():
            sharing[columns] = name
    ranked = sorted(
        sharing, key=lambda columns: (len(set(columns) - row.keys()), -len(set(columns)))
    )
    return [f"{', '.join(columns)} ({sharing[columns]})" for columns in ranked[:MAX_SCHEMAS]]
