"""Which reporter shows a run here: a notebook's panel, a terminal's panel, or lines."""

import sys

from postgrad.training.notebook import NotebookReporter, in_notebook
from postgrad.training.report import LineReporter, PanelReporter, Reporter


def make_reporter(title: str = "") -> Reporter:
    """Return a panel in a notebook or on a terminal, otherwise one line per step."""
    if in_notebook():
        return NotebookReporter(title)
    return PanelReporter(title) if sys.stdout.isatty() else LineReporter()
