"""The live panel of a run in a Jupyter notebook: progress, curve, metrics and two samples."""

import sys
import time
from html import escape
from pathlib import Path
from typing import Any

from postgrad.config.schema import Config
from postgrad.training.report import (
    CURVE_METRICS,
    SHOWN_METRICS,
    Progress,
    Reporter,
    format_metrics,
    one_line,
    opening,
    pick_samples,
)
from postgrad.types import Batch

UPDATE_S = 0.25  # time between two updates of the panel, at least
CURVE_WIDTH = 480
CURVE_HEIGHT = 80
MAX_POINTS = 240
STYLE = "font-family:sans-serif;font-size:13px;border:1px solid #8884;padding:8px;max-width:720px"


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class NotebookReporter(Reporter):
    """Shows one panel and updates it in place. As plain text it is a few lines."""

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        self.curve: list[float] = []
        self.curve_name = "reward"
        self.validations: list[tuple[int, dict[str, float]]] = []
        self.samples: list[tuple[str, float, int]] = []
        self.message = ""
        self.handle: Any = None
        self.updated_at = 0.0

    def started(self, folder: Path, config: Config, start: int) -> None:
        from IPython.display import display

        self.progress.start(start, config.training.steps)
        self.title = self.title or str(folder)
        self.message = "" if start == 0 else opening(start, config.training.steps)
        self.handle = display(self, display_id=True)

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        self.progress.update(int(metrics["step"]))
        self.metrics = metrics
        name = next((name for name in CURVE_METRICS if name in metrics), "")
        self.curve_name = name or "loss"
        self.curve.append(metrics.get(name, 0.0))
        self.samples = pick_samples(batch)
        self.update()

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        self.validations.append((number, metrics))
        self.update()

    def saved(self, path: Path) -> None:
        self.message = f"saved {path.name}"
        self.update()

    def note(self, text: str) -> None:
        self.message = text
        self.update()

    def stopped(self) -> None:
        self.update(now=True)

    def update(self, now: bool = False) -> None:
        """Draw the panel again, unless it was drawn a moment ago."""
        if self.handle is not None and (now or time.monotonic() - self.updated_at > UPDATE_S):
            self.updated_at = time.monotonic()
            self.handle.update(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/html": self.to_html(), "text/plain": self.to_text()}

    def to_text(self) -> str:
        """Return the panel as plain text."""
        lines = [f"{self.title}: {self._state()}", "  ".join(self._numbers())]
        lines += [f"step {number} validation  {text}" for number, text in self._validation_texts()]
        lines += [f"{reward:+.2f} {one_line(text, 90)}" for text, reward, _ in self.samples]
        return "\n".join(line for line in lines if line)

    def to_html(self) -> str:
        """Return the panel as HTML. All text of the model is escaped."""
        done = 100 * self.progress.number / max(1, self.progress.total)
        parts = [
            f"<b>{escape(self.title)}</b> {escape(self._state())}",
            '<div style="background:#8883;height:6px;margin:6px 0">'
            f'<div style="background:#3356c4;height:6px;width:{done:.1f}%"></div></div>',
        ]
        if self.curve:
            parts.append(f"{escape(self.curve_name)} {self.curve[-1]:.3f}{curve_svg(self.curve)}")
        parts.append(f"<div>{escape('   '.join(self._numbers()))}</div>")
        for number, text in self._validation_texts():
            parts.append(f"<div>validation after step {number}: {escape(text)}</div>")
        for text, reward, length in self.samples:
            color = "#2a8f6a" if reward > 0 else "#c0392b"
            parts.append(
                f'<div style="font-family:monospace"><span style="color:{color}">{reward:+.2f}'
                f"</span> {escape(one_line(text, 200))} ({length} tokens)</div>"
            )
        return f'<div style="{STYLE}">{"".join(parts)}</div>'

    def _state(self) -> str:
        left = self.progress.time_left()
        state = f"step {self.progress.number}/{self.progress.total}, left {left}"
        return f"{state}   {self.message}" if self.message else state

    def _numbers(self) -> list[str]:
        return format_metrics(self.metrics, SHOWN_METRICS)

    def _validation_texts(self) -> list[tuple[int, str]]:
        """(step, text) of the first and the last validation."""
        shown = self.validations[:1] + self.validations[1:][-1:]
        texts: list[tuple[int, str]] = []
        for number, metrics in shown:
            values = [
                f"{name.removeprefix('validation/').replace('_', ' ')} {value:.3f}"
                for name, value in metrics.items()
            ]
            texts.append((number, "  ".join(values)))
        return texts


def curve_svg(values: list[float]) -> str:
    """Return a curve as SVG; many values are thinned out by means of equal chunks."""
    size = -(-len(values) // MAX_POINTS)
    means = [
        sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)
    ]
    low = min(means)
    value_range = (max(means) - low) or 1.0
    points: list[str] = []
    for i, mean in enumerate(means):
        x = CURVE_WIDTH * i / max(1, len(means) - 1)
        y = CURVE_HEIGHT - 2 - (CURVE_HEIGHT - 4) * (mean - low) / value_range
        points.append(f"{x:.1f},{y:.1f}")
    return (
        f'<svg width="{CURVE_WIDTH}" height="{CURVE_HEIGHT}" style="display:block">'
        f'<polyline points="{" ".join(points)}" fill="none" stroke="#3356c4"/></svg>'
    )
