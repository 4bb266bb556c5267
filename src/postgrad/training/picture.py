"""A run as a picture: its curves, and answers it sampled at its first and last step. Reads the run folder alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postgrad.errors import ConfigError
from postgrad.training.log import read_metrics
from postgrad.training.report import one_line

CURVES = (
    ("reward/mean", "reward of samples"),
    ("sft/loss", "SFT loss"),
    ("validation/accuracy", "held out, greedy"),
    ("validation/sampled_accuracy", "held out, sampled"),
    ("validation/loss", "held out, loss"),
)
SIDE = (("entropy", "entropy (nats)"), ("response/length", "response length (tokens)"), ("grad_norm", "gradient norm"))


def draw_run(folder: Path, file: Path, title: str = "") -> Path:
    """Write the picture of a run folder as PNG (or what the file's ending says)."""
    lines = read_metrics(folder)
    if not lines:
        raise ConfigError(f"{folder} has no metrics.jsonl to draw; give a run folder, e.g. runs/NAME")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    samples = [first_and_last(folder)] if (folder / "rollouts").is_dir() else []
    samples = [s for s in samples if s]
    figure, axes = plt.subplot_mosaic(
        [["main", "main", "main"], ["side0", "side1", "side2"], *([["text"] * 3] if samples else [])],
        figsize=(10, 8.4 if samples else 6),
        height_ratios=[3, 1.4, *([1.9] if samples else [])],
        layout="constrained",
    )
    for name, label in CURVES:
        xs, ys = _series(lines, name)
        if xs:
            faint = name == "reward/mean"
            axes["main"].plot(xs, ys, "-" if faint else "o-", label=label, alpha=0.7 if faint else 1.0, markersize=4)
    axes["main"].set(title=title or folder.name, xlabel="step")
    axes["main"].legend(frameon=False)
    axes["main"].grid(alpha=0.3)
    for i, (name, label) in enumerate(SIDE):
        xs, ys = _series(lines, name)
        axes[f"side{i}"].plot(xs, ys, color="tab:gray")
        axes[f"side{i}"].set_title(label, fontsize=9)
        axes[f"side{i}"].grid(alpha=0.3)
    if samples:
        _draw_samples(axes["text"], samples[0])
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def _series(lines: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    points = [(line["step"], line[name]) for line in lines if name in line]
    return [p[0] for p in points], [p[1] for p in points]


def first_and_last(folder: Path, count: int = 6) -> list[tuple[str, list[tuple[str, float]]]]:
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
        out.append((heading, [(f"{one_line(row['question'], 30)} {one_line(row['text'], 34)}", row["reward"]) for row in picked]))
    return out


def _draw_samples(axis: Any, samples: list[tuple[str, list[tuple[str, float]]]]) -> None:
    axis.axis("off")
    for column, (heading, rows) in enumerate(samples):
        x = 0.02 + 0.5 * column
        axis.text(x, 0.97, heading, fontsize=10, fontweight="bold", va="top", transform=axis.transAxes)
        for i, (text, reward) in enumerate(rows):
            right = reward is not None and reward > 0
            line = f"{'right' if right else 'wrong'}   {text}".replace("$", r"\$")
            colour = "tab:green" if right else "tab:red"
            axis.text(x, 0.82 - 0.14 * i, line, fontsize=9, family="monospace", color=colour, va="top", transform=axis.transAxes)
