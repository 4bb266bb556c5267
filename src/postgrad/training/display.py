"""Which reporter shows a run here: a notebook's panel, a terminal's panel, or lines."""

import sys
from pathlib import Path

from postgrad.log_level import DEBUG, QUIET, log_level
from postgrad.phases import print_line
from postgrad.training.notebook import NotebookReporter, in_notebook
from postgrad.training.report import LineReporter, PanelReporter, Reporter
from postgrad.types import Batch


class QuietReporter(Reporter):
    """Prints notes only: what is unusual about a run, such as dropped problems and warnings."""

    def note(self, text: str) -> None:
        print_line(text)


class DebugReporter(LineReporter):
    """Prints the line of each step, the times of its stages, and checkpoints."""

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        super().step(metrics, batch)
        stages = [
            f"{name.removeprefix('stage/').removesuffix('_s')} {value:.3f}"
            for name, value in metrics.items()
            if name.startswith("stage/")
        ]
        print_line(f"  seconds: {'  '.join(stages)}")

    def saved(self, path: Path) -> None:
        print_line(f"  saved {path}")


def make_reporter(title: str = "") -> Reporter:
    """Return the reporter for the log level and this place.

    Normally a panel in a notebook or on a terminal, otherwise one line per step. Raises
    ConfigError for an unknown log level.
    """
    level = log_level()
    if level == QUIET:
        return QuietReporter()
    if level == DEBUG:
        return DebugReporter()
    if in_notebook():
        return NotebookReporter(title)
    return PanelReporter(title) if sys.stdout.isatty() else LineReporter()
