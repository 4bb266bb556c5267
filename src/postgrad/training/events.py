"""events.jsonl: what happened to a run, a JSON object a line: time, step, event, text. The page tells from it how a run ended.

started, resumed, checkpoint, note, finished, stopped, failed. A command that finds nothing left to do writes nothing.
"""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from postgrad.config.schema import Config
from postgrad.errors import ConfigError, RunError
from postgrad.training.report import Reporter
from postgrad.types import Batch


class Events(Reporter):
    """A reporter that writes; as a context it also hears of the error that ends the run."""

    def __init__(self, folder: Path) -> None:
        self.file, self.number, self.total = folder / "events.jsonl", 0, 0
        self.opening: tuple[str, int] | None = (
            None  # the first line waits until something has really happened
        )
        self.goal: float | None = None

    def __enter__(self) -> "Events":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.write(
                "stopped", "stopped at once; the same command continues from the last checkpoint"
            )
        elif isinstance(error, RunError):
            self.write("failed", str(error))
        elif error is not None and not isinstance(error, ConfigError):
            where = f" ({'; '.join(error.__notes__)})" if getattr(error, "__notes__", None) else ""
            self.write("failed", f"{type(error).__name__}: {error}{where}")

    def started(self, folder: Path, config: Config, start: int) -> None:
        self.number, self.total, self.goal = start, config.training.steps, config.training.stop_at
        self.opening = ("resumed" if start else "started", start)

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        self.number = int(metrics["step"])
        self._open()

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        self._open()

    def saved(self, path: Path) -> None:
        self.write("checkpoint", path.name)

    def note(self, text: str) -> None:
        self.write("note", text)

    def ended(self, reached: bool, interrupted: bool) -> None:
        """The last step is done, the goal was met, or somebody asked for a stop. Nothing to say when nothing was done since the end."""
        if self.opening is not None and self._told():
            return
        if self.number >= self.total:
            self.write("finished", "")
        elif reached:
            self.write(
                "finished",
                f"reached training.stop_at={self.goal:g}" if self.goal is not None else "",
            )
        elif interrupted:
            self.write("stopped", "stopped on request; the same command continues it")

    def write(self, event: str, text: str) -> None:
        self._open()
        self._line(event, self.number, text)

    def _told(self) -> bool:
        """Whether the last line tells of an end; a run that was killed after its last checkpoint has none."""
        lines = self.file.read_bytes().splitlines() if self.file.is_file() else []
        return bool(lines) and b'"event": "finished"' in lines[-1]

    def _open(self) -> None:
        if self.opening is not None:
            opening, self.opening = self.opening, None
            self._line(*opening, "")

    def _line(self, event: str, step: int, text: str) -> None:
        line: dict[str, Any] = {"time": time.time(), "step": step, "event": event, "text": text}
        try:
            with self.file.open("a+b") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - 1))
                whole = file.read(1) in (b"", b"\n")  # a full disk may have cut the line before
                file.write((b"" if whole else b"\n") + json.dumps(line).encode() + b"\n")
        except OSError as error:
            if event not in (
                "failed",
                "stopped",
            ):  # the error that ends the run must not be hidden by this one
                raise RunError(f"events.jsonl could not be written: {error.strerror}") from error
