"""What a person sees while a run goes on: a calm panel in a terminal, plain lines elsewhere."""

import sys
import time
from pathlib import Path

from postgrad.config.schema import Config
from postgrad.types import Batch

BARS = "▁▂▃▄▅▆▇█"


class Reporter:
    """Told of everything a run does; this one says nothing."""

    def started(self, folder: Path, config: Config, start: int) -> None: ...

    def step(self, metrics: dict[str, float], batch: Batch) -> None: ...

    def validated(self, number: int, metrics: dict[str, float]) -> None: ...

    def saved(self, path: Path) -> None: ...

    def note(self, text: str) -> None: ...

    def stopped(self) -> None: ...


class MultiReporter(Reporter):
    """Several reporters as one: each is told in turn."""

    def __init__(self, *voices: Reporter) -> None:
        self.voices = voices

    def started(self, folder: Path, config: Config, start: int) -> None:
        for voice in self.voices:
            voice.started(folder, config, start)

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        for voice in self.voices:
            voice.step(metrics, batch)

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        for voice in self.voices:
            voice.validated(number, metrics)

    def saved(self, path: Path) -> None:
        for voice in self.voices:
            voice.saved(path)

    def note(self, text: str) -> None:
        for voice in self.voices:
            voice.note(text)

    def stopped(self) -> None:
        for voice in self.voices:
            voice.stopped()


class Plain(Reporter):
    """One line a step, for logs and pipes."""

    def __init__(self, every_s: float = 0.0) -> None:
        self.every_s, self.last = every_s, 0.0
        self.clock = Clock()

    def started(self, folder: Path, config: Config, start: int) -> None:
        self.clock.start(start, config.training.steps)
        verb = f"continuing at step {start}" if start else "starting"
        model = config.model
        self.note(
            f"{verb}: {folder} ({config.method.name}, {model.path}, {model.device} {model.dtype}, {model.threads} threads)"
        )

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        self.clock.tick(int(metrics["step"]))
        final = metrics["step"] == self.clock.total
        if not final and time.monotonic() - self.last < self.every_s:
            return
        self.last = time.monotonic()
        parts = [f"step {int(metrics['step'])}/{self.clock.total}"]
        parts += [
            f"{label} {metrics[name]:{form}}" for name, label, form in SHOWN if name in metrics
        ]
        print("  ".join([*parts, f"left {self.clock.left()}"]), flush=True)

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        print(
            f"step {number} validation  "
            + "  ".join(f"{k.removeprefix('validation/')} {v:.3f}" for k, v in metrics.items()),
            flush=True,
        )

    def note(self, text: str) -> None:
        print(text, flush=True)


# metric, label, format: the same few numbers in the line and in the panel
SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("sft/loss", "sft loss", ".4f"),
    ("dpo/accuracy", "preferred", ".3f"),
    ("dpo/margin", "margin", ".3f"),
    ("response/length", "length", ".1f"),
    ("entropy", "entropy", ".3f"),
    ("grad_norm", "grad", ".3g"),
    ("tokens_per_second", "tok/s", ".0f"),
)


class Clock:
    """Progress and time left, from the median of the last steps."""

    def __init__(self) -> None:
        self.total, self.number, self.marks = 0, 0, [time.monotonic()]

    def start(self, number: int, total: int) -> None:
        self.total, self.number, self.marks = total, number, [time.monotonic()]

    def tick(self, number: int) -> None:
        self.number = number
        self.marks = [*self.marks[-20:], time.monotonic()]

    def left(self) -> str:
        gaps = sorted(b - a for a, b in zip(self.marks, self.marks[1:], strict=False))
        return duration(gaps[len(gaps) // 2] * (self.total - self.number)) if gaps else "?"


def duration(seconds: float) -> str:
    """1h02m, 3m05s or 12s."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return (
        f"{hours}h{minutes:02d}m"
        if hours
        else f"{minutes}m{whole % 60:02d}s"
        if minutes
        else f"{whole}s"
    )


def sparkline(values: list[float], width: int = 48) -> str:
    """Values as a row of bars, newest at the right; each bar is the mean of its share."""
    if not values:
        return ""
    share = max(1, -(-len(values) // width))
    means = [
        sum(values[i : i + share]) / len(values[i : i + share])
        for i in range(0, len(values), share)
    ]
    low, high = min(means), max(means)
    return "".join(
        BARS[round((v - low) / (high - low) * 7)] if high > low else BARS[0] for v in means
    )


class Panel(Reporter):
    """A steady panel: the reward's curve, the numbers that matter, two sampled responses with their scores."""

    def __init__(self, title: str = "") -> None:
        from rich.console import Console
        from rich.live import Live

        self.title, self.clock = title, Clock()
        self.metrics: dict[str, float] = {}
        self.curve: list[float] = []
        self.validation: list[tuple[int, dict[str, float]]] = []
        self.samples: list[tuple[str, float, int]] = []
        self.message = ""
        self.live = Live(console=Console(stderr=False), refresh_per_second=4, transient=False)

    def started(self, folder: Path, config: Config, start: int) -> None:
        self.clock.start(start, config.training.steps)
        self.title = self.title or str(folder)
        self.message = f"continuing at step {start}" if start else ""
        self.live.start()
        self.draw()

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        self.clock.tick(int(metrics["step"]))
        self.metrics = metrics
        name = next(
            (name for name in ("reward/mean", "sft/loss", "loss") if name in metrics), ""
        )  # dpo has the plain loss alone
        self.curve.append(metrics.get(name, 0.0))
        self.samples = pick_samples(batch)
        self.draw()

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        self.validation.append((number, metrics))
        self.draw()

    def saved(self, path: Path) -> None:
        self.message = f"saved {path.name}"
        self.draw()

    def note(self, text: str) -> None:
        self.message = text
        self.draw()

    def stopped(self) -> None:
        self.live.stop()

    def draw(self) -> None:
        from rich.panel import Panel as Box
        from rich.text import Text

        text = Text()
        m = self.metrics
        label = "reward" if "reward/mean" in m or not m else "loss"
        text.append(f"{label:<8}", style="bold")
        text.append(f"{self.curve[-1]:.3f} " if self.curve else "      ")
        text.append(sparkline(self.curve) + "\n", style="green")
        numbers = [f"{label} {m[name]:{form}}" for name, label, form in SHOWN[2:] if name in m]
        text.append("   ".join(numbers) + "\n", style="dim")
        for number, values in (
            [self.validation[0], self.validation[-1]][: len(self.validation)]
            if self.validation
            else []
        ):
            shown = "   ".join(
                f"{k.removeprefix('validation/').replace('_', ' ')} {v:.3f}"
                for k, v in values.items()
            )
            text.append(f"held out, step {number:<5} {shown}\n")
        for response, reward, length in self.samples:
            text.append(f"{reward:+.2f} ", style="green" if reward > 0 else "red")
            text.append(f"{one_line(response, 90)} ({length} tokens)\n", style="dim")
        done = self.clock.number / max(1, self.clock.total)
        text.append(
            f"step {self.clock.number}/{self.clock.total} [{'━' * round(30 * done):<30}] left {self.clock.left()}   {self.message}"
        )
        self.live.update(Box(text, title=self.title, title_align="left"))


def pick_samples(batch: Batch) -> list[tuple[str, float, int]]:
    """Two responses with their scores: the best and the worst of the step's first group."""
    if "text" not in batch.rows or not len(batch):
        return []
    first = batch.rows["group"] == batch.rows["group"][0]
    rows = sorted(
        (i for i in range(len(batch)) if first[i]), key=lambda i: -float(batch.rows["reward"][i])
    )
    question = one_line(batch.rows["question"][rows[0]], 30)
    picked = dict.fromkeys([rows[0], rows[-1]])
    texts = [f"{question} ▸ {batch.rows['text'][i]}" for i in picked]
    return [
        (text, float(batch.rows["reward"][i]), int(batch.response.lengths[i]))
        for text, i in zip(texts, picked, strict=True)
    ]


def one_line(text: str, width: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def make_reporter(title: str = "") -> Reporter:
    """The panel on a terminal, plain lines elsewhere."""
    return Panel(title) if sys.stdout.isatty() else Plain()
