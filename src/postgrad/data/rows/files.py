"""Reads data files as rows. Each reader yields (location, row).

The location says where the row is in its file ("line 3"); the row maps column names to values.
"""

import codecs
import csv
import difflib
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import pyarrow as pa
import pyarrow.parquet as parquet

from postgrad.errors import (
    Conflict,
    Damaged,
    Missing,
    TooLarge,
    Unreadable,
    Unsupported,
    first_line,
)

Rows = Iterator[tuple[str, dict[str, Any]]]

# PATH, then the columns to rename; a name has no slash, so that a URL or a folder is none.
RENAMED = re.compile(r"(.+?)((?::[^:=/\\]+=[^:=/\\]+)+)", re.DOTALL)
ARROW_FILE = b"ARROW1"  # the first bytes of an Arrow file; a stream has no such mark
# Rows of a parquet file that are Python objects at the same time, and their bytes.
BATCH = 1000
BATCH_BYTES = 1 << 26
# Files beside the .arrow files that datasets' save_to_disk writes.
DATASETS_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
SPLIT_NAME = re.compile(rf"({'|'.join(SPLITS)})[-_.]")

# Columns that are JSON in a csv file, as `postgrad data export` writes them. Messages and
# reward_model are JSON text in files of other formats, too: the shapes read them.
JSON_COLUMNS = (
    *("extra_info", "target", "tools", "images", "choices", "options", "history"),
    *("responses", "finishes", "lengths"),
)
# MMLU's csv files have no header. A first line of six fields that ends in a letter is one of them.
MMLU_COLUMNS = ["question", "A", "B", "C", "D", "answer"]
MAX_LINE = 1 << 27  # bytes; also of a csv field, for which the csv module allows 128 KiB
PEEK = 4096  # bytes that show whether a .json file is an array


def read_rows(path: Path) -> Rows:
    """Yield the rows of one file; its extension says the format.

    Raises:
        ConfigError: the file is missing, has an unknown extension, or is not in the format of its
            extension. The message is one line and names the row.
    """
    if not exists(path):
        raise Unreadable(missing_file_message(path))
    if not path.is_file():
        raise Unreadable(f"{path}: a pipe, device or folder, not a file; write the rows to a file")
    read = READERS.get(extension(path))
    if read is None:
        raise Unsupported(
            f"{path}: unknown extension {path.suffix or '(none)'}; "
            f"data files end in {', '.join(READERS)}"
        )
    try:
        yield from read(path)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        kind = extension(path).removeprefix(".")
        raise Unreadable(
            f"{path}: not a readable {kind} file ({first_line(error)}); write it again, or check "
            "its permissions"
        ) from error


def extension(path: Path) -> str:
    """Return the known extension of a file, or "": `.jsonl.gz` for x.jsonl.gz."""
    name = path.name.lower()
    return next((known for known in READERS if name.endswith(known)), "")


def exists(path: Path) -> bool:
    """Return whether a path exists; False for text that cannot be one (a list of sources)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def split_columns(source: str) -> tuple[str, dict[str, str]]:
    """Return (path, new names of columns by their old ones) of `PATH:COLUMN=NEW_NAME:...`.

    A path that exists as it is written has no such names, whatever it contains.
    """
    match = RENAMED.fullmatch(source)
    if match is None or exists(Path(source).expanduser()):
        return source, {}
    columns: dict[str, str] = {}
    for part in match[2].removeprefix(":").split(":"):
        old, _, new = part.partition("=")
        columns[old] = new
    return match[1], columns


def data_files(path: Path) -> list[Path]:
    """Return the files that a path means: a file, a folder's files, or those of a split.

    `FOLDER/train` means FOLDER/train-*.parquet and the like, where there is no such file or folder.
    """
    if exists(path):
        return files_in(path) if path.is_dir() else [path]
    if path.name in SPLITS and exists(path.parent) and path.parent.is_dir():
        files = [file for file in path.parent.iterdir() if split_of(file) == path.name]
        return sorted(file for file in files if extension(file)) or [path]
    return [path]


def split_of(file: Path) -> str:
    """Return the split that a file is named after, as train-00000-of-00004.parquet; or ""."""
    match = SPLIT_NAME.match(file.name)
    return match[1] if match else ""


def files_in(folder: Path) -> list[Path]:
    """Return the data files of a folder, sorted by name.

    A folder that datasets saved names its files; others in it are cached results of `map`. Raises
    ConfigError if there are none, if they are of several splits, or the same in two formats.
    """
    if names := _saved_files(folder):
        return [folder / name for name in names]
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        is_data = path.is_file() and extension(path) and path.name not in DATASETS_FILES
        if is_data and not path.name.startswith("."):
            files.append(path)
    splits = sorted({split_of(file) for file in files} - {""})
    if len(splits) > 1:
        raise Conflict(
            f"{folder}: the folder has files of several splits ({', '.join(splits)}); give one of "
            f"them, such as {folder / splits[-1]}"
        )
    names = sorted(path.name.removesuffix(extension(path)) for path in files)
    for name, following in pairwise(names):
        if name == following:
            raise Conflict(
                f"{folder}: several files are called {name}, in different formats; remove all but "
                "one, or give one file"
            )
    if not files:
        parts = sorted(path.name for path in folder.iterdir() if path.is_dir())
        advice = f"one of its folders ({', '.join(parts[:5])})" if parts else "a file"
        raise Missing(f"{folder}: the folder has no data files; give {advice}")
    return files


def _saved_files(folder: Path) -> list[str]:
    """Return the names of the files in the state.json of datasets' save_to_disk; [] without it."""
    try:
        state = json.loads((folder / "state.json").read_text())
        return [str(file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def missing_file_message(path: Path) -> str:
    """Return the error message for a missing file, with the closest name in its folder."""
    if path.is_symlink():
        return f"{path}: a link to {path.readlink()}, which does not exist; give a data file"
    if not (exists(path.parent) and path.parent.is_dir()):
        return f"{path}: no such file, and no folder {path.parent}; give the path of a data file"
    names = [p.name for p in path.parent.iterdir() if p.is_dir() or extension(p)]
    # Extensions are alike in any two data files, so they only decide between similar names.
    stems = {name.split(".")[0] for name in names}
    similar = difflib.get_close_matches(path.name.split(".")[0], stems, n=3, cutoff=0.5)
    names = [name for name in names if name.split(".")[0] in similar]
    closest = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    hint = f"did you mean {closest[0]}?" if closest else "give a data file"
    return f"{path}: no such file; {hint}"


def _read_parquet(path: Path) -> Rows:
    """Read in batches: a large file does not fit into memory as Python objects."""
    with parquet.ParquetFile(path) as file:
        _check_columns(path, file.schema_arrow.names)
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        row_bytes = sum(group.total_byte_size for group in groups) // (file.metadata.num_rows or 1)
        batch = min(BATCH, max(1, BATCH_BYTES // (row_bytes or 1)))
        yield from _rows_of(file.iter_batches(batch_size=batch))


def _read_arrow(path: Path) -> Rows:
    """Read a stream of record batches, as datasets writes it, or an Arrow file (Feather)."""
    with pa.memory_map(str(path)) as source:
        is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
        source.seek(0)
        reader: Any = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        _check_columns(path, reader.schema.names)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        yield from _rows_of(batches)


def _rows_of(batches: Iterable[Any]) -> Rows:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", row


def _check_columns(path: Path, names: list[str]) -> None:
    """Raise ConfigError if two columns have one name: a row would keep the last one only."""
    for name in names:
        if names.count(name) > 1:
            raise Damaged(f"{path}: two columns are called {name!r}; rename one of them")


def _open(path: Path) -> BinaryIO:
    """Open a file for reading; a compressed one as what it holds."""
    name = path.name.lower()
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path))
    if name.endswith(".zst"):
        return io.BufferedReader(pa.CompressedInputStream(str(path), "zstd"))
    return path.open("rb")


def _read_lines(path: Path, is_limited: bool = True) -> Iterator[str]:
    """Yield the lines of a text file. A small compressed file may hold a line without end."""
    with _open(path) as file:
        number = 0
        while line := file.readline(MAX_LINE + 1 if is_limited else -1):
            number += 1
            if is_limited and len(line) > MAX_LINE:
                raise TooLarge(
                    f"{path}: line {number} is longer than {MAX_LINE >> 20} MiB; "
                    "write one row per line"
                )
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise Damaged(
                    f"{path}: line {number}: not UTF-8 text (byte {line[error.start]:#04x}); "
                    "save the file as UTF-8"
                ) from error


def _read_jsonl(path: Path) -> Rows:
    for number, line in enumerate(_read_lines(path), 1):
        if line.strip():
            place = f"line {number}"
            yield place, _checked_row(path, place, _parse_json(path, place, line))


def _read_json(path: Path) -> Rows:
    """Read one array of objects, or one object per line, which many tools also call .json."""
    with _open(path) as file:
        start = file.read(PEEK).removeprefix(codecs.BOM_UTF8).lstrip()
    if not start.startswith(b"["):
        yield from _read_jsonl(path)
        return
    text = "".join(_read_lines(path, is_limited=False))
    for number, item in enumerate(_parse_json(path, "the array", text), 1):
        yield f"row {number}", _checked_row(path, f"row {number}", item)


def _parse_json(path: Path, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = first_line(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise Damaged(
            f"{path}: {place}: not JSON ({reason}); write one JSON object per line, or an array of "
            "objects in a file that ends in .json"
        ) from error


def _checked_row(path: Path, place: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise Damaged(
            f"{path}: {place}: {type(row).__name__}, not an object; each row must be an object of "
            "columns (a file with one array of them ends in .json)"
        )
    return row


def _read_csv(path: Path) -> Rows:
    """Read a table with commas or tabs, as the extension says, or with semicolons, as its header.

    Raises ConfigError if a row has another number of fields than the header, which would shift
    its texts, or if a quote is not closed, which would join rows.
    """
    csv.field_size_limit(MAX_LINE)
    text = "".join(_read_lines(path))
    usual = "\t" if ".tsv" in extension(path) else ","
    header = text.partition("\n")[0]
    delimiter = next((one for one in (usual, ";", "\t") if one in header), usual)
    quoting = _quoting(text, delimiter)
    lines = io.StringIO(text, newline="")
    records = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    columns: list[str] = []
    number = 0
    try:
        for record in records:
            if not record or (len(record) > 1 and not any(map(str.strip, record))):
                continue
            if not columns:
                is_mmlu = len(record) == len(MMLU_COLUMNS) and record[-1].strip() in tuple("ABCD")
                columns = MMLU_COLUMNS if is_mmlu else record
                _check_columns(path, columns)
                if not is_mmlu:
                    continue
            number += 1
            if len(record) != len(columns):
                raise Damaged(
                    f"{path}: row {number} (line {records.line_num}) has {len(record)} fields, not "
                    f"{len(columns)}; quote fields that hold {delimiter!r} or line breaks"
                )
            row = dict(zip(columns, record, strict=True))
            yield f"row {number}", {name: _csv_value(name, field) for name, field in row.items()}
    except csv.Error as error:
        raise Damaged(
            f"{path}: line {records.line_num}: not csv ({error}); check its quotes"
        ) from error


def _quoting(text: str, delimiter: str) -> Literal[0, 3]:
    """Return how quotes are read: in a table with tabs they may be part of its texts.

    Then each line is a row as wide as the header, and quotes that enclose texts would join rows.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    if delimiter != "\t" or len({line.count("\t") for line in lines}) > 1:
        return csv.QUOTE_MINIMAL
    records = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    is_joined = sum(bool(record) for record in records) < len(lines)
    return csv.QUOTE_NONE if is_joined else csv.QUOTE_MINIMAL


def _csv_value(column: str, text: str) -> Any:
    if column not in JSON_COLUMNS:
        return text
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return text


READERS: dict[str, Callable[[Path], Rows]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".jsonl.zst": _read_jsonl,
    ".json": _read_json,
    ".json.gz": _read_json,
    ".csv": _read_csv,
    ".csv.gz": _read_csv,
    ".tsv": _read_csv,
    ".tsv.gz": _read_csv,
    ".arrow": _read_arrow,
}
