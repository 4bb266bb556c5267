"""What the terminal shows during a run: a panel on a terminal, one line per step elsewhere."""

import time
from pathlib import Path
from typing import Any

from postgrad.config.schema import Config
from postgrad.phases import PhaseLines, describe, print_line
from postgrad.types import Batch

BARS = "▁▂▃▄▅▆▇█"
PROGRESS_WIDTH = 30

# (metric, label, format) of the numbers that the line and the panel show
SHOWN_METRICS = (
    ("reward/mean", "reward", ".3f"),
    ("sft/loss", "sft loss", ".4f"),
    ("dpo/accuracy", "preferred", ".3f"),
    ("dpo/margin", "margin", ".3f"),
    ("kto/accuracy", "preferred", ".3f"),
    ("reward_model/accuracy", "preferred", ".3f"),
    ("reward_model/margin", "margin", ".3f"),
    ("response/length", "length", ".1f"),
    ("response/truncated", "truncated", ".0%"),
    ("entropy", "entropy", ".3f"),
    ("grad_norm", "grad", ".3g"),
    ("tokens_per_second", "tok/s", ".0f"),
)
UPDATE_S = 0.25  # between two drawings of the panel within a phase, at least
CURVE_METRICS = ("reward/mean", "sft/loss", "loss")  # the panel draws the first that exists


NO_SIGNAL = "no learning signal: all rewards equal"


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


class LineReporter(Reporter):
    """Prints one line per step, for logs and pipes; at most one per `every_s` seconds."""

    def __init__(self, every_s: float = 0.0) -> None:
        self.every_s = every_s
        self.last_printed = 0.0
        self.progress = Progress()
        self.phases = PhaseLines()
        self.phase = self.phases.show

    def started(self, folder: Path, config: Config, start: int) -> None:
        # The line of a step says more than those of its stages, unless a stage takes long.
        self.phases.is_patient = True
        self.progress.start(start, config.training.steps)
        action = opening(start, config.training.steps)
        model = config.model
        print_line(
            f"{action}: {folder} ({config.method.name}, {model.path}, "
            f"{model.device} {model.dtype}, {counted(model.threads, 'thread')})"
        )

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        number = int(metrics["step"])
        self.progress.update(number)
        now = time.monotonic()
        if number != self.progress.total and now - self.last_printed < self.every_s:
            return
        self.last_printed = now
        parts = [f"step {number}/{self.progress.total}"]
        parts += format_metrics(metrics, SHOWN_METRICS)
        parts.append(f"left {self.progress.time_left()}")
        if trains_nothing(metrics):
            parts.append(NO_SIGNAL)
        print_line("  ".join(parts))

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        parts = [
            f"{name.removeprefix('validation/')} {value:.3f}" for name, value in metrics.items()
        ]
        print_line(f"step {number} validation  " + "  ".join(parts))

    def note(self, text: str) -> None:
        print_line(text)


class Progress:
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


class PanelReporter(Reporter):
    """A live panel: the reward's curve, a few metrics, two sampled responses with rewards."""

    def __init__(self, title: str = "") -> None:
        from rich.console import Console
        from rich.live import Live

        self.title = title
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        self.curve: list[float] = []
        self.validations: list[tuple[int, dict[str, float]]] = []
        self.samples: list[tuple[str, float, int]] = []
        self.message = ""
        self.live = Live(console=Console(stderr=False), refresh_per_second=4, transient=False)
        self.drawn_at = 0.0
        self.phases = PhaseLines()
        self.now = ""  # the phase that the step is in

    def started(self, folder: Path, config: Config, start: int) -> None:
        self.progress.start(start, config.training.steps)
        self.title = self.title or str(folder)
        self.message = "" if start == 0 else opening(start, config.training.steps)
        self.live.start()
        self.draw()

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        self.progress.update(int(metrics["step"]))
        self.metrics = metrics
        name = next((name for name in CURVE_METRICS if name in metrics), "")
        self.curve.append(metrics.get(name, 0.0))
        self.samples = pick_samples(batch)
        if trains_nothing(metrics):
            self.message = NO_SIGNAL
        elif self.message == NO_SIGNAL:
            self.message = ""
        self.draw()

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        self.validations.append((number, metrics))
        self.draw()

    def saved(self, path: Path) -> None:
        self.message = f"saved {path.name}"
        self.draw()

    def note(self, text: str) -> None:
        """Print the note above the panel, where it stays."""
        self.live.console.print(text, markup=False, highlight=False)

    def phase(self, phase: str, done: int, total: int) -> None:
        """Show the phase in the panel; before the panel starts, as a line."""
        if not self.live.is_started:
            self.phases.show(phase, done, total)
            return
        self.now = describe(phase, done, total)
        if time.monotonic() - self.drawn_at > UPDATE_S:
            self.draw()

    def stopped(self) -> None:
        self.now = ""
        self.draw()
        self.live.stop()

    def draw(self) -> None:
        """Draw the panel again."""
        from rich.panel import Panel
        from rich.text import Text

        self.drawn_at = time.monotonic()
        text = Text()
        self._add_curve(text)
        self._add_validations(text)
        for response, reward, length in self.samples:
            text.append(f"{reward:+.2f} ", style="green" if reward > 0 else "red")
            text.append(f"{one_line(response, 90)} ({length} tokens)\n", style="dim")
        done = self.progress.number / max(1, self.progress.total)
        bar = "━" * round(PROGRESS_WIDTH * done)
        states = [self.now, self.message]
        text.append(
            f"step {self.progress.number}/{self.progress.total} [{bar:<{PROGRESS_WIDTH}}] "
            f"left {self.progress.time_left()}   {'   '.join(filter(None, states))}"
        )
        self.live.update(Panel(text, title=self.title, title_align="left"))

    def _add_curve(self, text: Any) -> None:
        is_reward = "reward/mean" in self.metrics or not self.metrics
        text.append(f"{'reward' if is_reward else 'loss':<8}", style="bold")
        text.append(f"{self.curve[-1]:.3f} " if self.curve else "      ")
        text.append(sparkline(self.curve) + "\n", style="green")
        numbers = format_metrics(self.metrics, SHOWN_METRICS[2:])
        text.append("   ".join(numbers) + "\n", style="dim")

    def _add_validations(self, text: Any) -> None:
        """Add the first and the last validation."""
        shown = self.validations[:1]
        if len(self.validations) > 1:
            shown = [*shown, self.validations[-1]]
        for number, metrics in shown:
            parts = []
            for name, value in metrics.items():
                label = name.removeprefix("validation/").replace("_", " ")
                parts.append(f"{label} {value:.3f}")
            text.append(f"held out, step {number:<5} {'   '.join(parts)}\n")


def opening(start: int, num_steps: int) -> str:
    """How a command begins whose run has a checkpoint of step `start`; 0 for a new run."""
    if start >= num_steps:
        return "already finished"
    return f"continuing at step {start}" if start else "starting"


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as `1 step` and `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Return seconds as 1h02m, 3m05s or 12s."""
    total = round(seconds)
    hours, minutes = divmod(total // 60, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{total % 60:02d}s"
    return f"{total}s"


def sparkline(values: list[float], width: int = 48) -> str:
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


def format_metrics(metrics: dict[str, float], shown: tuple[tuple[str, str, str], ...]) -> list[str]:
    """Return `label value` of the shown metrics that exist."""
    return [f"{label} {metrics[name]:{form}}" for name, label, form in shown if name in metrics]
