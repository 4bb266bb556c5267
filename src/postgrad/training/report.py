"""What a run reports while it trains; display.py shows it, events.py and trackers.py keep it."""

from pathlib import Path

from postgrad.config.schema import Config
from postgrad.types import Batch


class Reporter:
    """Receives what a run does. This one ignores everything."""

    def started(self, folder: Path, config: Config, start: int) -> None:
        """The run starts after step `start`."""

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        """A step is done."""

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        """The model after step `number` was validated."""

    def saved(self, path: Path) -> None:
        """A checkpoint is complete."""

    def note(self, text: str) -> None:
        """Something else happened."""

    def phase(self, phase: str, done: int, total: int) -> None:
        """The run does this now; `done` of `total` if the phase counts."""

    def ended(self, reached: bool, interrupted: bool) -> None:
        """The run ended without an error."""

    def stopped(self) -> None:
        """Always the last call, also after an error."""


class MultiReporter(Reporter):
    """Passes every call to several reporters, in order."""

    def __init__(self, *reporters: Reporter) -> None:
        self.reporters = reporters

    def started(self, folder: Path, config: Config, start: int) -> None:
        for reporter in self.reporters:
            reporter.started(folder, config, start)

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        for reporter in self.reporters:
            reporter.step(metrics, batch)

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        for reporter in self.reporters:
            reporter.validated(number, metrics)

    def saved(self, path: Path) -> None:
        for reporter in self.reporters:
            reporter.saved(path)

    def note(self, text: str) -> None:
        for reporter in self.reporters:
            reporter.note(text)

    def phase(self, phase: str, done: int, total: int) -> None:
        for reporter in self.reporters:
            reporter.phase(phase, done, total)

    def ended(self, reached: bool, interrupted: bool) -> None:
        for reporter in self.reporters:
            reporter.ended(reached, interrupted)

    def stopped(self) -> None:
        for reporter in self.reporters:
            reporter.stopped()
