"""Runs as image files: the page's charts, and the demo's picture with sampled answers."""

import fnmatch
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from postgrad.data.rollout_folder import PICTURES, rollout_files
from postgrad.errors import Unreadable, Unwritable, first_line
from postgrad.view.metrics import Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = Path(__file__).parent / "assets" / "panels.json"
# The page's palette: a run has the same color on the page and in an image.
COLORS = ("#3356c4", "#d9762b", "#2a8f6a", "#b0418f", "#7a6a1e", "#2a93b5", "#8a5cd0", "#6b7280")
POSTER_CURVES = (
    ("reward/mean", "reward of samples"),
    ("sft/loss", "SFT loss"),
    ("validation/accuracy", "validation accuracy, greedy"),
    ("validation/sampled_accuracy", "validation accuracy, sampled"),
    ("validation/loss", "validation loss"),
)
POSTER_SIDE = (
    ("entropy", "entropy (nats)"),
    ("response/length", "response length (tokens)"),
    ("grad_norm", "gradient norm"),
)
MIN_SMOOTHED = 9  # points
MAX_MARKED = 40  # points that are drawn with markers

# (label, steps, values) of each curve of a chart.
Series = list[tuple[str, list[float], list[float]]]


class Answer(NamedTuple):
    """A question and the model's answer in one line, its reward, and the question's picture."""

    text: str
    reward: float | None
    picture: Path | None


Answers = list[tuple[str, list[Answer]]]  # heading, answers


def draw_panels(folders: Sequence[Path], file: Path, smoothing: float = 0.6) -> Path:
    """Write the page's charts of one run or of several runs; the extension says the format."""
    save_figure(panels_figure(folders, smoothing), file)
    return file


def save_figure(figure: "Figure", file: Path, dpi: int = 100) -> None:
    """Write a figure; the extension says the format. Raises ConfigError."""
    try:
        figure.savefig(file, dpi=dpi)
    except (OSError, ValueError) as error:  # an unknown extension is a ValueError
        reason = getattr(error, "strerror", None) or first_line(error)
        raise Unwritable(f"{file} cannot be written: {reason}; name another file") from error


def panels_figure(folders: Sequence[Path], smoothing: float = 0.6) -> "Figure":
    """Return the page's charts of one run or of several runs as a matplotlib figure."""
    runs = {_run_label(folder, folders): read_metrics(folder) for folder in folders}
    names: dict[str, None] = {}
    for metrics in runs.values():
        names.update(dict.fromkeys(metrics.columns))
    for name in ("step", "time", "epoch"):
        names.pop(name, None)
    charts = _charts_of_several(runs, list(names))
    if len(runs) == 1:
        charts = _charts_of_one(next(iter(runs.values())), list(names))
    num_rows = math.ceil(len(charts) / 3)
    figure = _new_figure((15, 3.1 * num_rows))
    axes = figure.subplots(num_rows, 3, squeeze=False)
    for axis, (title, kind, series) in zip(axes.flat, charts, strict=False):
        axis.set_title(title, fontsize=10, loc="left", fontweight="bold")
        axis.grid(alpha=0.3)
        draw = _draw_band if kind == "band" else _draw_lines
        draw(axis, series, smoothing)
        axis.legend(frameon=False, fontsize=8)
    for axis in list(axes.flat)[len(charts) :]:
        axis.axis("off")
    figure.suptitle(", ".join(runs) if len(runs) > 1 else str(folders[0].name))
    return figure


def _charts_of_one(metrics: Metrics, names: Sequence[str]) -> list[tuple[str, str, Series]]:
    """(title, kind, series) of each chart of one run."""
    charts: list[tuple[str, str, Series]] = []
    for panel, panel_names in arrange(names):
        kind = panel.get("kind", "line")
        series: Series = [(label(name), *metrics.series(name)) for name in panel_names]
        if kind != "band":
            series = _without_copies_of_the_first(series)
        charts.append((panel["title"], kind, series))
    return charts


def _without_copies_of_the_first(series: Series) -> Series:
    """Drop curves that equal the first one and would hide it, as the reward of one verifier."""
    first = series[0]
    return [first, *(curve for curve in series[1:] if curve[1:] != first[1:])]


def _charts_of_several(
    runs: dict[str, Metrics], names: Sequence[str]
) -> list[tuple[str, str, Series]]:
    """One chart per metric, one line per run; of stacked bands the sum, which is the step time."""
    charts: list[tuple[str, str, Series]] = []
    for panel, panel_names in arrange(names):
        is_band = panel.get("kind") == "band"
        for name in ["step_s"] if is_band else panel_names:
            title = panel["title"]
            if is_band:
                title = "Step time (s)"
            elif len(panel_names) > 1:
                title = f"{title}: {label(name)}"
            series: Series = [(run, *metrics.series(name)) for run, metrics in runs.items()]
            if any(steps for _, steps, _ in series):
                charts.append((title, "line", series))
    return charts


def arrange(names: Sequence[str]) -> list[tuple[dict[str, Any], list[str]]]:
    """(panel, metrics) pairs; each metric goes to the first panel that matches, as on the page."""
    remaining = list(names)
    arranged: list[tuple[dict[str, Any], list[str]]] = []
    for panel in json.loads(PANELS.read_text()):
        panel_names: list[str] = []
        for pattern in panel["metrics"]:
            matches = [
                name
                for name in remaining
                if fnmatch.fnmatchcase(name, pattern) and not _is_excluded(name, panel)
            ]
            panel_names += matches
            remaining = [name for name in remaining if name not in matches]
        if panel_names:
            arranged.append((panel, panel_names))
    return arranged


def _is_excluded(name: str, panel: dict[str, Any]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in panel.get("except", ()))


def label(name: str) -> str:
    """Return a metric's name in a legend: without its group and its unit."""
    return (name.partition("/")[2] or name).removesuffix("_s").replace("_", " ")


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average with bias correction; a NaN is a gap and is left out of it."""
    total = 0.0
    mass = 0.0
    averages: list[float] = []
    for value in values:
        if math.isnan(value):
            averages.append(value)
            continue
        total = total * weight + value * (1 - weight)
        mass = mass * weight + 1 - weight
        averages.append(total / mass)
    return averages


def isolated(values: Sequence[float]) -> list[int]:
    """Return the values between two gaps, which no line shows."""
    padded = [math.nan, *values, math.nan]
    return [
        i
        for i, value in enumerate(values)
        if not math.isnan(value) and math.isnan(padded[i]) and math.isnan(padded[i + 2])
    ]


def _draw_lines(axis: Any, series: Series, smoothing: float) -> None:
    for i, (name, steps, values) in enumerate(series):
        color = COLORS[i % len(COLORS)]
        curve = values
        if smoothing > 0 and len(steps) >= MIN_SMOOTHED:
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            curve = smooth(values, smoothing)
        style = "o-" if len(steps) <= MAX_MARKED else "-"
        axis.plot(steps, curve, style, color=color, label=name, linewidth=1.5, markersize=3)
        alone = isolated(curve)
        axis.plot([steps[i] for i in alone], [curve[i] for i in alone], "o", color=color, ms=3)


def _draw_band(axis: Any, series: Series, smoothing: float) -> None:
    steps = series[0][1]
    complete = [(name, values) for name, own_steps, values in series if own_steps == steps]
    heights = [values for _, values in complete]
    if smoothing > 0 and len(steps) >= MIN_SMOOTHED:
        heights = [smooth(values, smoothing) for values in heights]
    labels = [name for name, _ in complete]
    axis.stackplot(steps, heights, labels=labels, colors=COLORS, alpha=0.85)


def draw_poster(folder: Path, file: Path, title: str) -> Path:
    """Draw one image of a run: rewards, three small curves, answers of its first and last step."""
    metrics = read_metrics(folder)
    figure = _new_figure((10, 8.4))
    rows: Any = [["main"] * 3, ["side0", "side1", "side2"], ["text"] * 3]
    axes = figure.subplot_mosaic(rows, height_ratios=[3, 1.4, 1.9])
    curves: Series = [(text, *metrics.series(name)) for name, text in POSTER_CURVES]
    _draw_lines(axes["main"], [curve for curve in curves if curve[1]], smoothing=0)
    axes["main"].set(title=title, xlabel="step")
    axes["main"].legend(frameon=False)
    axes["main"].grid(alpha=0.3)
    for i, (name, text) in enumerate(POSTER_SIDE):
        axes[f"side{i}"].plot(*metrics.series(name), color="tab:gray")
        axes[f"side{i}"].set_title(text, fontsize=9)
        axes[f"side{i}"].grid(alpha=0.3)
    _draw_answers(axes["text"], read_sample_answers(folder))
    save_figure(figure, file, dpi=110)
    return file


def read_metrics(folder: Path) -> Metrics:
    """Return the metrics of a run folder; raise ConfigError if it has none."""
    metrics = Metrics(folder / "metrics.jsonl").refresh()
    if not metrics.num_lines:
        raise Unreadable(
            f"{folder} has no metrics.jsonl to draw; give a run folder, e.g. runs/NAME"
        )
    return metrics


def read_sample_answers(folder: Path, count: int = 6) -> Answers:
    """Return sampled answers of the first and the last step."""
    import pyarrow.parquet as pq

    files = rollout_files(folder / "rollouts")
    if not files:
        return []
    answers: Answers = []
    for step in dict.fromkeys([min(files), max(files)]):
        table = pq.read_table(files[step])
        if "text" not in table.column_names:
            return []
        names = {"group", "question", "text", "reward", "images"} & {*table.column_names}
        rows = table.select(sorted(names)).to_pylist()
        first_of_group = {row["group"]: row for row in reversed(rows)}
        picked = [first_of_group[group] for group in sorted(first_of_group)][:count]
        found: list[Answer] = []
        for row in picked:
            question = one_line(row["question"], 30)
            answer = one_line(row["text"], 34)
            keys = row.get("images") or []
            pictures = [file for key in keys[:1] for file in folder.glob(f"{PICTURES}/{key}.*")]
            text = f"{question} {answer}"
            found.append(Answer(text, row["reward"], pictures[0] if pictures else None))
        answers.append((f"sampled at step {step}", found))
    return answers


def _draw_answers(axis: Any, answers: Answers) -> None:
    axis.axis("off")
    for column, (heading, rows) in enumerate(answers):
        x = 0.02 + 0.5 * column
        place = {"va": "top", "transform": axis.transAxes}
        axis.text(x, 0.97, heading, fontsize=10, fontweight="bold", **place)
        for i, (text, reward, picture) in enumerate(rows):
            is_correct = reward is not None and reward > 0
            verdict = "correct" if is_correct else "wrong  "
            line = f"{verdict}   {text}".replace("$", r"\$")
            color = "tab:green" if is_correct else "tab:red"
            y = 0.82 - 0.14 * i
            if picture is not None:
                _draw_picture(axis, picture, x, y)
            left = x if picture is None else x + 0.07
            axis.text(left, y, line, fontsize=9, family="monospace", color=color, **place)


def _draw_picture(axis: Any, file: Path, x: float, y: float) -> None:
    """Draw a picture of an answer, with its upper left corner in the axis's units."""
    from PIL import Image

    with Image.open(file) as image:
        box = axis.inset_axes((x, y - 0.11, 0.06, 0.13))
        box.imshow(image.convert("RGB"))
    box.axis("off")


def one_line(text: str, width: int) -> str:
    """Return the text in one line of at most `width` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def _run_label(folder: Path, folders: Sequence[Path]) -> str:
    """Return the folder's name, or the part of its path that distinguishes it from the others."""
    if len(folders) == 1:
        return folder.name
    shared = os.path.commonpath([path.resolve().parent for path in folders])
    return folder.resolve().relative_to(shared).as_posix()


def _new_figure(size: tuple[float, float]) -> "Figure":
    """Return an empty figure. It is not one of pyplot's, so no global state of it changes."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")
