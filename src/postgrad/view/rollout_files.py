"""Reads one step's parquet file of rollouts: its rows without tokens, and groups with tokens.

Only the columns and row groups that a request needs are read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from postgrad.view.reader import open_parquet, round_number
from postgrad.view.tokens import TokenDecoder

pc: Any = pyarrow.compute  # its functions are created at import, so type checkers do not know them
SNIPPET = 240  # characters of a response in lists
MAX_QUESTION = 400  # characters of a question in lists
MAX_TOKENS = 3000  # of one response, unless all are requested
MAX_TEXT = 200_000  # characters of one text column
MAX_ITEMS = 200  # of a list or an object in an extra column
# Columns with a fixed meaning; the page shows all others below the response.
STANDARD_COLUMNS = {
    "prompt",
    "response",
    "images",
    "uid",
    "group",
    "index",
    "source",
    "finish",
    "text",
    "question",
    "failure",
    "reward",
}


@dataclass
class StepRows:
    """The rows of one step without their tokens.

    Attributes:
        rows: one object per row, as the page's list shows it.
        texts: the column of responses, if the file has it.
        questions: the column of questions, if the file has it.
    """

    rows: list[dict[str, Any]]
    texts: "pa.ChunkedArray | None"
    questions: "pa.ChunkedArray | None"


def read_step(file: Path) -> StepRows:
    """Read the row columns of a step, with response lengths and mean advantages."""
    opened = open_parquet(file)
    schema = opened.schema_arrow
    row_columns = [column.name for column in schema if not pa.types.is_nested(column.type)]
    token_lists = [name for name in ("response", "advantages") if name in schema.names]
    table = opened.read(columns=[*row_columns, *token_lists])
    count = table.num_rows

    lengths: list[Any] = [0] * count
    if "response" in token_lists:
        lengths = pc.list_value_length(table["response"]).to_pylist()
    advantages: list[float | None] = [None] * count
    if "advantages" in token_lists:
        advantages = row_means(table["advantages"])
    rows = table.select(row_columns).to_pylist()
    return StepRows(
        [_list_row(i, rows[i], lengths[i] or 0, advantages[i]) for i in range(count)],
        table["text"] if "text" in row_columns else None,
        table["question"] if "question" in row_columns else None,
    )


def _list_row(i: int, row: dict[str, Any], length: int, advantage: float | None) -> dict[str, Any]:
    """Return row `i` of a file as the page's list shows it."""
    return {
        "row": i,
        "group": row.get("group", i),
        "index": row.get("index", 0),
        "uid": str(row.get("uid") or ""),
        "source": str(row.get("source") or ""),
        "finish": str(row.get("finish") or ""),
        "failure": str(row.get("failure") or ""),
        "question": str(row.get("question") or "")[:MAX_QUESTION],
        "snippet": str(row.get("text") or "")[:SNIPPET],
        "reward": round_number(row.get("reward")),
        "parts": _reward_parts(row),
        "length": length,
        "advantage": advantage,
    }


def _reward_parts(row: dict[str, Any]) -> dict[str, float | None]:
    return {
        name.removeprefix("reward/"): round_number(value)
        for name, value in row.items()
        if name.startswith("reward/")
    }


def add_texts(file: Path, rows: list[dict[str, Any]], decoder: TokenDecoder) -> None:
    """Fill in question and snippet from token ids, for steps that were not scored."""
    table = read_rows(file, [row["row"] for row in rows], ["prompt", "response"])
    for i, row in enumerate(rows):
        prompt = table["prompt"][i].as_py()[-SNIPPET:]
        response = table["response"][i].as_py()[:SNIPPET]
        row["question"] = "".join(decoder.decode_each(prompt))
        row["snippet"] = "".join(decoder.decode_each(response))[:SNIPPET]


def read_rows(file: Path, numbers: Sequence[int], columns: list[str] | None = None) -> pa.Table:
    """Return rows with all columns or the named ones, from the row groups that hold them."""
    opened = open_parquet(file)
    low = min(numbers)
    high = max(numbers)
    row_groups: list[int] = []
    first_row = 0  # number of the first row of the first row group that is read
    start = 0
    for number in range(opened.metadata.num_row_groups):
        end = start + opened.metadata.row_group(number).num_rows
        if start <= high and low < end:
            if not row_groups:
                first_row = start
            row_groups.append(number)
        start = end
    table = opened.read_row_groups(row_groups, columns=columns)
    return table.take(pa.array([number - first_row for number in numbers]))


def find_token_columns(table: pa.Table) -> set[str]:
    """Columns with one number per response token in every row.

    A classmate's scores and the rewards of turns are left out: their number may equal that of the
    tokens by chance.
    """
    if "response" not in table.column_names:
        return set()
    num_tokens = pc.list_value_length(table["response"]).to_pylist()
    names: set[str] = set()
    for column in table.schema:
        if column.name in STANDARD_COLUMNS or column.name.startswith(("classmate", "turn_")):
            continue
        if not (pa.types.is_list(column.type) and _is_numeric(column.type.value_type)):
            continue
        lengths = pc.list_value_length(table[column.name]).to_pylist()
        pairs = zip(lengths, num_tokens, strict=True)
        if all(length is None or length == expected for length, expected in pairs):
            names.add(column.name)
    return names


def _is_numeric(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def trajectory_of(
    table: pa.Table, i: int, token_columns: set[str], decoder: TokenDecoder | None, full: bool
) -> dict[str, Any]:
    """One trajectory as the page shows it: token texts, token columns, and all other columns.

    Args:
        table: rows with all columns.
        i: number of the row in the table.
        token_columns: names from find_token_columns.
        decoder: the run's tokenizer, if there is one.
        full: return all tokens instead of the first MAX_TOKENS.
    """
    row = {name: table[name][i].as_py() for name in table.column_names if name != "prompt"}
    ids = row.get("response") or []
    limit = len(ids) if full else MAX_TOKENS
    tokens: dict[str, list[Any]] = {}
    others: dict[str, Any] = {}
    for name, value in row.items():
        if name in STANDARD_COLUMNS or name.startswith("reward/"):
            continue
        if name in token_columns:
            tokens[name] = [_round_token_value(item) for item in (value or [])[:limit]]
        elif value not in (None, "", []):
            others[name] = _json_value(value)
    return {
        "row": i,
        "index": row.get("index", i),
        "source": row.get("source") or "",
        "finish": row.get("finish") or "",
        "failure": row.get("failure") or "",
        "reward": round_number(row.get("reward")),
        "parts": _reward_parts(row),
        "text": (row.get("text") or "")[:MAX_TEXT],
        "length": len(ids),
        "ids": ids[:limit],
        "texts": decoder.decode_each(ids[:limit]) if decoder else None,
        "tokens": tokens,
        "others": others,
    }


def row_means(column: pa.ChunkedArray) -> list[float | None]:
    """Return the mean of each row's list; None for an empty list."""
    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    flat = np.asarray(pc.fill_null(pc.list_flatten(array), 0.0), dtype=float)
    lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0), dtype=int)
    cumulative = np.concatenate([[0.0], np.cumsum(np.nan_to_num(flat))])
    ends = np.cumsum(lengths)
    sums = cumulative[ends] - cumulative[ends - lengths]
    means: list[float | None] = []
    for total, length in zip(sums.tolist(), lengths.tolist(), strict=True):
        means.append(round_number(total / length) if length else None)
    return means


def _round_token_value(value: Any) -> float | int | None:
    if isinstance(value, int):  # also a bool
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.4g}")
    return None


def _json_value(value: Any) -> Any:
    """Return a value of any column in a form that JSON can hold.

    Long texts and lists are shortened.
    """
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if isinstance(value, list):
        return [_json_value(item) for item in value[:MAX_ITEMS]]
    if isinstance(value, dict):
        items = list(value.items())[:MAX_ITEMS]
        return {str(key): _json_value(item) for key, item in items}
    if isinstance(value, float):
        return round_number(value)
    return value if isinstance(value, int | bool | None) else str(value)
