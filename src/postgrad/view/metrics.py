"""metrics.jsonl, read on from where the last reading ended, as columns of numbers."""

import json
import math
import threading
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MOST_LINES = 20_000  # beyond it every second line is dropped, again and again: memory stays bounded for any run
NAN = float("nan")


class Metrics:
    """The columns of one file. `generation` changes when lines already given out are no longer true: ask for all again."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.generation = 0
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self.num_lines, self.offset, self.stride, self.inode = 0, 0, 1, None

    def refresh(self) -> "Metrics":
        """Read what was appended. A file that was replaced (a run that went on from a checkpoint) is read anew."""
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
                with self.file.open("rb") as file:
                    file.seek(self.offset)
                    while chunk := file.read(1 << 22):
                        whole = chunk.rfind(b"\n") + 1
                        if not whole:
                            break  # a line that is being written, or longer than the chunk
                        self._take(chunk[:whole].splitlines())
                        self.offset += whole
                        file.seek(self.offset)
        return self

    def _take(self, lines: Iterable[bytes]) -> None:
        for raw in lines:
            line = parse(raw)
            if line is None or (
                self.stride > 1 and int(line["step"]) % self.stride and not is_validation(line)
            ):
                continue
            for name, value in line.items():
                if isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                column = self.columns.setdefault(name, array("d"))
                column.extend([NAN] * (self.num_lines - len(column)))
                column.append(value)
            self.num_lines += 1
            if self.num_lines >= MOST_LINES:
                self._thin()

    def _thin(self) -> None:
        self.generation += 1
        self.stride *= 2
        for name, column in self.columns.items():
            column.extend([NAN] * (self.num_lines - len(column)))
            self.columns[name] = column[::2]
        self.num_lines = (self.num_lines + 1) // 2

    def json(self, start: int = 0) -> str:
        """{"generation", "from", "count", "columns": {name: [...]}} of the lines from `start` on; null where a line has no such value."""
        with self._lock:
            parts = [
                f"{json.dumps(name)}:{_numbers(column, start, self.num_lines, exact=name in ('time', 'step'))}"
                for name, column in self.columns.items()
            ]
            return f'{{"generation":{self.generation},"from":{start},"count":{self.num_lines},"columns":{{{",".join(parts)}}}}}'

    def last(self, name: str) -> float | None:
        """The newest value of a column."""
        with self._lock:
            return next(
                (v for v in reversed(self.columns.get(name, ())) if not math.isnan(v)), None
            )

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of a column, without the lines that lack it."""
        with self._lock:
            pairs = [
                (s, v)
                for s, v in zip(
                    self.columns.get("step", ()), self.columns.get(name, ()), strict=False
                )
                if not math.isnan(v)
            ]
        return [p[0] for p in pairs], [p[1] for p in pairs]


def parse(raw: bytes) -> dict[str, Any] | None:
    """A line with a step, or None for anything else."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    good = (
        isinstance(line, dict)
        and isinstance(line.get("step"), int | float)
        and math.isfinite(line["step"])
    )
    return line if good else None


def is_validation(line: dict[str, Any]) -> bool:
    return any(name.startswith("validation/") for name in line)


def _numbers(column: "array[float]", start: int, end: int, exact: bool) -> str:
    form = "%.12g" if exact else "%.6g"
    shown = [form % v if math.isfinite(v) else "null" for v in column[start:end]]
    shown += ["null"] * (end - max(start, len(column)))
    return f"[{','.join(shown)}]"


def glance(file: Path, count: int = 48) -> list[dict[str, Any]]:
    """All lines of a small file; of a large one about `count`, spread evenly, and its last ones: enough for a sparkline."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            if size <= 1 << 20:
                picked = opened.read().splitlines()
            else:
                picked = [_line_at(opened, size * i // count) for i in range(count)] + _tail(
                    opened, size
                )
    except OSError:
        return []
    parsed = [line for raw in picked if (line := parse(raw)) is not None]
    unique = {(line["step"], line.get("time")): line for line in parsed}
    return sorted(unique.values(), key=lambda line: line["step"])


def _line_at(opened: Any, offset: int) -> bytes:
    opened.seek(offset)
    if offset:
        opened.readline(1 << 16)
    return opened.readline(1 << 16)


def _tail(opened: Any, size: int) -> list[bytes]:
    opened.seek(max(0, size - (1 << 14)))
    return opened.read().splitlines()[-4:]
