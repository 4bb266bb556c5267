"""Runs as the list shows them: state, settings, last values, sparkline, events."""

import fcntl
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from postgrad.config.stored import value_at
from postgrad.errors import first_line
from postgrad.view.cache import Cache, file_stamp
from postgrad.view.folder import MAX_FOLDERS, Folder, NotFound
from postgrad.view.metrics import Metrics, read_sample
from postgrad.view.reader import (
    Unreadable,
    open_file,
    parse_json,
    read_end,
    read_yaml,
    round_number,
)

# The metric that a run is listed with: the first of these that it has.
MAIN_METRICS = ("reward/mean", "sft/loss", "dpo/accuracy", "loss")
QUIET_S = 600.0  # a running run that has written nothing for so long is reported as quiet
MAX_METRICS = 12  # runs whose metrics stay in memory
MAX_EVENTS = 2000
MAX_EVENT_BYTES = 1 << 20
END_EVENTS = ("finished", "stopped", "failed")
RUN_FILES = ("metrics.jsonl", "events.jsonl", "config.yaml")
MAX_SHOWN = 500  # characters of a setting or a reason in the list
MAX_EVENT_TEXT = 5000  # characters

T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """`name` is running, finished, stopped, failed or unreadable; `reason` is a sentence or ""."""

    name: str
    reason: str = ""


class Run:
    """One run folder. `problems` says which of its files could not be read, and why."""

    def __init__(self, folder: Folder, name: str) -> None:
        self.folder = folder
        self.name = name
        self.path = folder.resolve(name)
        self.problems: dict[str, str] = {}

    def file(self, *parts: str) -> Path | None:
        """Return a file of the run, or None if it does not exist or is a link out of the folder."""
        try:
            return self.folder.check(self.path.joinpath(*parts))
        except NotFound:
            return None

    def _read(self, name: str, reader: Callable[[Path], T], empty: T) -> T:
        """Return what the reader makes of a file, `empty` if it is missing or cannot be read."""
        file = self.file(name)
        if file is None:
            return empty
        try:
            return reader(file)
        except FileNotFoundError:  # removed meanwhile
            return empty
        except Unreadable as error:
            self.problems[name] = error.why
            return empty

    def config(self) -> dict[str, Any]:
        """Return the content of config.yaml; empty if it cannot be read."""
        return self._read("config.yaml", read_yaml, {})

    def metrics_sample(self) -> list[dict[str, Any]]:
        """Return some lines of metrics.jsonl; empty if it cannot be read."""
        return self._read("metrics.jsonl", read_sample, [])

    def events(self) -> list[dict[str, Any]]:
        """Return the last events, oldest first.

        Kinds are started, resumed, checkpoint, note, finished, stopped and failed.
        """
        return self._read("events.jsonl", read_events, [])

    def is_locked(self) -> bool:
        """Whether a living process holds the run's lock."""
        return self._read(".lock", _is_locked, False)

    def state(
        self,
        step: float,
        accuracy: float | None,
        events: list[dict[str, Any]],
        config: dict[str, Any],
    ) -> State:
        """Return the run's state: a held lock means running, the last event says how it ended.

        Args:
            step: the last step.
            accuracy: the last validation accuracy.
            events: from events().
            config: from config().
        """
        if self.is_locked():
            quiet_s = time.time() - self.changed()
            if quiet_s > QUIET_S:
                return State("running", f"nothing written for {round(quiet_s / 60)} min")
            return State("running")
        starts_and_ends = [e for e in events if e["event"] in ("started", "resumed", *END_EVENTS)]
        if starts_and_ends and starts_and_ends[-1]["event"] in END_EVENTS:
            return State(starts_and_ends[-1]["event"], starts_and_ends[-1]["text"])
        # A run killed before it saved its last step computes that step again.
        saved = [e["text"] for e in events if e["event"] == "checkpoint"]
        if not starts_and_ends or saved[-1:] == [f"step-{step}"]:
            total = value_at(config, "training.steps")
            if isinstance(total, int | float) and step >= total:
                return State("finished")
            goal = value_at(config, "training.stop_at")
            if isinstance(goal, int | float) and accuracy is not None and accuracy >= goal:
                return State("finished", f"reached training.stop_at={goal:g}")
        if starts_and_ends:
            return State(
                "stopped",
                "its process ended without an event (killed, or the machine stopped); "
                "run the same command to resume",
            )
        return State("stopped", "it has not reached its last step, and no process is running it")

    def changed(self) -> float:
        """Time of the run's last write, in seconds since the epoch."""
        files = [self.file(name) for name in RUN_FILES]
        return max((file.stat().st_mtime for file in files if file), default=0.0)

    def overview(self) -> dict[str, Any]:
        """Everything that the list shows about this run."""
        lines = self.metrics_sample()
        config = self.config()
        step = max((line["step"] for line in lines), default=0)
        metric = next((name for name in MAIN_METRICS if any(name in line for line in lines)), "")
        values = _numbers(lines, metric)
        accuracies = _numbers(lines, "validation/accuracy")
        times = _numbers(lines, "time")
        accuracy = accuracies[-1] if accuracies else None
        state = self.state(step, accuracy, self.events(), config)
        if self.problems:
            whys = [f"{name}: {why}" for name, why in self.problems.items()]
            state = State("unreadable", "; ".join(whys))
        rounded = [round_number(value) for value in thin_out(values)]
        return {
            "name": self.name,
            "state": state.name,
            "reason": state.reason[:MAX_SHOWN],
            "method": _setting_text(config, "method.name"),
            "model": _setting_text(config, "model.path"),
            "data": _setting_text(config, "data.train"),
            "step": step,
            "steps": _number(value_at(config, "training.steps")),
            "metric": metric,
            "last": round_number(values[-1]) if values else None,
            "accuracy": round_number(accuracy),
            "sparkline": [value for value in rounded if value is not None],
            "started": min(times, default=None),
            "changed": self.changed(),
            "rollouts": self.file("rollouts") is not None,
        }


def read_events(file: Path) -> list[dict[str, Any]]:
    """Return the last events of a file; lines that are no events are left out."""
    events: list[dict[str, Any]] = []
    for raw in read_end(file, MAX_EVENT_BYTES)[-MAX_EVENTS:]:
        try:
            line = parse_json(raw, file)
        except ValueError:  # a line that is being written
            continue
        if isinstance(line, dict) and isinstance(line.get("event"), str):
            events.append(
                {
                    "time": _number(line.get("time")),
                    "step": _number(line.get("step")) or 0,
                    "event": line["event"][:MAX_SHOWN],
                    "text": str(line.get("text", ""))[:MAX_EVENT_TEXT],
                }
            )
    return events


def _is_locked(file: Path) -> bool:
    with open_file(file) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # the run holds it
            return True
        except OSError:
            return False
    return False


class Runs:
    """All runs of a folder."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._overviews: Cache[str, dict[str, Any]] = Cache(MAX_FOLDERS)
        self._metrics: Cache[str, Metrics] = Cache(MAX_METRICS)

    def get(self, name: str) -> Run:
        """Return the run of this name; raise NotFound for anything else."""
        if name not in self.folder.contents().runs:
            raise NotFound(name)
        return Run(self.folder, name)

    def all(self) -> list[dict[str, Any]]:
        """Return the overviews of all runs."""
        overviews: list[dict[str, Any]] = []
        for name in self.folder.contents().runs:
            try:
                overviews.append(self.overview(name))
            except (OSError, NotFound):  # removed since the folders were listed
                continue
            except Exception as error:  # one run, whatever is in its folder, hides no other
                why = f"{type(error).__name__}: {first_line(error)}"
                state = {"name": name, "state": "unreadable", "reason": why}
                overviews.append(EMPTY_OVERVIEW | state)
        return overviews

    def overview(self, name: str) -> dict[str, Any]:
        """Return the overview of one run; a running one is read again each time."""
        run = Run(self.folder, name)
        if run.is_locked():
            return run.overview()
        stamps = [file_stamp(run.file(part)) for part in RUN_FILES]
        return self._overviews.get(name, run.overview, stamps)

    def metrics(self, name: str) -> Metrics:
        """Return the metrics of one run, up to date."""
        run = self.get(name)
        file = run.path / "metrics.jsonl"
        if run.file("metrics.jsonl") is None and file.exists():  # a link out of the folder
            raise NotFound(name)
        return self._metrics.get(name, lambda: Metrics(file)).refresh()

    def compare_settings(self, names: list[str]) -> dict[str, Any]:
        """Return the settings of several runs.

        Returns:
            {"keys": [...], "values": {run: {key: value}}, "different": [keys that differ]}.
        """
        values = {name: flatten(self.get(name).config()) for name in names}
        keys = list(dict.fromkeys(key for settings in values.values() for key in settings))
        different: list[str] = []
        for key in keys:
            texts = {json.dumps(settings.get(key), default=str) for settings in values.values()}
            if len(texts) > 1:
                different.append(key)
        return {"keys": keys, "different": different, "values": values}


EMPTY_OVERVIEW: dict[str, Any] = {
    **dict.fromkeys(("method", "model", "data", "metric"), ""),
    **dict.fromkeys(("steps", "last", "accuracy", "started"), None),
    "step": 0,
    "changed": 0.0,
    "sparkline": [],
    "rollouts": False,
}


def thin_out(values: list[float], count: int = 60) -> list[float]:
    """About `count` evenly spaced values, the last one among them."""
    stride = math.ceil(len(values) / count) or 1
    return values[(len(values) - 1) % stride :: stride]


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration by dotted keys. Lists and empty sections are JSON text.

    JSON has no infinite numbers: they are text, `inf` as it is typed.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        elif isinstance(value, float) and not math.isfinite(value):
            flat[f"{prefix}{key}"] = str(value)
        elif isinstance(value, str | int | float | bool | None):
            flat[f"{prefix}{key}"] = value
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, default=str)
    return flat


def _numbers(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if name and isinstance(line.get(name), int | float)]


def _setting_text(config: dict[str, Any], key: str) -> str:
    return str(value_at(config, key) or "")[:MAX_SHOWN]


def _number(value: Any) -> int | float | None:
    """Return a finite number, None for anything else."""
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return value if is_number else None
