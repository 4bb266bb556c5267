"""Files of rows as they are: with a uid column added, or in another format. Nothing is interpreted."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from postgrad.data.problems import load_problems
from postgrad.data.readers import extension, one_line, read_rows
from postgrad.data.rows import Row
from postgrad.errors import ConfigError, did_you_mean
from postgrad.files import atomic_file

FORMATS = (".parquet", ".jsonl", ".csv")


def add_uids(path: Path, out: Path) -> int:
    """Copy a file with a column `uid` as its first: the uids that a run gives its problems. Returns the number of rows.

    Raises:
        ConfigError: the file has uids already, which are never replaced; or a row is no problem.
    """
    first = next(iter(read_rows(path)), None)
    if first is not None and "uid" in first[1]:
        raise ConfigError(
            f"{path} has a column uid already, and uids are never replaced; nothing to do"
        )
    uids = [problem.uid for problem in load_problems(str(path))]
    if (
        extension(path) == ".parquet" and extension(out) == ".parquet"
    ):  # keeps the types and what the file says of itself
        table = parquet.read_table(path)
        column = pa.array(uids, pa.string())
        with _new_file(out) as temporary:
            parquet.write_table(table.add_column(0, "uid", column), temporary, compression="zstd")
    else:
        write_rows(
            out, ({"uid": uid, **row} for uid, (_, row) in zip(uids, read_rows(path), strict=True))
        )
    return len(uids)


def export(path: Path, out: Path, columns: list[str] | None = None) -> int:
    """Write the rows of a file in the format of `out`'s name. Returns their number.

    Raises:
        ConfigError: a column is not there, or `out` cannot be written.
    """
    known: dict[str, None] = {}
    count = 0
    for _, row in read_rows(path):
        known.update(dict.fromkeys(row))
        count += 1
    if not count:
        raise ConfigError(f"{path}: no rows; give a file with at least one")
    for column in columns or []:
        if column not in known:
            raise ConfigError(
                f"columns: {path} has no column {column}; {did_you_mean(column, known)}"
            )
    chosen = columns or list(known)
    write_rows(out, ({name: row.get(name) for name in chosen} for _, row in read_rows(path)))
    return count


def write_rows(out: Path, rows: Iterable[Row]) -> None:
    """Rows as parquet, jsonl or csv, by the name's ending. In csv nested values are JSON and null is empty."""
    writers: dict[str, Callable[[Path, Iterator[Row]], None]] = {
        ".parquet": _parquet,
        ".jsonl": _jsonl,
        ".csv": _csv,
    }
    kind = extension(out)
    if kind not in writers:
        raise ConfigError(f"out={out} must end in {', '.join(FORMATS)}")
    with _new_file(out) as temporary:
        writers[kind](temporary, iter(rows))


@contextmanager
def _new_file(out: Path) -> Iterator[Path]:
    """Yields the temporary path of an atomic write of `out`; an error names the option out=."""
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"out={out}: no folder {out.parent}; make it first")
    try:
        with atomic_file(out) as temporary:
            yield temporary
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"out={out} cannot be written ({one_line(error)})") from error


def _parquet(path: Path, rows: Iterator[Row]) -> None:
    parquet.write_table(pa.Table.from_pylist(list(rows)), path, compression="zstd")


def _jsonl(path: Path, rows: Iterator[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def _csv(path: Path, rows: Iterator[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for number, row in enumerate(rows):
            if number == 0:
                writer.writerow(row)
            writer.writerow([_cell(value) for value in row.values()])


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return (
        json.dumps(value, ensure_ascii=False, default=str)
        if isinstance(value, list | dict)
        else value
    )
