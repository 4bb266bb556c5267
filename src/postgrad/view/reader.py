"""The one way to read files of a run folder: within limits, whoever wrote the folder.

A file beyond a limit raises Unreadable, and the page shows its run as "cannot be read: why".
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import yaml

from postgrad import errors
from postgrad.errors import first_line
from postgrad.files import open_regular_file

if TYPE_CHECKING:
    import pyarrow.parquet as pq

MAX_BYTES = 1 << 24  # of a file that is read whole, and of a line
MAX_YAML_BYTES = 1 << 20
MAX_YAML_EVENTS = 50_000
MAX_DEPTH = 40  # levels of objects and lists
MAX_KEYS = 20_000  # of all objects of a file, or of a line, together
MAX_KEY_LENGTH = 1000  # characters
MAX_DIGITS = 18  # of an integer; a longer one becomes a float
MAX_ROWS = 200_000  # of a parquet file
MAX_VALUES = 1 << 27  # of one column of a parquet file
YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Unreadable(errors.Unreadable):
    """A file that cannot be read; `file` is its name without folders, `why` a clause."""

    def __init__(self, file: Path, why: str) -> None:
        super().__init__(f"{file} cannot be read: {why}")
        self.file = file.name
        self.why = why


def open_file(file: Path) -> BinaryIO:
    """Open a regular file. Raises Unreadable, or FileNotFoundError."""
    try:
        return open_regular_file(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(file, error.strerror or type(error).__name__) from error


def read_bytes(file: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file. Raises Unreadable, or FileNotFoundError."""
    with open_file(file) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise Unreadable(file, f"it is larger than {max_bytes >> 20} MiB")
    return content


def read_end(file: Path, num_bytes: int) -> list[bytes]:
    """Return the lines in the last bytes of a file; the first may be incomplete."""
    with open_file(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - num_bytes))
        return stream.read(num_bytes).splitlines()


def read_lines(file: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the lines from an offset on, with their ends; the last may be incomplete.

    Raises Unreadable, or FileNotFoundError.
    """
    with open_file(file) as stream:
        stream.seek(start)
        while line := stream.readline(MAX_BYTES):
            if len(line) == MAX_BYTES and not line.endswith(b"\n"):
                raise Unreadable(file, f"a line is longer than {MAX_BYTES >> 20} MiB")
            yield line


def parse_json(raw: bytes, file: Path) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is none, and Unreadable."""
    try:
        value = json.loads(raw, parse_int=_read_integer)
    except RecursionError as error:
        raise Unreadable(file, _too_deep()) from error
    _check_value(value, file)
    return value


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises Unreadable, or FileNotFoundError."""
    try:
        value = parse_json(read_bytes(file), file)
    except ValueError as error:
        raise Unreadable(file, f"it is not JSON ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise Unreadable(file, "it is not a JSON object")
    return value


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; {} for an empty one.

    Aliases are refused: nested ones stand for more values than memory holds, and a resolved
    configuration has none. Raises Unreadable, or FileNotFoundError.
    """
    content = read_bytes(file, MAX_YAML_BYTES)
    try:
        _check_yaml(content, file)
        value = yaml.load(content, Loader=_Loader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise Unreadable(file, f"it is not YAML ({first_line(error)})") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Unreadable(file, "it is not a YAML mapping")
    _check_value(value, file)
    return value


def open_parquet(file: Path) -> "pq.ParquetFile":
    """Open a parquet file of bounded size. Raises Unreadable, ArrowException or OSError."""
    import pyarrow.parquet as pq

    open_file(file).close()
    opened = pq.ParquetFile(file)
    metadata = opened.metadata
    if metadata.num_rows > MAX_ROWS:
        raise Unreadable(file, f"it has {metadata.num_rows:,} rows, more than {MAX_ROWS:,}")
    for column in range(metadata.num_columns):
        groups = [metadata.row_group(i).column(column) for i in range(metadata.num_row_groups)]
        if sum(group.num_values for group in groups) > MAX_VALUES:
            raise Unreadable(file, f"a column has more than {MAX_VALUES:,} values")
    return opened


def round_number(value: Any) -> float | None:
    """Six significant digits; None for anything that is not a finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


class _Loader(YAML_LOADER):
    """Reads plain values; an integer of many digits becomes a float."""


def _construct_integer(loader: Any, node: Any) -> int | float:
    if len(node.value) > MAX_DIGITS:
        return _read_integer(node.value.replace("_", ""))
    return loader.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_integer)


def _read_integer(text: str) -> int | float:
    return int(text) if len(text) <= MAX_DIGITS else float(text)


def _check_yaml(content: bytes, file: Path) -> None:
    """Raise Unreadable for what a loader would need too much time, memory or stack for."""
    depth = 0
    for count, event in enumerate(yaml.parse(content, Loader=YAML_LOADER)):
        if isinstance(event, yaml.AliasEvent):
            raise Unreadable(file, "it has YAML aliases")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise Unreadable(file, _too_deep())
        if count > MAX_YAML_EVENTS:
            raise Unreadable(file, f"it has more than {MAX_YAML_EVENTS:,} values")


def _check_value(value: Any, file: Path) -> None:
    """Raise Unreadable for many or long keys, many levels, and values that JSON cannot hold."""
    num_keys = 0
    waiting = [(value, 1)] if isinstance(value, _NESTED) else []
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise Unreadable(file, _too_deep())
        if isinstance(node, dict):
            num_keys += len(node)
            if num_keys > MAX_KEYS:
                raise Unreadable(file, f"it has more than {MAX_KEYS:,} keys")
            if not all(map(_is_key, node)):
                raise Unreadable(file, "a key is no text, or a very long one")
        elif not isinstance(node, list):
            raise Unreadable(file, f"it has a value of the type {type(node).__name__}")
        children = node.values() if isinstance(node, dict) else node
        waiting += [(child, depth + 1) for child in children if isinstance(child, _NESTED)]


_NESTED = (dict, list, tuple, set, bytes)


def _is_key(key: Any) -> bool:
    return isinstance(key, str | int | float | None) and len(str(key)) <= MAX_KEY_LENGTH


def _too_deep() -> str:
    return f"it has more than {MAX_DEPTH} levels"
