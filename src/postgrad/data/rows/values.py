"""Checked access to the columns of a row: a wrong value raises RowError with a fix."""

import json
import math
from collections.abc import Mapping
from typing import Any

from postgrad.data.rows.columns import UNUSED
from postgrad.errors import did_you_mean

Row = dict[str, Any]


class RowError(ValueError):
    """What is wrong with a row and how to fix it; the caller adds the file and the row number."""


def type_name(value: Any) -> str:
    """Return the type of a value, for error messages: `null` for None."""
    return "null" if value is None else type(value).__name__


def checked_text(value: Any, name: str) -> str:
    """Return the value, if it is a string that can be encoded as UTF-8.

    Otherwise raises RowError.
    """
    if not isinstance(value, str):
        advice = "fill it or remove the row" if value is None else f"write {value!r:.30} as a text"
        raise RowError(f"{name} must be a string, not {type_name(value)}; {advice}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"{name} holds half a surrogate pair at character {error.start}; remove it"
        ) from error
    return value


def text_of(row: Row, name: str) -> str:
    """Return the text of a column; raise RowError if it is missing, not a string, or blank."""
    if name not in row:
        raise RowError(
            f"no column {name}, which the first row has; give every row the same columns"
        )
    if not checked_text(row[name], name).strip():
        raise RowError(f"{name} is empty; fill it or remove the row")
    return row[name]


def is_missing(value: Any) -> bool:
    """Whether a value is null, NaN (which pandas writes for an empty cell), or a blank text."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def truth_of(value: Any, name: str) -> str:
    """Return a ground truth as text: numbers as Python prints them, lists and objects as JSON.

    Whole numbers have no ".0": a column of integers with an empty cell is one of floats in pandas.
    """
    if is_missing(value):
        raise RowError(f"no ground truth: {name} is empty; fill it or remove the row")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    return checked_text(value, name)


def try_json(text: str) -> Any:
    """Return the object or list of a text in JSON; None for other texts."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def user_turn(content: str) -> tuple[dict[str, str], ...]:
    """Messages with one user turn."""
    return ({"role": "user", "content": content},)


def data_source_of(row: Row, default: str) -> str:
    """Return the text of the column data_source, or `default` if the row has none."""
    value = row.get("data_source")
    return default if value is None else checked_text(value, "data_source")


def uid_of(row: Row) -> str:
    """Return the row's own uid, or "" if the file has no column uid."""
    if "uid" not in row:
        return ""
    uid = row["uid"]
    if isinstance(uid, bool) or not isinstance(uid, str | int) or uid == "":
        given = "empty" if uid == "" else type_name(uid)
        raise RowError(
            f"uid must be a string, not {given}; "
            "fill it, or remove the column and uids are made from the content"
        )
    return checked_text(str(uid), "uid")


def rename_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the row with renamed columns, which replace columns of their new names.

    The new name `unused` leaves a column out. `COLUMN.KEY` takes a value out
    of a nested column, which stays in the row.

    Raises:
        RowError: a column or a key does not exist.
    """
    renamed: dict[str, Any] = {}
    for old, new in columns.items():
        renamed[new] = row[old] if old in row else _nested_value(row, old)
    kept = {name: value for name, value in row.items() if name not in columns}
    renamed.pop(UNUSED, None)
    return kept | renamed


def _nested_value(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of `COLUMN.KEY.KEY`; a key of a list is an index from 0. Raises RowError."""
    value: Any = row
    path: list[str] = []
    for key in name.split("."):
        if isinstance(value, str):
            value = try_json(value)
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        if not isinstance(value, Mapping) or key not in value:
            inside = f" in {'.'.join(path)}" if path else ""
            known = value if isinstance(value, Mapping) else {}
            missing = key if path else name
            raise RowError(f"there is no column {missing}{inside}; {did_you_mean(missing, known)}")
        value = value[key]
        path.append(key)
    return value
