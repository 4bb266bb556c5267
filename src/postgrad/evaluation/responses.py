"""Reads files of responses: problems with one or several responses each, written by any tool.

A row is a problem in any shape that training reads, plus a column of responses: one text, or a
list of texts. Rows of the same problem are joined, so one response per row works too, as in the
result files of `postgrad eval`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postgrad.data.rows.files import extension, read_rows
from postgrad.data.rows.shapes import RowReader
from postgrad.data.rows.values import Row, RowError, checked_text, type_name
from postgrad.data.uid import assign_uids, content_uid
from postgrad.errors import Damaged, Missing
from postgrad.problem import Problem

# Names of the column, tried in this order if none is given.
COLUMNS = ("responses", "response", "generations", "generation", "completions", "predictions")
# Columns of the same length that `postgrad generate` and `postgrad eval` write beside it.
FINISH_COLUMNS = ("finishes", "finish")
LENGTH_COLUMNS = ("lengths", "length")


@dataclass
class Responded:
    """A problem with its responses. `finishes` and `lengths` are empty if the file has none.

    A finish is `stop` or `length`; a length is in tokens.
    """

    problem: Problem
    texts: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


def read_responses(path: str | Path, column: str = "") -> list[Responded]:
    """Return the problems of a file with their responses, in the order of first appearance.

    Args:
        path: a .parquet, .jsonl, .jsonl.gz, .json, .csv or .tsv file.
        column: name of the column of responses; empty: the first of COLUMNS that the file has.

    Raises:
        ConfigError: no such column, a row is no problem, or a response is no text.
    """
    file = Path(path).expanduser()
    stem = file.name[: -len(extension(file))]
    is_csv = extension(file).startswith((".csv", ".tsv"))
    reader = RowReader(stem, file.parent)
    found: dict[str, tuple[str, Responded]] = {}  # key of the problem -> (location, responses)
    for location, row in read_rows(file):
        try:
            name = column or _find_column(row)
            if name not in row:
                raise RowError(f"no column {name}; the columns are {', '.join(row)}")
            rest = {key: value for key, value in row.items() if key != name}
            problem = reader.read(rest)
            texts = _texts(row[name], name, is_csv)
            key = problem.uid or _content_key(problem)
            place = f"{file}: {location}"
            first_place, entry = found.setdefault(key, (place, Responded(problem)))
            if _content_key(entry.problem) != _content_key(problem):
                raise RowError(
                    f"uid {key!r} is already that of another problem, {first_place}; "
                    "make the column uid unique per problem, or remove it"
                )
            entry.texts += texts
            entry.finishes += _extra_values(row, FINISH_COLUMNS, len(texts), str)
            entry.lengths += _extra_values(row, LENGTH_COLUMNS, len(texts), int)
        except RowError as error:
            raise Damaged(f"{file}: {location}: {error}") from error
    if not found:
        raise Missing(f"{file}: no rows; give a file with at least one response")
    problems = [entry.problem for _, entry in found.values()]
    with_uids = assign_uids(problems, [place for place, _ in found.values()])
    entries = [entry for _, entry in found.values()]
    for entry, problem in zip(entries, with_uids, strict=True):
        entry.problem = problem
        if len(entry.finishes) != len(entry.texts):
            entry.finishes = []
        if len(entry.lengths) != len(entry.texts):
            entry.lengths = []
    return entries


def _find_column(row: Row) -> str:
    for name in COLUMNS:
        if name in row:
            return name
    raise RowError(
        f"no column of responses among {', '.join(map(str, row))}; "
        f"name it with responses=COLUMN (known names: {', '.join(COLUMNS)})"
    )


def _texts(value: Any, name: str, is_csv: bool) -> list[str]:
    """Return the responses of a row: one text, a list of texts, or in a csv such a list as JSON."""
    if is_csv and isinstance(value, str) and value.startswith("["):
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        if isinstance(parsed, list) and all(isinstance(item, str) for item in parsed):
            value = parsed
    if isinstance(value, str):
        return [checked_text(value, name)]
    if not isinstance(value, list):
        raise RowError(f"{name} must be a text or a list of texts, not {type_name(value)}")
    if not value:
        raise RowError(f"{name} is an empty list; remove the row")
    return [checked_text(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _extra_values(row: Row, names: Sequence[str], count: int, kind: type) -> list[Any]:
    """Values of a column beside the responses, if there are as many as responses."""
    for name in names:
        value = row.get(name)
        values = value if isinstance(value, list) else [value]
        if len(values) == count and all(isinstance(item, kind) for item in values):
            return values
    return []


def _content_key(problem: Problem) -> str:
    return content_uid(problem.data_source, problem.messages, problem.ground_truth, problem.images)
