"""What a run reports while it trains: display.py shows it, events.jsonl and trackers.py keep it.

events.jsonl has one JSON object per line: time, step, event, text. Events: started, resumed,
checkpoint, note, finished, stopped, failed. The web page reads from them how a run ended. A command
that finds a finished run writes nothing.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from inspect import isfunction
from pathlib import Path
from types import TracebackType
from typing import Any

from postgrad.config.schema import Config
from postgrad.errors import ConfigError, RunError
from postgrad.types import Batch


class Reporter:
    """Receives what a run does. This one ignores everything."""

    def started(self, folder: Path, config: Config, start: int) -> None:
        """Say that the run starts after step `start`."""

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        """Say that a step is done."""

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        """Say that the model after step `number` was validated."""

    def saved(self, path: Path) -> None:
        """Say that a checkpoint is complete."""

    def note(self, text: str) -> None:
        """Say what else happened."""

    def phase(self, phase: str, done: int, total: int) -> None:
        """Say what the run does now; `done` of `total` if the phase counts."""

    def ended(self, reached: bool, interrupted: bool) -> None:
        """Say that the run ended without an error."""

    def stopped(self) -> None:
        """Clean up: always the last call, also after an error."""


class MultiReporter(Reporter):
    """Passes every call to several reporters, in order."""

    def __init__(self, *reporters: Reporter) -> None:
        for name, function in vars(Reporter).items():
            if isfunction(function):
                setattr(self, name, partial(_call_all, [getattr(one, name) for one in reporters]))


def _call_all(functions: list[Callable[..., None]], *arguments: Any) -> None:
    for function in functions:
        function(*arguments)


class Events(Reporter):
    """A reporter that writes events.jsonl; as a context it also writes the error of its block."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "events.jsonl"
        self.number = 0  # of the last step
        self.total = 0  # number of steps
        self.goal: float | None = None  # training.stop_at
        # The "started" or "resumed" line is written only when something else happens.
        self.first_event: tuple[str, int] | None = None

    def __enter__(self) -> "Events":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, ConfigError):
            return
        if isinstance(error, KeyboardInterrupt):
            text = "stopped at once; the same command continues from the last checkpoint"
            self.write("stopped", text)
        elif isinstance(error, RunError):
            self.write("failed", str(error))
        else:
            notes = getattr(error, "__notes__", None)
            where = f" ({'; '.join(notes)})" if notes else ""
            self.write("failed", f"{type(error).__name__}: {error}{where}")

    def started(self, folder: Path, config: Config, start: int) -> None:
        self.number = start
        self.total = config.training.steps
        self.goal = config.training.stop_at
        self.first_event = ("resumed" if start else "started", start)

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        self.number = int(metrics["step"])
        self._write_first_event()

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        self._write_first_event()

    def saved(self, path: Path) -> None:
        self.write("checkpoint", path.name)

    def note(self, text: str) -> None:
        self.write("note", text)

    def ended(self, reached: bool, interrupted: bool) -> None:
        if self.first_event is not None and self._finished_before():
            return
        if self.number >= self.total:
            self.write("finished", "")
        elif reached:
            text = f"reached training.stop_at={self.goal:g}" if self.goal is not None else ""
            self.write("finished", text)
        elif interrupted:
            self.write("stopped", "stopped on request; the same command continues it")

    def write(self, event: str, text: str) -> None:
        """Append one line. Raises RunError if it cannot be written, except for the last event."""
        self._write_first_event()
        self._append(event, self.number, text)

    def _finished_before(self) -> bool:
        """Whether the last line says "finished"; a run killed after its last step has none."""
        lines = self.file.read_bytes().splitlines() if self.file.is_file() else []
        return bool(lines) and b'"event": "finished"' in lines[-1]

    def _write_first_event(self) -> None:
        if self.first_event is None:
            return
        event, step = self.first_event
        self.first_event = None
        self._append(event, step, "")

    def _append(self, event: str, step: int, text: str) -> None:
        line: dict[str, Any] = {"time": time.time(), "step": step, "event": event, "text": text}
        try:
            with self.file.open("a+b") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - 1))
                # A full disk may have cut the previous line; then this one starts a new line.
                previous_is_complete = file.read(1) in (b"", b"\n")
                separator = b"" if previous_is_complete else b"\n"
                file.write(separator + json.dumps(line).encode() + b"\n")
        except OSError as error:
            if event in ("failed", "stopped"):
                return  # the error that ended the run must not be hidden by this one
            raise RunError(f"{self.file} could not be written: {error.strerror}") from error
