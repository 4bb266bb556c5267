"""What a person sees while a model answers: a bar in a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any

from postgrad.evaluation.plan import Plan
from postgrad.training.report import duration

EVERY_S = 10.0  # between two lines where there is no terminal


class Progress:
    """Told of everything an evaluation does; this one says nothing. A context that lasts while problems are answered."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None: ...

    def loading(self, plan: Plan) -> None: ...

    def begin(self, name: str, total: int, done: int) -> None: ...

    def advance(self, name: str, done: int, right: float, rate: float) -> None: ...


def describe(plan: Plan) -> str:
    """The evaluation in one line."""
    config = plan.config
    count = sum(len(problems) for problems in plan.sets.values())
    how = (
        "greedy"
        if not config.rollout.temperature
        else f"{config.rollout.samples} at temperature {config.rollout.temperature:g}"
    )
    model = config.model
    return f"{model.path}: {count} problems, {how}, {config.rollout.engine} on {model.device} {model.dtype} -> {plan.folder}"


class Plain(Progress):
    """Lines for logs and pipes."""

    def __init__(self) -> None:
        self.total, self.first, self.began, self.last = 0, 0, 0.0, 0.0

    def loading(self, plan: Plan) -> None:
        print(describe(plan), flush=True)

    def begin(self, name: str, total: int, done: int) -> None:
        self.total, self.first, self.began = total, done, time.monotonic()
        if done:
            print(f"{name}: {done} of {total} problems are answered already", flush=True)

    def advance(self, name: str, done: int, right: float, rate: float) -> None:
        now = time.monotonic()
        if done < self.total and now - self.last < EVERY_S:
            return
        self.last = now
        left = (now - self.began) / (done - self.first) * (self.total - done)
        print(
            f"{name}: {done}/{self.total}  right {right:.3f}  {rate:.0f} tok/s  left {duration(left)}",
            flush=True,
        )


class Bar(Progress):
    """One bar a set."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
        )
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> "Bar":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def loading(self, plan: Plan) -> None:
        self.bars.console.print(describe(plan), highlight=False, markup=False)

    def begin(self, name: str, total: int, done: int) -> None:
        self.tasks[name] = self.bars.add_task(name, total=total, completed=done, said="")

    def advance(self, name: str, done: int, right: float, rate: float) -> None:
        self.bars.update(
            self.tasks[name], completed=done, said=f"right {right:.3f}  {rate:.0f} tok/s"
        )


def make_progress() -> Progress:
    return Bar() if sys.stdout.isatty() else Plain()
