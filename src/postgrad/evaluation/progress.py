"""Progress of an evaluation: a bar per set in a terminal, a line every few seconds elsewhere."""

import sys
import time
from typing import TYPE_CHECKING, Any

from postgrad.evaluation.plan import Plan
from postgrad.log_level import QUIET, log_level
from postgrad.phases import duration

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

INTERVAL_S = 10.0  # between two lines when stdout is not a terminal


class Progress:
    """Shows the progress of an evaluation; nothing at log level quiet, or with is_shown=False.

    Use it as a context manager around the generation.
    """

    def __init__(self, is_shown: bool = True) -> None:
        self.is_shown = is_shown and log_level() != QUIET
        self.bars = _make_bars() if self.is_shown and sys.stdout.isatty() else None
        self.task: Any = None  # the bar of the set
        self.total = 0
        self.num_before = 0
        self.began = 0.0
        self.last_line = 0.0

    def __enter__(self) -> "Progress":
        if self.bars is not None:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars is not None:
            self.bars.stop()

    def loading(self, plan: Plan) -> None:
        """Say that the model is about to be loaded."""
        self.note(describe(plan))

    def note(self, text: str) -> None:
        """Print a line."""
        if self.bars is not None:
            self.bars.console.print(text, highlight=False, markup=False)
        elif self.is_shown:
            print(text, flush=True)

    def begin(self, name: str, total: int, done: int) -> None:
        """Say that a set of `total` problems begins; `done` of them have results already."""
        self.total = total
        self.num_before = done
        self.began = time.monotonic()
        if self.bars is not None:
            self.task = self.bars.add_task(name, total=total, completed=done, status="")
        elif done:
            self.note(f"{name}: {done} of {total} problems already done")

    def advance(
        self, name: str, done: int, accuracy: float | None, tokens_per_second: float
    ) -> None:
        """`done` problems of the set have results; `accuracy` is the fraction right so far.

        It is None if the responses are not scored.
        """
        right = "" if accuracy is None else f"right {accuracy:.3f}  "
        status = f"{right}{tokens_per_second:.0f} tok/s"
        if self.bars is not None:
            self.bars.update(self.task, completed=done, status=status)
            return
        now = time.monotonic()
        if done < self.total and now - self.last_line < INTERVAL_S:
            return
        self.last_line = now
        seconds_per_problem = (now - self.began) / (done - self.num_before)
        remaining = duration(seconds_per_problem * (self.total - done))
        self.note(f"{name}: {done}/{self.total}  {status}  {remaining} left")


def _make_bars() -> "Bars":
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )


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
