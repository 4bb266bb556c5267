"""Tables of the claims, from the values that keep.py wrote, and figures of their runs.

`draw` puts the table of docs/research/CLAIM.jsonl between the lines `<!-- CLAIM -->` and `<!-- end
-->` of docs/results.md or NOTES.md. Tables have the mean of the seeds. Accuracies and rewards also
have the half width of its 95% t interval over seeds, and each seed; with one seed a greedy accuracy
has its Wilson interval over the test problems. `keep` draws the figures: lines are means over
seeds, bands reach from the lowest to the highest seed.

Runs that were stopped before their last step are drawn as far as they came: dashed where seeds of
an arm are missing. The table counts their steps and ends with a line that says so; values after
training are those of the arm's runs that came furthest.
"""

import argparse
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims import entropies
from claims.claim import Column, Report
from claims.keep import DOCS, read_kept
from claims.results import Entry, labels_by_arm, series, with_interval

WITH_INTERVALS = ("validation/", "reward/")  # columns of other metrics have the mean alone
# Titles of the panels; the metric's name otherwise.
TITLES = {
    "train_s": "seconds of training",
    "clock_s": "seconds from the start",
    "reward/mean": "training reward",
    "reward/on_policy": "reward of the policy's own responses",
    "reward/right": "right sums in training",
    "validation/part/right": "right test sums",
    "reward/boxed": "boxes in training",
    "reward/classmate": "classmate's training reward",
    "validation/accuracy": "test accuracy",
    "validation/sampled_accuracy": "test reward, sampled",
    "validation/test/accuracy": "test accuracy, two digits",
    "validation/longer/accuracy": "test accuracy, three digits",
    "validation/classmate": "classmate's test accuracy",
    "validation/monitor/accuracy": "monitor's accuracy",
    "validation/part/gsm8k": "test accuracy",
    "validation/part/reward_model": "reward model's score on the test problems",
    "response/length": "response (tokens)",
    "response/truncated": "truncated responses (share)",
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm",
    "stage/update_s": "update (seconds)",
    "engine/gap_mean": "gap of log-probs, mean (nats)",
    "replay/pool": "problems in the replay pool",
    "tools/turns": "turns per response",
}
LOGARITHMIC = ("engine/gap_mean",)  # the native engine's gap is a thousand times smaller
MARKED = 10  # curves of at most this many points have markers


# ---- the table


def metric(line: Mapping[str, float], key: str) -> float | None:
    """Return a metric of a line; a key that ends in @ means the metric with any number after it."""
    if key.endswith("@"):
        return next((value for name, value in line.items() if name.startswith(key)), None)
    return line.get(key)


def column_values(lines: Sequence[Mapping[str, float]], column: Column) -> list[float]:
    """Return the values that a column averages over, of one run."""
    found = (metric(line, column.key) for line in read_lines(lines, column))
    return [value for value in found if value is not None]


def read_lines(
    lines: Sequence[Mapping[str, float]], column: Column
) -> Sequence[Mapping[str, float]]:
    """Return the lines of one run whose values a column averages over.

    Step 0 is before the training: it is the first value and never one of the last.
    """
    if column.where:
        key, value = column.where
        lines = [line for line in lines if line.get(key) == value]
    if not column.first:
        lines = [line for line in lines if line["step"] > 0]
    if column.within_s < math.inf:
        lines = [line for line in lines if line["clock_s"] <= column.within_s]
    lines = [line for line in lines if metric(line, column.key) is not None]
    return lines[: column.count] if column.first else lines[-column.count :]


def table(claim: Report, entries: Sequence[Entry]) -> str:
    """Return the claim's Markdown table, a row per arm, and a line about what is missing."""
    heads = ["arm", *(column.heading for column in claim.columns), "steps"]
    rows = [heads, ["---"] * len(heads)]
    sizes = last_options(entries)
    for arm, labels in labels_by_arm(entries).items():
        runs = [series(entries, label) for _, label in sorted(labels.items())]
        steps = [int(lines[-1]["step"]) for lines in runs]
        furthest = [lines for lines in runs if lines[-1]["step"] == max(steps)]
        cells = [arm]
        for column in claim.columns:
            counted = runs if column.first else furthest
            if column.alone:
                counted = [lines for lines in counted if had_gpu_alone(lines)]
            found = [values for lines in counted if (values := column_values(lines, column))]
            means = [statistics.mean(values) for values in found]
            cells.append(cell(column, means, sizes))
        cells.append(" ".join(map(str, steps if len(set(steps)) > 1 else steps[:1])))
        rows.append(cells)
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    by_time = any(column.within_s < math.inf for column in claim.columns)
    missing = "" if by_time else missing_runs(entries)
    return f"{text}\n\n{missing}" if missing else text


def had_gpu_alone(lines: Sequence[Mapping[str, float]]) -> bool:
    """Return whether a run shared the GPU with no other run in any of its steps."""
    return all(line.get("running", 1) == 1 for line in lines)


def last_options(entries: Sequence[Entry]) -> dict[str, Any]:
    return next((entry["options"] for entry in reversed(entries) if "options" in entry), {})


def unrecorded(claim: Report, entries: Sequence[Entry]) -> list[str]:
    """Return the metrics of columns and curves that no line has: a wrong name, or a short run."""
    lines = [entry["metrics"] for entry in entries if "metrics" in entry]
    keys = [*(column.key for column in claim.columns), *claim.curves]
    own = ("running", "train_s")  # added by `series`
    return [
        key
        for key in dict.fromkeys(keys)
        if key not in own and all(metric(line, key) is None for line in lines)
    ]


def missing_runs(entries: Sequence[Entry]) -> str:
    """Return a sentence about runs that are not there or did not reach their last step, or ""."""
    sizes = last_options(entries)
    num_steps, seeds = sizes.get("steps", 0), sizes.get("seeds", [])
    found = labels_by_arm(entries)
    reasons = [f"{arm}: not run" for arm in sizes.get("arms", []) if arm not in found]
    for arm, labels in found.items():
        for seed in sorted({*seeds, *labels}):
            if seed not in labels:
                reasons.append(f"{arm}, seed {seed}: not run")
                continue
            last = int(series(entries, labels[seed])[-1]["step"])
            if last < num_steps:
                reasons.append(f"{arm}, seed {seed}: step {last}")
    if not reasons:
        return ""
    return f"Partial: not all runs reached step {num_steps} ({'; '.join(reasons)})."


def cell(column: Column, means: Sequence[float], sizes: Mapping[str, Any]) -> str:
    """Return the text of a cell, with an interval where there is one."""
    num_problems = sizes.get("test_problems", 0)
    if len(means) == 1 and column.is_share and num_problems:
        from postgrad.results.metrics import interval

        num_right = round(means[0] * num_problems)
        low, high = interval([1.0] * num_right + [0.0] * (num_problems - num_right))
        return f"{means[0]:.3f} (Wilson {low:.3f} to {high:.3f})"
    if means and not column.key.startswith(WITH_INTERVALS):
        return f"{statistics.mean(means):.3g}"
    return with_interval(means)


# ---- the figures


def figure(claim: Report, entries: Sequence[Entry], file: Path) -> None:
    """Draw the claim's curves over steps, and the first over seconds where it compares them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {
        arm: [series(entries, label) for label in labels.values()]
        for arm, labels in labels_by_arm(entries).items()
    }
    present = {key for lines in runs.values() for run in lines for line in run for key in line}
    panels = [("step", key) for key in claim.curves if key in present]
    if claim.axis:
        panels.append((claim.axis, claim.curves[0]))
    num_columns = len(panels) if len(panels) < 4 else math.ceil(len(panels) / 2)
    num_rows = math.ceil(len(panels) / num_columns)
    shape = (3.6 * num_columns, 3.0 * num_rows + 0.8)
    drawing, grid = pyplot.subplots(num_rows, num_columns, figsize=shape, squeeze=False)
    axes = list(grid.flat)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (horizontal, key) in zip(axes, panels, strict=False):
        for arm, lines in runs.items():
            if horizontal != "step":
                lines = [run for run in lines if had_gpu_alone(run)]
            draw_curve(axis, arm, lines, horizontal, key)
        axis.set_title(TITLES.get(key, key), fontsize=10)
        axis.set_xlabel(TITLES.get(horizontal, horizontal))
        axis.xaxis.get_major_locator().set_params(integer=True)
        if key in LOGARITHMIC:
            axis.set_yscale("log")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    curves, names = axes[0].get_legend_handles_labels()
    drawing.suptitle(caption(entries), fontsize=8, color="0.35")
    drawing.tight_layout(rect=(0, 0.5 / shape[1], 1, 1))
    drawing.legend(curves, names, loc="lower center", ncols=4, fontsize=8, frameon=False)
    drawing.savefig(file, dpi=100, metadata={"Software": None})
    pyplot.close(drawing)


def caption(entries: Sequence[Entry]) -> str:
    """Return a line about the seeds and the bands, and one about missing runs."""
    num_seeds = max(len(labels) for labels in labels_by_arm(entries).values())
    model = last_options(entries).get("model", "")
    words = [model] if model else []
    words.append("one seed" if num_seeds == 1 else f"mean of {num_seeds} seeds, band: all seeds")
    text = "; ".join(words)
    if missing_runs(entries):
        text += "\npartial: not all runs reached their last step; dashed where seeds are missing"
    return text


def draw_curve(
    axis: Any, arm: str, runs: Sequence[Sequence[Mapping[str, float]]], horizontal: str, key: str
) -> None:
    """Draw one arm: the mean over seeds at each step, and the range of the seeds.

    After the last step that all seeds have, the mean of the others is dashed.
    """
    by_step: dict[int, list[tuple[float, float]]] = {}
    for lines in runs:
        for line in lines:
            if key in line:
                by_step.setdefault(int(line["step"]), []).append((line[horizontal], line[key]))
    points = [by_step[step] for step in sorted(by_step)]
    num_seeds = max(map(len, points), default=0)
    places = [statistics.mean(x for x, _ in point) for point in points]
    means = [statistics.mean(y for _, y in point) for point in points]
    full = max((i + 1 for i, point in enumerate(points) if len(point) == num_seeds), default=0)
    style: dict[str, Any] = {"linewidth": 1.3, "marker": "o" if len(points) <= MARKED else None}
    (curve,) = axis.plot(places[:full], means[:full], label=arm, markersize=3, **style)
    rest = slice(max(0, full - 1), None)
    if full < len(points):
        style |= {"linestyle": "--", "color": curve.get_color()}
        axis.plot(places[rest], means[rest], markersize=3, **style)
    low = [min(y for _, y in point) for point in points]
    high = [max(y for _, y in point) for point in points]
    axis.fill_between(places, low, high, alpha=0.15, color=curve.get_color(), linewidth=0)


def main(claims: Mapping[str, Report], arguments: list[str]) -> int:
    """Renew the tables of all claims that have kept values, and the figures of entropies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS)
    docs = parser.parse_args(arguments).docs
    pages = [docs / "results.md", docs.parent / "benchmarks" / "NOTES.md"]
    texts = {page: page.read_text() for page in pages if page.is_file()}
    for file in sorted((docs / "research").glob("*.jsonl")):
        claim = claims[file.stem]
        entries = read_kept(file)
        markdown = table(claim, entries)
        print(f"{file.stem}: {claim.question}\n\n{markdown}\n")
        block = f"<!-- {file.stem} -->\n{markdown}\n<!-- end -->"
        pattern = rf"<!-- {file.stem} -->\n.*?<!-- end -->"
        for page, text in texts.items():
            texts[page] = re.sub(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
    for page, text in texts.items():
        page.write_text(text)
    entropies.draw(docs)
    return 0
