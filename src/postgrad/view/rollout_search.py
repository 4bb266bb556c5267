"""Searches the questions and responses of a step's rollouts for a text."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from postgrad.view.reader import open_parquet, round_number
from postgrad.view.rollout_files import SNIPPET, StepRows, pc


def search_file(file: Path, step: int, query: str) -> list[dict[str, Any]]:
    """Return the rows of one step whose question or response contains the query, without case."""
    opened = open_parquet(file)
    available = opened.schema_arrow.names
    searched = [name for name in ("text", "question") if name in available]
    if not searched:
        return []
    others = [name for name in ("uid", "group", "index", "reward") if name in available]
    table = opened.read(columns=[*searched, *others])
    mask = np.zeros(table.num_rows, dtype=bool)
    for name in searched:
        mask |= _contains(table[name], query)
    return [
        {
            "step": step,
            "group": row.get("group", 0),
            "index": row.get("index", 0),
            "uid": row.get("uid") or "",
            "reward": round_number(row.get("reward")),
            "question": (row.get("question") or "")[:SNIPPET],
            "snippet": text_around(row.get("text") or "", query),
        }
        for row in table.filter(pa.array(mask)).to_pylist()
    ]


def search_step(step: StepRows, query: str) -> set[int] | None:
    """Numbers of the rows whose question, response or uid contains the query.

    None means all rows: the query is empty.
    """
    if not query:
        return None
    numbers = {row["row"] for row in step.rows if query.lower() in str(row["uid"]).lower()}
    for column in (step.texts, step.questions):
        if column is not None:
            numbers |= set(np.flatnonzero(_contains(column, query)).tolist())
    return numbers


def text_around(text: str, query: str) -> str:
    """Return the part of a text around the first match of the query."""
    start = max(0, text.lower().find(query.lower()) - SNIPPET // 3)
    return ("…" if start else "") + text[start : start + SNIPPET]


def _contains(column: "pa.ChunkedArray", query: str) -> np.ndarray:
    matches = pc.match_substring(column, query, ignore_case=True)
    return np.asarray(pc.fill_null(matches, False))
