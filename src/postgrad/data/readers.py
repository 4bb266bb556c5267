"""Reads data files as rows. Each reader yields (location, row).

The location says where the row is in its file ("line 3"); the row maps column names to values.
"""

import difflib
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from postgrad.data.csv_rows import NESTED_COLUMNS, check_columns, read_csv_text
from postgrad.errors import ConfigError

Rows = Iterator[tuple[str, dict[str, Any]]]

# PATH, then the columns to rename; a name has no slash, so that a URL or a folder is none.
RENAMED = re.compile(r"(.+?)((?::[^:=/\\]+=[^:=/\\]+)+)", re.DOTALL)
ARROW_FILE = b"ARROW1"  # the first bytes of an Arrow file; a stream has no such mark
# A file of more rows than bytes, or one that unpacks to this many times its size, is no data.
MIN_SUSPICIOUS_ROWS = 1_000_000
MAX_RATIO = 200
MIN_SUSPICIOUS_BYTES = 64 << 20
BATCH = 1000  # rows of a parquet file that are Python objects at the same time
# Files beside the .arrow files that datasets' save_to_disk writes.
DATASETS_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
SPLIT_NAME = re.compile(rf"({'|'.join(SPLITS)})[-_.]")


def read_rows(path: Path) -> Rows:
    """Yields the rows of one file; its extension says the format.

    Raises:
        ConfigError: the file is missing, has an unknown extension, or is not in the format of its
            extension. The message is one line and names the row.
    """
    if not exists(path):
        raise ConfigError(missing_file_message(path))
    if not path.is_file():
        raise ConfigError(
            f"{path}: a pipe, socket, device or folder, not a file; write the rows to a file"
        )
    read = READERS.get(extension(path))
    if read is None:
        raise ConfigError(
            f"{path}: unknown extension {path.suffix or '(none)'}; "
            f"data files end in {', '.join(READERS)}"
        )
    try:
        yield from read(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({one_line(error)}); check the file and its permissions"
        ) from error


def extension(path: Path) -> str:
    """The known extension of a file, or "": `.jsonl.gz` for x.jsonl.gz."""
    name = path.name.lower()
    return next((known for known in READERS if name.endswith(known)), "")


def exists(path: Path) -> bool:
    """Whether a file or folder exists; False for text that cannot be a path (a list of sources)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def split_columns(source: str) -> tuple[str, dict[str, str]]:
    """(path, new names of columns by their old ones) of `PATH:COLUMN=NEW_NAME:...`.

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
    """The files that a path of the data means: a file, a folder's files, or those of a split.

    `FOLDER/train` means FOLDER/train-*.parquet and the like, where there is no such file or folder.
    """
    if exists(path):
        return files_in(path) if path.is_dir() else [path]
    if path.name in SPLITS and exists(path.parent) and path.parent.is_dir():
        files = [file for file in path.parent.iterdir() if split_of(file) == path.name]
        return sorted(file for file in files if extension(file)) or [path]
    return [path]


def split_of(file: Path) -> str:
    """The split that a file is named after, as train-00000-of-00004.parquet; "" if none."""
    match = SPLIT_NAME.match(file.name)
    return match[1] if match else ""


def files_in(folder: Path) -> list[Path]:
    """The data files of a folder, sorted by name.

    Raises ConfigError if there are none, or if they are of several splits.

    A folder that datasets saved names its files; others in it are cached results of `map`.
    """
    if names := _saved_files(folder):
        return [folder / name for name in names]
    if (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{folder} is a run; its responses become rows with "
            f"`postgrad data from-rollouts {folder} out=FILE.jsonl`"
        )
    files: list[Path] = []
    for path in folder.iterdir():
        is_data = path.is_file() and extension(path) and path.name not in DATASETS_FILES
        if is_data and not path.name.startswith("."):
            files.append(path)
    splits = sorted({split_of(file) for file in files} - {""})
    if len(splits) > 1:
        raise ConfigError(
            f"{folder}: the folder has files of several splits ({', '.join(splits)}); give one of "
            f"them, such as {folder / splits[-1]}"
        )
    names = sorted(path.name.removesuffix(extension(path)) for path in files)
    for name, following in pairwise(names):
        if name == following:
            raise ConfigError(
                f"{folder}: several files are called {name}, in different formats; remove all but "
                "one, or give one file"
            )
    if files:
        return sorted(files)
    parts = sorted(path.name for path in folder.iterdir() if path.is_dir())
    advice = f"give one of its folders ({', '.join(parts[:5])})" if parts else "give a file"
    raise ConfigError(
        f"{folder}: the folder has no data files; "
        f"{advice}, or a folder of .parquet, .jsonl, .json, .csv, .tsv or .arrow files"
    )


def _saved_files(folder: Path) -> list[str]:
    """The names of the data files in the state.json of datasets' save_to_disk; [] without one."""
    try:
        state = json.loads((folder / "state.json").read_text())
        return [str(file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def missing_file_message(path: Path) -> str:
    """The error message for a missing file, with the closest name in its folder."""
    if set("*?") & set(path.name):
        return (
            f"{path}: no such file, and patterns are not expanded; "
            f"give the folder {path.parent}, which reads all of its data files"
        )
    if path.is_symlink():
        return f"{path}: a link to {path.readlink()}, which does not exist; give a data file"
    if not (exists(path.parent) and path.parent.is_dir()):
        return f"{path}: no such file, and no folder {path.parent}; give the path of a data file"
    candidates = [p.name for p in path.parent.iterdir() if p.is_dir() or extension(p)]
    # Extensions are alike in any two data files, so they only decide between similar names.
    stems = {name.split(".")[0] for name in candidates}
    similar = difflib.get_close_matches(path.name.split(".")[0], stems, n=3, cutoff=0.5)
    candidates = [name for name in candidates if name.split(".")[0] in similar]
    closest = difflib.get_close_matches(path.name, candidates, n=1, cutoff=0.5)
    if closest:
        return f"{path}: no such file; did you mean {closest[0]}?"
    folder = path.parent.absolute()
    return f"{path}: no such file; {folder} has no file of a similar name; give a data file"


def one_line(error: Exception) -> str:
    """An error's message in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


def _read_parquet(path: Path) -> Rows:
    """Reads in batches: a large file does not fit into memory as Python objects."""
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            check_columns(path, file.schema_arrow.names)
            _check_num_rows(path, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path}: not a readable parquet file ({one_line(error)}); write or download it again"
        ) from error


def _read_arrow(path: Path) -> Rows:
    """Reads a stream of record batches, as datasets writes it, or an Arrow file (Feather)."""
    number = 0
    try:
        with pa.memory_map(str(path)) as source:
            for batch in _arrow_batches(source):
                check_columns(path, batch.schema.names)
                _check_num_rows(path, number + batch.num_rows)
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path}: not a readable arrow file ({one_line(error)}); write or download it again"
        ) from error


def _arrow_batches(source: Any) -> Iterator[Any]:
    if source.read(len(ARROW_FILE)) == ARROW_FILE:
        reader = pa.ipc.open_file(source)
        for i in range(reader.num_record_batches):
            yield reader.get_batch(i)
        return
    source.seek(0)
    yield from pa.ipc.open_stream(source)


def count_rows(path: Path) -> int | None:
    """The number of rows of a parquet file, from its metadata; None for other files."""
    if extension(path) != ".parquet" or not path.is_file():
        return None
    try:
        return parquet.read_metadata(path).num_rows
    except (pa.ArrowException, OSError):
        return None


def _check_num_rows(path: Path, num_rows: int) -> None:
    """Raise ConfigError for many equal rows: every row of real data has some bytes of its own."""
    if num_rows > max(MIN_SUSPICIOUS_ROWS, path.stat().st_size):
        raise ConfigError(
            f"{path}: {num_rows:,} rows in {path.stat().st_size:,} bytes, so most are equal; "
            "remove the repeated rows"
        )


def _unpack(path: Path, file: Any) -> bytes:
    """Return the unpacked content. Raises ConfigError for a small file with a huge content."""
    limit = max(MIN_SUSPICIOUS_BYTES, MAX_RATIO * path.stat().st_size)
    parts: list[bytes] = []
    num_bytes = 0
    while part := file.read(1 << 20):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > limit:
            raise ConfigError(
                f"{path}: unpacks to over {MAX_RATIO} times its size, so most of it is repeated; "
                "give the unpacked file if it is right"
            )
    return b"".join(parts)


def _read_text(path: Path) -> str:
    name = path.name.lower()
    try:
        if name.endswith(".gz"):
            with gzip.open(path) as file:
                data = _unpack(path, file)
        elif name.endswith(".zst"):
            with pa.CompressedInputStream(str(path), "zstd") as file:
                data = _unpack(path, file)
        else:
            data = path.read_bytes()
    except (EOFError, zlib.error, pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the file, not of its content
            raise
        kind = "gzip" if name.endswith(".gz") else "zstd"
        raise ConfigError(
            f"{path}: not a readable {kind} file ({one_line(error)}); compress or download it again"
        ) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: line {line}: not UTF-8 text (byte {data[error.start]:#04x}); "
            "save the file as UTF-8"
        ) from error


def _parse_json_line(path: Path, location: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = one_line(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        advice = "write one JSON object per line"
        if location == "line 1" and not text.lstrip().startswith("{"):
            advice += f"; the name of a table ends in .csv, not {path.suffix}"
        raise ConfigError(f"{path}: {location}: not JSON ({reason}); {advice}") from error


def _check_objects(path: Path, items: Iterable[tuple[str, Any]]) -> Rows:
    for location, item in items:
        if not isinstance(item, dict):
            advice = "each row must be an object of columns"
            if location == "line 1" and isinstance(item, list):
                advice += "; the name of a file with one array ends in .json"
            raise ConfigError(f"{path}: {location}: {type(item).__name__}, not an object; {advice}")
        yield location, item


def _read_jsonl(path: Path) -> Rows:
    def items() -> Iterator[tuple[str, Any]]:
        for number, line in enumerate(io.StringIO(_read_text(path)), 1):
            if line.strip():
                location = f"line {number}"
                yield location, _parse_json_line(path, location, line)

    return _check_objects(path, items())


def _read_json(path: Path) -> Rows:
    """Reads one array of objects, or one object per line, which many tools also call .json."""
    text = _read_text(path)
    if not text.lstrip().startswith("["):
        _refuse_one_object(path, text)
        return _read_jsonl(path)
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not JSON ({one_line(error)}); "
            "write one array of objects, or one object per line"
        ) from error
    return _check_objects(path, ((f"row {i}", item) for i, item in enumerate(items, 1)))


def _refuse_one_object(path: Path, text: str) -> None:
    """Raises ConfigError if a file is one object that holds the rows, or their columns."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return  # one object per line
    for name, value in whole.items() if isinstance(whole, dict) else ():
        if name in NESTED_COLUMNS:
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            raise ConfigError(
                f"{path}: one object whose {name} is a list of {len(value)} objects; "
                "write that list alone, or one of its objects per line"
            )
    if isinstance(whole, dict) and len(text.splitlines()) > 1:
        raise ConfigError(
            f"{path}: one object over several lines; write an array of objects, "
            "or one object per line"
        )


def _read_csv(path: Path) -> Rows:
    return read_csv_text(path, _read_text(path), default=",")


def _read_tsv(path: Path) -> Rows:
    return read_csv_text(path, _read_text(path), default="\t")


READERS: dict[str, Callable[[Path], Rows]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".jsonl.zst": _read_jsonl,
    ".json": _read_json,
    ".json.gz": _read_json,
    ".csv": _read_csv,
    ".csv.gz": _read_csv,
    ".tsv": _read_tsv,
    ".tsv.gz": _read_tsv,
    ".arrow": _read_arrow,
}
