"""Reads metrics.jsonl incrementally into columns of numbers."""

import json
import math
import os
import threading
from array import array
from pathlib import Path
from typing import Any

from postgrad.view.reader import Unreadable, open_file, parse_json, read_lines

# When a file has this many lines, every second one is dropped, which bounds the memory of any run.
MAX_LINES = 20_000
MAX_NAMES = 1000  # of metrics
SMALL_FILE_BYTES = 1 << 20  # read_sample reads smaller files whole
MAX_LINE_BYTES = 1 << 18  # of the lines that read_sample reads
NAN = float("nan")


class Metrics:
    """The columns of one file.

    `generation` grows when lines that were already returned have changed: read all again.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.generation = 0
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self.kinds: list[str] = []  # filled by _line_kinds
        self.num_lines = 0
        self.offset = 0
        self.stride = 1
        self.inode = None

    def refresh(self) -> "Metrics":
        """Read the appended lines.

        A file that was replaced, as by a run that resumed from a checkpoint, is read from its
        start. Raises Unreadable.
        """
        with self._lock:
            try:
                stat = self.file.stat()
            except OSError:
                if self.num_lines:
                    self.generation += 1
                self._reset()
                return self
            if self.inode not in (None, stat.st_ino) or stat.st_size < self.offset:
                self.generation += 1
                self._reset()
            self.inode = stat.st_ino
            if stat.st_size > self.offset:
                self._read_appended()
        return self

    def _read_appended(self) -> None:
        self.kinds = []
        for raw in read_lines(self.file, self.offset):
            if not raw.endswith(b"\n"):
                return  # the line is still being written
            self._add_line(raw)
            self.offset += len(raw)

    def _add_line(self, raw: bytes) -> None:
        line = parse_line(raw, self.file)
        if line is None or self._is_skipped(line):
            return
        for name, value in line.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            column = self.columns.setdefault(name, array("d"))
            if len(self.columns) > MAX_NAMES:
                raise Unreadable(self.file, f"it has more than {MAX_NAMES} metrics")
            self._pad(column)
            column.append(value)
        self.num_lines += 1
        if self.num_lines >= MAX_LINES:
            self._drop_every_second_line()

    def _is_skipped(self, line: dict[str, Any]) -> bool:
        if self.stride == 1 or is_validation(line):
            return False
        return int(line["step"]) % self.stride != 0

    def _pad(self, column: "array[float]") -> None:
        column.extend([NAN] * (self.num_lines - len(column)))

    def _drop_every_second_line(self) -> None:
        self.generation += 1
        self.stride *= 2
        for name, column in self.columns.items():
            self._pad(column)
            self.columns[name] = column[::2]
        self.num_lines = (self.num_lines + 1) // 2

    def json(self, start: int = 0) -> str:
        """Return {"generation", "from", "count", "columns": {name: [...]}} of lines from `start`.

        A value is null where a line does not have it.
        """
        with self._lock:
            parts: list[str] = []
            for name, column in self.columns.items():
                exact = name in ("time", "step")
                numbers = _format_numbers(column, start, self.num_lines, exact)
                parts.append(f"{json.dumps(name)}:{numbers}")
            columns = ",".join(parts)
            return (
                f'{{"generation":{self.generation},"from":{start},"count":{self.num_lines},'
                f'"columns":{{{columns}}}}}'
            )

    def last(self, name: str) -> float | None:
        """Return the newest value of a column."""
        with self._lock:
            for value in reversed(self.columns.get(name, ())):
                if not math.isnan(value):
                    return value
            return None

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return (steps, values) of a column, as the page draws it.

        NaN stands for lines of the same kind, validations or steps, that lack it between others.
        """
        steps: list[float] = []
        values: list[float] = []
        with self._lock:
            columns = self.columns.get("step", ()), self.columns.get(name, ())
            own_kind = ""  # that of the first line with the metric
            gap: list[float] = []
            for step, value, kind in zip(*columns, self._line_kinds(), strict=False):
                if math.isfinite(value):
                    own_kind = own_kind or kind
                    steps += [*gap, step]
                    values += [*(NAN for _ in gap), value]
                    gap = []
                elif values and kind == own_kind:
                    gap = [step]
        return steps, values

    def _line_kinds(self) -> list[str]:
        """Whether each line is of a "validation" or of a "step"; "" for one without a number.

        The line of a validation may also have metrics with other names, such as watch/reward_rise.
        """
        if not self.kinds:
            self.kinds = [""] * self.num_lines
            for name in sorted(set(self.columns) - {"step", "time"}, key=is_of_validation):
                kind = "validation" if is_of_validation(name) else "step"
                for i, value in enumerate(self.columns[name]):
                    if math.isfinite(value):
                        self.kinds[i] = kind
        return self.kinds


def parse_line(raw: bytes, file: Path) -> dict[str, Any] | None:
    """Return a line with a finite step, or None for anything else. Raises Unreadable."""
    try:
        line = parse_json(raw, file)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    step = line.get("step")
    return line if isinstance(step, int | float) and math.isfinite(step) else None


def is_validation(line: dict[str, Any]) -> bool:
    """Whether a line holds validation metrics."""
    return any(map(is_of_validation, line))


def is_of_validation(name: str) -> bool:
    return name.startswith("validation/")


def _format_numbers(column: "array[float]", start: int, end: int, exact: bool) -> str:
    template = "%.12g" if exact else "%.6g"
    texts = [template % value if math.isfinite(value) else "null" for value in column[start:end]]
    texts += ["null"] * (end - max(start, len(column)))
    return f"[{','.join(texts)}]"


def read_sample(file: Path, count: int = 48) -> list[dict[str, Any]]:
    """About `count` evenly spaced lines and the last ones: enough for a sparkline.

    A small file is read whole. Raises Unreadable, or FileNotFoundError.
    """
    with open_file(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        if size <= SMALL_FILE_BYTES:
            raw_lines = stream.read(size).splitlines()
        else:
            raw_lines = [_read_line_at(stream, size * i // count, file) for i in range(count)]
            raw_lines += _read_tail(stream, size)
    unique: dict[tuple[Any, Any], dict[str, Any]] = {}
    names: set[str] = set()
    for raw in raw_lines:
        line = parse_line(raw, file)
        if line is not None:
            unique[line["step"], str(line.get("time"))] = line
            names.update(line)
    if len(names) > MAX_NAMES:
        raise Unreadable(file, f"it has more than {MAX_NAMES} metrics")
    return sorted(unique.values(), key=lambda line: line["step"])


def _read_line_at(stream: Any, offset: int, file: Path) -> bytes:
    """Return the first line that starts after `offset`. Raises Unreadable."""
    stream.seek(offset)
    line = b""
    for _ in range(2 if offset else 1):
        line = stream.readline(MAX_LINE_BYTES)
        if len(line) == MAX_LINE_BYTES:
            raise Unreadable(file, f"a line is longer than {MAX_LINE_BYTES >> 10} KiB")
    return line


def _read_tail(stream: Any, size: int) -> list[bytes]:
    stream.seek(max(0, size - (1 << 14)))
    return stream.read(1 << 14).splitlines()[-4:]
