"""A run as the list shows it: state, settings, last values, sparkline, events. From the folder alone."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from postgrad.files import is_locked
from postgrad.view.folder import Folder, NotFound
from postgrad.view.metrics import Metrics, glance

MAIN = (
    "reward/mean",
    "sft/loss",
    "dpo/accuracy",
    "loss",
)  # the value a run is known by: the first of these it has
QUIET_S = 600.0  # a held lock without a new line for so long is said to be quiet
MOST_EVENTS = 2000


@dataclass(frozen=True)
class State:
    """`name` is running, finished, stopped or failed; `why` is a sentence where there is something to say."""

    name: str
    why: str = ""


class Run:
    """One run folder."""

    def __init__(self, folder: Folder, name: str) -> None:
        self.folder, self.name = folder, name
        self.path = folder.inside(name)

    def file(self, *parts: str) -> Path | None:
        """A file of the run, or None when it is not there or lies elsewhere."""
        try:
            return self.folder.checked(self.path.joinpath(*parts))
        except NotFound:
            return None

    def config(self) -> dict[str, Any]:
        file = self.file("config.yaml")
        if file is None:
            return {}
        try:
            loaded = yaml.load(
                file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            )
        except (yaml.YAMLError, OSError, UnicodeDecodeError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def events(self) -> list[dict[str, Any]]:
        """What happened, oldest first: started, resumed, checkpoint, note, finished, stopped, failed."""
        file = self.file("events.jsonl")
        if file is None:
            return []
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(0, size - (1 << 20)))
            lines = opened.read().splitlines()[-MOST_EVENTS:]
        out: list[dict[str, Any]] = []
        for raw in lines:
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("event"), str):
                step = line.get("step")
                out.append(
                    {
                        **line,
                        "step": step if isinstance(step, int | float) else 0,
                        "text": str(line.get("text", "")),
                    }
                )
        return out

    def held(self) -> bool:
        """Whether a living process holds the run's lock."""
        file = self.file(".lock")
        if file is None:
            return False
        try:
            return is_locked(file)
        except OSError:
            return False

    def state(
        self,
        step: float,
        accuracy: float | None,
        events: list[dict[str, Any]],
        config: dict[str, Any],
    ) -> State:
        """What the folder says: the lock tells running, the last event tells how it ended."""
        if self.held():
            quiet = time.time() - self.changed()
            return State(
                "running", f"no news for {round(quiet / 60)} min" if quiet > QUIET_S else ""
            )
        ends = [
            e
            for e in events
            if e["event"] in ("started", "resumed", "finished", "stopped", "failed")
        ]
        if ends and ends[-1]["event"] in ("finished", "stopped", "failed"):
            return State(ends[-1]["event"], ends[-1]["text"])
        total = _at(config, "training", "steps")
        if isinstance(total, int | float) and step >= total:
            return State("finished")
        goal = _at(config, "training", "stop_at")
        if isinstance(goal, int | float) and accuracy is not None and accuracy >= goal:
            return State("finished", f"reached training.stop_at={goal:g}")
        if ends:
            return State(
                "stopped",
                "its process ended without a word (killed, or the machine went down); the same command continues it",
            )
        return State("stopped", "it has not reached its last step, and no process works on it")

    def changed(self) -> float:
        """When the run last wrote something."""
        files = [self.file(name) for name in ("metrics.jsonl", "events.jsonl", "config.yaml")]
        return max((file.stat().st_mtime for file in files if file), default=0.0)

    def overview(self) -> dict[str, Any]:
        """Everything the list shows of this run."""
        file = self.file("metrics.jsonl")
        lines = glance(file) if file else []
        config, events = self.config(), self.events()
        step = max((line["step"] for line in lines), default=0)
        main = next((name for name in MAIN if any(name in line for line in lines)), "")
        values = [
            line[name]
            for line in lines
            if (name := main) and isinstance(line.get(name), int | float)
        ]
        accuracy = [
            line["validation/accuracy"]
            for line in lines
            if isinstance(line.get("validation/accuracy"), int | float)
        ]
        state = self.state(step, accuracy[-1] if accuracy else None, events, config)
        times = [line["time"] for line in lines if isinstance(line.get("time"), int | float)]
        return {
            "name": self.name,
            "state": state.name,
            "why": state.why,
            "method": _at(config, "method", "name") or "",
            "model": str(_at(config, "model", "path") or ""),
            "data": str(_at(config, "data", "train") or ""),
            "step": step,
            "steps": _at(config, "training", "steps"),
            "main": main,
            "last": _finite(values[-1]) if values else None,
            "accuracy": _finite(accuracy[-1]) if accuracy else None,
            "sparkline": [v for v in map(_finite, thinned(values)) if v is not None],
            "started": min(times, default=None),
            "changed": self.changed(),
            "rollouts": self.file("rollouts") is not None,
        }


class Runs:
    """All runs of a folder; overviews and metrics are kept while their files stay the same."""

    MOST_METRICS = 12

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._overviews: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._metrics: dict[str, Metrics] = {}

    def get(self, name: str) -> Run:
        """The run of that name; raises Outside for anything that is not one."""
        if name not in self.folder.found().runs:
            raise NotFound(name)
        return Run(self.folder, name)

    def all(self) -> list[dict[str, Any]]:
        names = self.folder.found().runs
        self._overviews = {name: kept for name, kept in self._overviews.items() if name in names}
        out: list[dict[str, Any]] = []
        for name in names:
            try:
                out.append(self.overview(name))
            except (OSError, NotFound):
                continue
        return out

    def overview(self, name: str) -> dict[str, Any]:
        run = Run(self.folder, name)
        stamp = (
            run.held(),
            *(_stamp(run.file(part)) for part in ("metrics.jsonl", "events.jsonl", "config.yaml")),
        )
        kept = self._overviews.get(name)
        if kept is None or kept[0] != stamp or stamp[0]:
            kept = self._overviews[name] = (stamp, run.overview())
        return kept[1]

    def metrics(self, name: str) -> Metrics:
        run = self.get(name)
        metrics = self._metrics.pop(name, None) or Metrics(run.path / "metrics.jsonl")
        while len(self._metrics) >= self.MOST_METRICS:
            self._metrics.pop(next(iter(self._metrics)), None)
        self._metrics[name] = metrics
        if run.file("metrics.jsonl") is None and metrics.file.exists():
            raise NotFound(name)
        return metrics.refresh()

    def differences(self, names: list[str]) -> dict[str, Any]:
        """Every setting of the given runs: {"keys": [...], "values": {run: {key: value}}, "different": [...]}."""
        flat = {name: flatten(self.get(name).config()) for name in names}
        keys = list(dict.fromkeys(key for values in flat.values() for key in values))
        different = [
            key
            for key in keys
            if len({json.dumps(values.get(key), default=str) for values in flat.values()}) > 1
        ]
        return {"keys": keys, "different": different, "values": flat}


def thinned(values: list[float], count: int = 60) -> list[float]:
    """About `count` of the values, the last one among them."""
    stride = -(-len(values) // count) or 1
    return values[(len(values) - 1) % stride :: stride]


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration by dotted keys; lists stay values, an empty section is one, too."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            out.update(flatten(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = (
                value
                if isinstance(value, str | int | float | bool | None)
                else json.dumps(value, default=str)
            )
    return out


def _at(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _finite(value: Any) -> float | None:
    return (
        float(f"{value:.6g}")
        if isinstance(value, int | float) and abs(value) < 1e300 and value == value
        else None
    )


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    if file is None:
        return None
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
