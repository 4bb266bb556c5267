"""Files as rows. Each reader yields (place, row): where the row stands in its file, and its columns by name."""

import csv
import difflib
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from postgrad.errors import ConfigError

Rows = Iterator[tuple[str, dict[str, Any]]]

# A csv file without a header whose sixth field is a letter is MMLU's: question, four options, the right letter.
MMLU_COLUMNS = ("question", "A", "B", "C", "D", "answer")
BATCH = 1000  # rows of a parquet file turned into Python objects at once


def read_rows(path: Path) -> Rows:
    """The rows of one file, by its extension.

    Raises:
        ConfigError: the file is missing, has an unknown extension, or is not what its extension says; in one line with the row.
    """
    if not exists(path):
        raise ConfigError(missing(path))
    read = READERS.get(extension(path))
    if read is None:
        raise ConfigError(
            f"{path}: unknown extension {path.suffix or '(none)'}; data files end in {', '.join(READERS)}"
        )
    try:
        yield from read(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({one_line(error)}); check the file and its permissions"
        ) from error


def extension(path: Path) -> str:
    """`.jsonl.gz` for x.jsonl.gz, `.parquet` for x.v2.parquet."""
    name = path.name.lower()
    return next((known for known in READERS if name.endswith(known)), "")


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; False, not an error, for what cannot be a path (a long list of sources)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def missing(path: Path) -> str:
    """The message for a file that is not there: the nearest name in its folder, or that the folder is missing too."""
    if not (exists(path.parent) and path.parent.is_dir()):
        return f"{path}: no such file, and no folder {path.parent}; give the path of a data file"
    neighbors = [p.name for p in path.parent.iterdir() if p.is_dir() or extension(p)]
    near = difflib.get_close_matches(path.name, neighbors, n=1, cutoff=0.5)
    hint = (
        f"did you mean {near[0]}?"
        if near
        else f"nothing in {path.parent.absolute()} has a name like it; give a data file"
    )
    return f"{path}: no such file; {hint}"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _read_parquet(path: Path) -> Rows:
    """Row by row from one batch after the other: as Python objects a large file would not fit into memory."""
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path}: not a readable parquet file ({one_line(error)}); write or download it again"
        ) from error


def count_rows(path: Path) -> int | None:
    """The number of rows, where the file says it without being read."""
    try:
        return parquet.read_metadata(path).num_rows if extension(path) == ".parquet" else None
    except (pa.ArrowException, OSError):
        return None


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    if path.name.lower().endswith(".gz"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(
                f"{path}: not a readable gzip file ({one_line(error)}); compress or download it again"
            ) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: line {line}: not UTF-8 text (byte {data[error.start]:#04x}); save the file as UTF-8"
        ) from error


def _parse(path: Path, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg} at column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else one_line(error)
        )
        raise ConfigError(
            f"{path}: {place}: not JSON ({reason}); write one JSON object a line"
        ) from error


def _objects(path: Path, items: Iterator[tuple[str, Any]]) -> Rows:
    for place, item in items:
        if not isinstance(item, dict):
            raise ConfigError(
                f"{path}: {place}: {type(item).__name__}, not an object; each row must be an object of columns"
            )
        yield place, item


def _read_jsonl(path: Path) -> Rows:
    lines = (
        (f"line {i}", line)
        for i, line in enumerate(io.StringIO(_read_text(path)), 1)
        if line.strip()
    )
    return _objects(path, ((place, _parse(path, place, line)) for place, line in lines))


def _read_json(path: Path) -> Rows:
    """One array of objects; or one object a line, which many tools also call .json."""
    text = _read_text(path)
    if not text.lstrip().startswith("["):
        return _read_jsonl(path)
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not JSON ({one_line(error)}); write one array of objects, or one object a line"
        ) from error
    return _objects(path, ((f"row {i}", item) for i, item in enumerate(items, 1)))


def _read_csv(path: Path) -> Rows:
    csv.field_size_limit(1 << 27)  # a worked solution may be longer than the default of 128 KiB
    records = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    columns: list[str] | None = None
    number = 0
    try:
        for record in records:
            if not record:
                continue
            if columns is None:
                headless = len(record) == len(MMLU_COLUMNS) and record[-1].strip() in (
                    "A",
                    "B",
                    "C",
                    "D",
                )
                columns = list(MMLU_COLUMNS) if headless else record
                if not headless:
                    continue
            number += 1
            if len(record) != len(columns):
                raise ConfigError(
                    f"{path}: row {number} (line {records.line_num}) has {len(record)} fields, not {len(columns)}; "
                    "quote fields that hold commas or line breaks"
                )
            yield f"row {number}", dict(zip(columns, record, strict=True))
    except csv.Error as error:
        raise ConfigError(
            f"{path}: line {records.line_num}: not csv ({one_line(error)}); check its quotes"
        ) from error


READERS: dict[str, Callable[[Path], Rows]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
}
