"""Progress of an evaluation: a bar per set in a terminal, a line every few seconds elsewhere."""

import sys
import time
from typing import Any

from postgrad.evaluation.plan import Plan
from postgrad.log_level import QUIET, log_level
from postgrad.phases import duration

INTERVAL_S = 10.0  # between two lines when stdout is not a terminal


class Progress:
    """Receives the progress of an evaluation; this base class shows nothing.

    Use it as a context manager around the generation.
    """

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None: ...

    def loading(self, plan: Plan) -> None:
        """Say that the model is about to be loaded."""

    def note(self, text: str) -> None:
        """Say something about the data, at the start."""

    def begin(self, name: str, total: int, done: int) -> None:
        """Say that a set of `total` problems begins; `done` of them have results already."""

    def advance(
        self, name: str, done: int, accuracy: float | None, tokens_per_second: float
    ) -> None:
        """`done` problems of the set have results; `accuracy` is the fraction right so far.

        It is None if the responses are not scored.
        """


def _status(accuracy: float | None, tokens_per_second: float) -> str:
    right = "" if accuracy is None else f"right {accuracy:.3f}  "
    return f"{right}{tokens_per_second:.0f} tok/s"


def describe(plan: Plan) -> str:
    """Return the evaluation in one line."""
    config = plan.config
    model = config.model
    num_problems = sum(len(problems) for problems in plan.sets.values())
    sampling = "greedy"
    if config.rollout.temperature:
        sampling = f"{config.rollout.samples} samples at temperature {config.rollout.temperature:g}"
    engine = f"{config.rollout.engine} on {model.device} {model.dtype}"
    return f"{model.path}: {num_problems} problems, {sampling}, {engine} -> {plan.folder}"


class PlainProgress(Progress):
    """Prints lines, for logs and pipes."""

    def __init__(self) -> None:
        self.total = 0
        self.num_before = 0
        self.began = 0.0
        self.last_line = 0.0

    def loading(self, plan: Plan) -> None:
        print(describe(plan), flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, name: str, total: int, done: int) -> None:
        self.total = total
        self.num_before = done
        self.began = time.monotonic()
        if done:
            print(f"{name}: {done} of {total} problems already done", flush=True)

    def advance(
        self, name: str, done: int, accuracy: float | None, tokens_per_second: float
    ) -> None:
        now = time.monotonic()
        if done < self.total and now - self.last_line < INTERVAL_S:
            return
        self.last_line = now
        seconds_per_problem = (now - self.began) / (done - self.num_before)
        remaining = duration(seconds_per_problem * (self.total - done))
        status = _status(accuracy, tokens_per_second)
        print(f"{name}: {done}/{self.total}  {status}  {remaining} left", flush=True)


class BarProgress(Progress):
    """Shows one bar per set."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> "BarProgress":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def loading(self, plan: Plan) -> None:
        self.note(describe(plan))

    def note(self, text: str) -> None:
        self.bars.console.print(text, highlight=False, markup=False)

    def begin(self, name: str, total: int, done: int) -> None:
        self.tasks[name] = self.bars.add_task(name, total=total, completed=done, status="")

    def advance(
        self, name: str, done: int, accuracy: float | None, tokens_per_second: float
    ) -> None:
        status = _status(accuracy, tokens_per_second)
        self.bars.update(self.tasks[name], completed=done, status=status)


def make_progress() -> Progress:
    """Return bars if stdout is a terminal, otherwise lines; nothing at log level quiet."""
    if log_level() == QUIET:
        return Progress()
    return BarProgress() if sys.stdout.isatty() else PlainProgress()
