"""Copies data files: with a uid column added, or in another format. Values are not changed."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from postgrad.data.problems import load_problems
from postgrad.data.rows.files import extension, read_rows
from postgrad.data.rows.values import Row
from postgrad.errors import (
    Conflict,
    Missing,
    UnknownName,
    Unreadable,
    Unwritable,
    WrongValue,
    did_you_mean,
    first_line,
)
from postgrad.files import atomic_file

FORMATS = (".parquet", ".jsonl", ".csv")


def add_uids(path: Path, out: Path) -> int:
    """Copy a file with `uid` as its first column; return the number of rows.

    The uids are those that a run gives the problems of this file.

    Raises:
        ConfigError: the file already has uids, which are never replaced; or a row is no problem.
    """
    first = next(iter(read_rows(path)), None)
    if first is not None and "uid" in first[1]:
        raise Conflict(
            f"{path} has a column uid already, and uids are never replaced; nothing to do", at="uid"
        )
    uids = [problem.uid for problem in load_problems(str(path))]
    if extension(path) == ".parquet" and extension(out) == ".parquet":
        _add_parquet_column(path, out, uids)
    else:
        rows = (row for _, row in read_rows(path))
        write_rows(out, ({"uid": uid, **row} for uid, row in zip(uids, rows, strict=True)))
    return len(uids)


def _add_parquet_column(path: Path, out: Path, uids: list[str]) -> None:
    """Copy a parquet file with its column types and its metadata."""
    table = parquet.read_table(path)
    with_uids = table.add_column(0, "uid", pa.array(uids, pa.string()))
    with _new_file(out) as temporary:
        parquet.write_table(with_uids, temporary, compression="zstd")


def export(path: Path, out: Path, columns: list[str] | None = None) -> int:
    """Write the rows of a file in the format of `out`; return the number of rows.

    Raises:
        ConfigError: a column does not exist, or `out` cannot be written.
    """
    known: dict[str, None] = {}
    count = 0
    for _, row in read_rows(path):
        known.update(dict.fromkeys(row))
        count += 1
    if not count:
        raise Missing(f"{path}: no rows; give a file with at least one")
    for column in columns or []:
        if column not in known:
            raise UnknownName(
                f"columns: {path} has no column {column}; {did_you_mean(column, known)}"
            )
    names = columns or list(known)
    write_rows(out, ({name: row.get(name) for name in names} for _, row in read_rows(path)))
    return count


def write_rows(out: Path, rows: Iterable[Row]) -> None:
    """Write rows as parquet, jsonl or csv. In csv, nested values are JSON and null is empty."""
    writers: dict[str, Callable[[Path, Iterator[Row]], None]] = {
        ".parquet": _write_parquet,
        ".jsonl": _write_jsonl,
        ".csv": _write_csv,
    }
    kind = extension(out)
    if kind not in writers:
        raise WrongValue(f"out={out} must end in {', '.join(FORMATS)}")
    with _new_file(out) as temporary:
        writers[kind](temporary, iter(rows))


@contextmanager
def _new_file(out: Path) -> Iterator[Path]:
    """Yield the temporary path of an atomic write of `out`; an error names the option out=."""
    if not out.absolute().parent.is_dir():
        raise Unreadable(f"out={out}: no folder {out.parent}; make it first")
    try:
        with atomic_file(out) as temporary:
            yield temporary
    except (OSError, pa.ArrowException) as error:
        raise Unwritable(f"out={out} cannot be written ({first_line(error)})") from error


def _write_parquet(path: Path, rows: Iterator[Row]) -> None:
    parquet.write_table(pa.Table.from_pylist(list(rows)), path, compression="zstd")


def _write_jsonl(path: Path, rows: Iterator[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def _write_csv(path: Path, rows: Iterator[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for number, row in enumerate(rows):
            if number == 0:
                writer.writerow(row)
            writer.writerow([_csv_cell(value) for value in row.values()])


def _csv_cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value
