"""results.jsonl: a line per step and run, written while they train; series and intervals."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

ACCURACY = "validation/accuracy"
# Two-sided 95% quantiles of Student's t by degrees of freedom; beyond the table 1.96.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

Entry = dict[str, Any]


class FollowedRun(Protocol):
    @property
    def arm(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def label(self) -> str: ...


class Results:
    """results.jsonl of a folder: a line per line of each run's metrics.jsonl, one per ended run."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.file = out / "results.jsonl"
        self.num_read: dict[str, int] = {}
        self.steps: dict[str, dict[int, bool]] = {}  # of this call: step -> was it validated
        self.clocks: dict[str, float] = {}  # seconds of each run, without validations after step 0

    def add(self, **entry: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def follow(self, run: FollowedRun, start: float = 0.0, num_running: int = 0) -> None:
        """Append the lines that are new in the run's metrics.jsonl since it was started.

        Each gets the seconds since `start`, with and without validations, and the number of runs
        that shared the machine.
        """
        metrics = self.out / "runs" / run.label / "metrics.jsonl"
        if not metrics.is_file() or metrics.stat().st_mtime < start:
            return
        lines = [line for line in metrics.read_text().splitlines() if line.endswith("}")]
        new = lines[self.num_read.get(run.label, 0) :]
        steps = self.steps.setdefault(run.label, {})
        for line in new:
            values = json.loads(line)
            step = int(values["step"])
            steps[step] = steps.get(step, False) or ACCURACY in values
            timing: Entry = {}
            if start:
                elapsed = values.get("time", start) - start
                # Up to the end of step 1 no validation but the one before it was run.
                clock = self.clocks.get(run.label, elapsed - values.get("step_s", 0.0))
                clock += values.get("step_s", 0.0)
                if "step_s" in values:
                    self.clocks[run.label] = clock
                timing = {"elapsed_s": round(elapsed, 2), "running": num_running}
                timing["clock_s"] = round(clock, 2)
            self.add(arm=run.arm, seed=run.seed, label=run.label, **timing, metrics=values)
        self.num_read[run.label] = len(lines)

    def forget(self, label: str) -> None:
        """Follow a run from its first line again, because it is started again."""
        for kept in (self.num_read, self.steps, self.clocks):
            kept.pop(label, None)

    def has_step(self, label: str, step: int, validated: bool) -> bool:
        """Return whether the run has finished a step in this call, with its validation."""
        steps = self.steps.get(label, {})
        return steps.get(step, False) if validated else step in steps

    def read(self) -> list[Entry]:
        if not self.file.is_file():
            return []
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def finished(self) -> set[str]:
        return {entry["label"] for entry in self.read() if entry.get("exit_code") == 0}


def series(entries: Iterable[Entry], label: str) -> list[dict[str, float]]:
    """Return a run's metrics by step, with train_s, the seconds of its steps so far.

    Of a step that was computed twice, because the run was started again, the last counts.
    """
    by_step: dict[int, dict[str, float]] = {}
    for entry in entries:
        if entry["label"] == label and "metrics" in entry:
            step = int(entry["metrics"]["step"])
            merged = by_step.get(step, {}) | entry["metrics"]
            if "elapsed_s" in entry:
                timed = ("elapsed_s", "running", "clock_s")
                merged |= {name: entry[name] for name in timed if name in entry}
            by_step[step] = merged
    train_s = 0.0
    lines: list[dict[str, float]] = []
    for step in sorted(by_step):
        train_s = by_step[step].get("train_s", train_s + by_step[step].get("step_s", 0.0))
        lines.append(by_step[step] | {"train_s": round(train_s, 2)})
    return lines


def labels_by_arm(entries: Iterable[Entry], prefix: str = "") -> dict[str, dict[int, str]]:
    """Return arm -> seed -> label of the runs that have metrics and a label with this prefix."""
    arms: dict[str, dict[int, str]] = {}
    for entry in entries:
        if "metrics" in entry and entry["label"].startswith(prefix):
            arms.setdefault(entry["arm"], {})[entry["seed"]] = entry["label"]
    return arms


def t_interval(values: Sequence[float]) -> float:
    """Return the half width of the 95% t interval of a mean; nan for fewer than two values."""
    if len(values) < 2:
        return math.nan
    degrees = len(values) - 1
    quantile = T_QUANTILES[degrees - 1] if degrees <= len(T_QUANTILES) else 1.96
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def with_interval(values: Sequence[float], digits: int = 3) -> str:
    """Return `mean ± half width (each value)`; one value is returned alone."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    each = " ".join(f"{value:.{digits}f}" for value in values)
    return f"{statistics.mean(values):.{digits}f} ± {t_interval(values):.{digits}f} ({each})"
