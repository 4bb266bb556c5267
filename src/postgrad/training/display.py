"""What a person sees of a run: a live panel on a terminal or in a notebook, lines elsewhere."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from postgrad.config.schema import Config
from postgrad.log_level import DEBUG, QUIET, log_level
from postgrad.phases import PhaseLines, describe, duration, format_count, print_line
from postgrad.training.report import Reporter
from postgrad.types import Batch

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48
PROGRESS_WIDTH = 30
NOTEBOOK_UPDATE_S = 0.25  # between two drawings of the panel in a notebook, at least
CURVE_METRICS = ("reward/mean", "sft/loss", "loss")  # the panel draws the first that exists
NO_SIGNAL = "no learning signal: all rewards equal"

FAILURES = "reward/failures"  # shown if there are any
# (metric, label, format) of the numbers that are shown
SHOWN_METRICS = (
    ("reward/mean", "reward", ".3f"),
    ("sft/loss", "sft loss", ".4f"),
    ("dpo/accuracy", "preferred", ".3f"),
    ("dpo/margin", "margin", ".3f"),
    ("kto/accuracy", "preferred", ".3f"),
    ("reward_model/accuracy", "preferred", ".3f"),
    ("reward_model/margin", "margin", ".3f"),
    (FAILURES, "not scored", ".0f"),
    ("response/length", "length", ".1f"),
    ("response/truncated", "truncated", ".0%"),
    ("entropy", "entropy", ".3f"),
    ("grad_norm", "grad", ".3g"),
    ("tokens_per_second", "tok/s", ".0f"),
)


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


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


# ---- lines


class QuietReporter(Reporter):
    """Prints notes only: what is unusual about a run, such as dropped problems and warnings."""

    def note(self, text: str) -> None:
        print_line(text)


class LineReporter(QuietReporter):
    """Prints one line per step, for logs and pipes."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self.phases = PhaseLines()
        self.phase = self.phases.show

    def started(self, folder: Path, config: Config, start: int) -> None:
        # The line of a step says more than those of its stages, unless a stage takes long.
        self.phases.is_patient = True
        self.clock.start(start, config.training.steps)
        model = config.model
        print_line(
            f"{opening(start, config.training.steps)}: {folder} ({config.method.name}, "
            f"{model.path}, {model.device} {model.dtype}, {format_count(model.threads, 'thread')})"
        )

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        number = int(metrics["step"])
        self.clock.update(number)
        parts = [f"step {number}/{self.clock.total}", *format_metrics(metrics)]
        parts.append(f"left {self.clock.time_left()}")
        if trains_nothing(metrics):
            parts.append(NO_SIGNAL)
        print_line("  ".join(parts))

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        print_line(f"step {number} validation  {format_validation(metrics)}")


class DebugReporter(LineReporter):
    """Prints also the times of a step's stages, and checkpoints."""

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


# ---- the panel


class PanelReporter(Reporter):
    """A live panel: the reward's curve, a few metrics, two responses with their rewards."""

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.clock = StepClock()
        self.metrics: dict[str, float] = {}
        self.curve: list[float] = []
        self.validations: list[tuple[int, dict[str, float]]] = []
        self.samples: list[tuple[str, float, int]] = []
        self.message = ""
        self.phases = PhaseLines()
        self.is_shown = False
        self.now = ""  # the phase that the step is in
        self.live = Live(get_renderable=self.panel, console=Console(), refresh_per_second=4)

    def started(self, folder: Path, config: Config, start: int) -> None:
        self.clock.start(start, config.training.steps)
        self.title = self.title or str(folder)
        self.message = "" if start == 0 else opening(start, config.training.steps)
        self.is_shown = True
        self.show()

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        self.clock.update(int(metrics["step"]))
        self.metrics = metrics
        name = next((name for name in CURVE_METRICS if name in metrics), "")
        self.curve.append(metrics.get(name, 0.0))
        self.samples = pick_samples(batch)
        if trains_nothing(metrics):
            self.message = NO_SIGNAL
        elif self.message == NO_SIGNAL:
            self.message = ""
        self.refresh()

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        self.validations.append((number, metrics))
        self.refresh()

    def saved(self, path: Path) -> None:
        self.message = f"saved {path.name}"
        self.refresh()

    def note(self, text: str) -> None:
        """Print the note above the panel, where it stays."""
        self.live.console.print(text, markup=False, highlight=False)

    def phase(self, phase: str, done: int, total: int) -> None:
        """Show the phase in the panel; before the panel starts, as a line."""
        if not self.is_shown:
            self.phases.show(phase, done, total)
            return
        self.now = describe(phase, done, total)
        self.refresh()

    def stopped(self) -> None:
        self.now = ""
        self.hide()

    def show(self) -> None:
        """Start to draw the panel."""
        self.live.start()

    def refresh(self) -> None:
        """Draw the panel again soon: a thread does so four times per second."""

    def hide(self) -> None:
        """Draw the panel for the last time."""
        self.live.stop()

    def panel(self) -> Panel:
        """Return the panel as it is now."""
        is_reward = "reward/mean" in self.metrics or not self.metrics
        numbers = {name: self.metrics[name] for name in self.metrics if name not in CURVE_METRICS}
        text = Text()
        text.append(f"{'reward' if is_reward else 'loss':<8}", style="bold")
        text.append(f"{self.curve[-1]:.3f} " if self.curve else "      ")
        text.append(sparkline(self.curve) + "\n", style="green")
        text.append("   ".join(format_metrics(numbers)) + "\n", style="dim")
        for number, metrics in self.validations[:1] + self.validations[1:][-1:]:
            text.append(f"held out, step {number:<5} {format_validation(metrics)}\n")
        for response, reward, length in self.samples:
            text.append(f"{reward:+.2f} ", style="green" if reward > 0 else "red")
            text.append(f"{one_line(response, 90)} ({length} tokens)\n", style="dim")
        done = self.clock.number / max(1, self.clock.total)
        states = "   ".join(filter(None, [self.now, self.message]))
        text.append(
            f"step {self.clock.number}/{self.clock.total} "
            f"[{'━' * round(PROGRESS_WIDTH * done):<{PROGRESS_WIDTH}}] "
            f"left {self.clock.time_left()}   {states}"
        )
        return Panel(text, title=self.title, title_align="left")


class NotebookReporter(PanelReporter):
    """The panel as the output of a notebook's cell, replaced in place."""

    handle: Any = None
    drawn_at = 0.0

    def note(self, text: str) -> None:
        print_line(text)

    def show(self) -> None:
        from IPython.display import display

        self.handle = display(self.panel(), display_id=True)

    def refresh(self) -> None:
        if self.handle is not None and time.monotonic() - self.drawn_at > NOTEBOOK_UPDATE_S:
            self.drawn_at = time.monotonic()
            self.handle.update(self.panel())

    def hide(self) -> None:
        if self.handle is not None:
            self.handle.update(self.panel())


# ---- numbers as text


class StepClock:
    """Counts steps and estimates the time left from the median of the last 20 steps."""

    def __init__(self) -> None:
        self.start(0, 0)

    def start(self, number: int, total: int) -> None:
        self.total = total
        self.number = number
        self.times = [time.monotonic()]

    def update(self, number: int) -> None:
        self.number = number
        self.times = [*self.times[-20:], time.monotonic()]

    def time_left(self) -> str:
        """Return the time left, such as 3m05s, or "?" before the first step."""
        pairs = zip(self.times, self.times[1:], strict=False)
        durations = sorted(end - begin for begin, end in pairs)
        if not durations:
            return "?"
        median = durations[len(durations) // 2]
        return duration(median * (self.total - self.number))


def opening(start: int, num_steps: int) -> str:
    """Return how a command begins whose run has a checkpoint of step `start`; 0: a new run."""
    if start >= num_steps:
        return "already finished"
    return f"continuing at step {start}" if start else "starting"


def sparkline(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Return values as a row of at most `width` bars, newest at the right.

    A bar is the mean of equally many consecutive values.
    """
    if not values:
        return ""
    share = -(-len(values) // width)  # values per bar, rounded up
    means = []
    for start in range(0, len(values), share):
        chunk = values[start : start + share]
        means.append(sum(chunk) / len(chunk))
    low = min(means)
    high = max(means)
    if high == low:
        return BARS[0] * len(means)
    return "".join(BARS[round((mean - low) / (high - low) * 7)] for mean in means)


def pick_samples(batch: Batch) -> list[tuple[str, float, int]]:
    """Return (text, reward, tokens) of the best and the worst response of the first group."""
    if "text" not in batch.rows or not len(batch):
        return []
    in_first_group = batch.rows["group"] == batch.rows["group"][0]
    rewards = batch.rows["reward"]
    rows = [row for row in range(len(batch)) if in_first_group[row]]
    rows.sort(key=lambda row: -float(rewards[row]))
    question = one_line(batch.rows["question"][rows[0]], 30)
    samples = []
    for row in dict.fromkeys([rows[0], rows[-1]]):  # one sample if the group has one row
        text = f"{question} ▸ {batch.rows['text'][row]}"
        samples.append((text, float(rewards[row]), int(batch.response.lengths[row])))
    return samples


def one_line(text: str, width: int) -> str:
    """Return the text on one line of at most `width` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def trains_nothing(metrics: dict[str, float]) -> bool:
    """Return whether no row of a step with rewards had an advantage."""
    return "reward/mean" in metrics and metrics.get("advantages/rows_with_signal") == 0.0


def format_metrics(metrics: dict[str, float]) -> list[str]:
    """Return `label value` of the shown metrics that exist."""
    shown = [one for one in SHOWN_METRICS if one[0] in metrics]
    if not metrics.get(FAILURES):
        shown = [one for one in shown if one[0] != FAILURES]
    return [f"{label} {metrics[name]:{form}}" for name, label, form in shown]


def format_validation(metrics: dict[str, float]) -> str:
    """Return `name value` of a validation's metrics on one line."""
    names = {name: name.removeprefix("validation/").replace("_", " ") for name in metrics}
    return "  ".join(f"{names[name]} {value:.3f}" for name, value in metrics.items())
