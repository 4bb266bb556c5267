"""Runs as pictures, without a browser: the page's panels, or one poster with answers. Reads the run folders alone."""

import fnmatch
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from postgrad.errors import ConfigError
from postgrad.view.metrics import Metrics

PANELS = Path(__file__).parent / "assets" / "panels.json"
# The page's palette, so that a run has the same color in both.
COLORS = ("#3356c4", "#d9762b", "#2a8f6a", "#b0418f", "#7a6a1e", "#2a93b5", "#8a5cd0", "#6b7280")
POSTER = (
    ("reward/mean", "reward of samples"),
    ("sft/loss", "SFT loss"),
    ("validation/accuracy", "held out, greedy"),
    ("validation/sampled_accuracy", "held out, sampled"),
    ("validation/loss", "held out, loss"),
)
SIDE = (
    ("entropy", "entropy (nats)"),
    ("response/length", "response length (tokens)"),
    ("grad_norm", "gradient norm"),
)


def draw_panels(folders: Sequence[Path], file: Path, smoothing: float = 0.6) -> Path:
    """The page's charts of one run, or of several runs over each other, in one picture; the file's ending says its form."""
    runs = {_label(folder, folders): metrics_of(folder) for folder in folders}
    names = [
        n
        for n in dict.fromkeys(n for m in runs.values() for n in m.columns)
        if n not in ("step", "time", "epoch")
    ]
    charts = _alone(next(iter(runs.values())), names) if len(runs) == 1 else _compared(runs, names)
    plt = _pyplot()
    rows = math.ceil(len(charts) / 3)
    figure, axes = plt.subplots(
        rows, 3, figsize=(15, 3.1 * rows), layout="constrained", squeeze=False
    )
    for axis, (title, kind, series) in zip(axes.flat, charts, strict=False):
        axis.set_title(title, fontsize=10, loc="left", fontweight="bold")
        axis.grid(alpha=0.3)
        (_draw_band if kind == "band" else _draw_lines)(axis, series, smoothing)
        axis.legend(frameon=False, fontsize=8)
    for axis in list(axes.flat)[len(charts) :]:
        axis.axis("off")
    figure.suptitle(", ".join(runs) if len(runs) > 1 else str(folders[0].name))
    figure.savefig(file, dpi=100)
    plt.close(figure)
    return file


Series = list[tuple[str, list[float], list[float]]]


def _alone(metrics: Metrics, names: Sequence[str]) -> list[tuple[str, str, Series]]:
    out: list[tuple[str, str, Series]] = []
    for panel, taken in arrange(names):
        series = [(label(name), *metrics.series(name)) for name in taken]
        if (
            panel.get("kind") != "band"
        ):  # a part that is the whole (a single verifier's) would only hide it
            series = [one for i, one in enumerate(series) if not i or one[1:] != series[0][1:]]
        out.append((panel["title"], panel.get("kind", "line"), series))
    return out


def _compared(runs: dict[str, Metrics], names: Sequence[str]) -> list[tuple[str, str, Series]]:
    """One chart a metric, one line a run; bands would hide each other, so their sum is drawn."""
    out: list[tuple[str, str, Series]] = []
    for panel, taken in arrange(names):
        band = panel.get("kind") == "band"
        for name in ["step_s"] if band else taken:
            title = (
                "Time of a step (s)"
                if band
                else panel["title"]
                if len(taken) == 1
                else f"{panel['title']}: {label(name)}"
            )
            series = [(run, *metrics.series(name)) for run, metrics in runs.items()]
            if any(steps for _, steps, _ in series):
                out.append((title, "line", series))
    return out


def arrange(names: Sequence[str]) -> list[tuple[dict[str, Any], list[str]]]:
    """Each metric goes to the first panel that wants it, as on the page."""
    left, out = list(names), []
    for panel in json.loads(PANELS.read_text()):
        taken: list[str] = []
        for pattern in panel["metrics"]:
            fits = [n for n in left if fnmatch.fnmatchcase(n, pattern) and not _excepted(n, panel)]
            taken += fits
            left = [n for n in left if n not in fits]
        if taken:
            out.append((panel, taken))
    return out


def _excepted(name: str, panel: dict[str, Any]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in panel.get("except", ()))


def label(name: str) -> str:
    return (name.partition("/")[2] or name).removesuffix("_s").replace("_", " ")


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average, corrected for its start."""
    total, mass, out = 0.0, 0.0, []
    for value in values:
        total, mass = total * weight + value * (1 - weight), mass * weight + 1 - weight
        out.append(total / mass)
    return out


def _draw_lines(axis: Any, series: Series, smoothing: float) -> None:
    for i, (name, steps, values) in enumerate(series):
        color, smooth = COLORS[i % len(COLORS)], smoothing > 0 and len(steps) > 8
        if smooth:
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        shown = smoothed(values, smoothing) if smooth else values
        axis.plot(
            steps,
            shown,
            "o-" if len(steps) <= 40 else "-",
            color=color,
            label=name,
            linewidth=1.5,
            markersize=3,
        )


def _draw_band(axis: Any, series: Series, smoothing: float) -> None:
    steps = series[0][1]
    rows = [(name, values) for name, xs, values in series if xs == steps]
    heights = [
        smoothed(values, smoothing) if smoothing > 0 and len(steps) > 8 else values
        for _, values in rows
    ]
    axis.stackplot(steps, heights, labels=[name for name, _ in rows], colors=COLORS, alpha=0.85)


def draw_poster(folder: Path, file: Path, title: str = "") -> Path:
    """One picture for people: the reward and what was held out, three small curves, answers of the first and the last step."""
    metrics = metrics_of(folder)
    samples = read_sample_answers(folder) if (folder / "rollouts").is_dir() else []
    plt = _pyplot()
    figure, axes = plt.subplot_mosaic(
        [
            ["main", "main", "main"],
            ["side0", "side1", "side2"],
            *([["text"] * 3] if samples else []),
        ],
        figsize=(10, 8.4 if samples else 6),
        height_ratios=[3, 1.4, *([1.9] if samples else [])],
        layout="constrained",
    )
    for name, text in POSTER:
        xs, ys = metrics.series(name)
        if xs:
            faint = name == "reward/mean"
            axes["main"].plot(
                xs,
                ys,
                "-" if faint else "o-",
                label=text,
                alpha=0.7 if faint else 1.0,
                markersize=4,
            )
    axes["main"].set(title=title or _title(folder), xlabel="step")
    axes["main"].legend(frameon=False)
    axes["main"].grid(alpha=0.3)
    for i, (name, text) in enumerate(SIDE):
        axes[f"side{i}"].plot(*metrics.series(name), color="tab:gray")
        axes[f"side{i}"].set_title(text, fontsize=9)
        axes[f"side{i}"].grid(alpha=0.3)
    if samples:
        _draw_samples(axes["text"], samples)
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def _title(folder: Path) -> str:
    """The run's name with its method and data, as far as its configuration can be read."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        return f"{folder.resolve().name}: {config['method']['name']} on {config['data']['train']}"
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return folder.resolve().name


def metrics_of(folder: Path) -> Metrics:
    metrics = Metrics(folder / "metrics.jsonl").refresh()
    if not metrics.num_lines:
        raise ConfigError(
            f"{folder} has no metrics.jsonl to draw; give a run folder, e.g. runs/NAME"
        )
    return metrics


def read_sample_answers(folder: Path, count: int = 6) -> list[tuple[str, list[tuple[str, float]]]]:
    """A few sampled answers of the first and of the last step with their rewards: [(heading, [(text, reward)])]."""
    import pyarrow.parquet as pq

    files = sorted((folder / "rollouts").glob("step-*.parquet"))
    out: list[tuple[str, list[tuple[str, float]]]] = []
    for file in dict.fromkeys([files[0], files[-1]]) if files else []:
        table = pq.read_table(file)
        if "text" not in table.column_names:
            return []
        rows = table.select(["group", "question", "text", "reward"]).to_pylist()
        firsts = {row["group"]: row for row in reversed(rows)}
        picked = [firsts[g] for g in sorted(firsts)][:count]
        heading = f"sampled at step {int(file.stem.removeprefix('step-'))}"
        out.append(
            (
                heading,
                [
                    (f"{one_line(row['question'], 30)} {one_line(row['text'], 34)}", row["reward"])
                    for row in picked
                ],
            )
        )
    return out


def _draw_samples(axis: Any, samples: list[tuple[str, list[tuple[str, float]]]]) -> None:
    axis.axis("off")
    for column, (heading, rows) in enumerate(samples):
        x = 0.02 + 0.5 * column
        axis.text(
            x, 0.97, heading, fontsize=10, fontweight="bold", va="top", transform=axis.transAxes
        )
        for i, (text, reward) in enumerate(rows):
            right = reward is not None and reward > 0
            line = f"{'right' if right else 'wrong'}   {text}".replace("$", r"\$")
            color = "tab:green" if right else "tab:red"
            axis.text(
                x,
                0.82 - 0.14 * i,
                line,
                fontsize=9,
                family="monospace",
                color=color,
                va="top",
                transform=axis.transAxes,
            )


def one_line(text: str, width: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def _label(folder: Path, folders: Sequence[Path]) -> str:
    """The folder's name, or as much of its path as tells it from the others."""
    parts = [path.resolve().parts for path in folders]
    own = folder.resolve().parts
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == own[shared] for p in parts):
        shared += 1
    return "/".join(own[shared:]) if len(folders) > 1 else folder.name


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
