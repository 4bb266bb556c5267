"""Figures and tables of the claims, from raw metrics that are small enough to commit.

`keep FOLDER` writes docs/research/CLAIM.jsonl from FOLDER/results.jsonl. `draw` writes
docs/research/CLAIM.png from it, and puts each table between the lines `<!-- CLAIM -->` and
`<!-- end -->` of docs/results.md. Lines are means over seeds, bands reach from the lowest to the
highest seed. Tables have the mean of the seeds, the half width of its 95% t interval over seeds,
and each seed; with one seed a greedy accuracy has its Wilson interval over the test problems.
"""

import argparse
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims.claim import Claim, Column
from claims.results import Entry, labels_by_arm, series, with_interval

DOCS = Path(__file__).resolve().parents[2] / "docs"
ALWAYS_KEPT = ("step", "step_s")
DIGITS = 5  # significant digits of kept metrics
SIZES = (
    "steps",
    "seeds",
    "jobs",
    "problems",
    "samples",
    "tokens",
    "lr",
    "lr_sft",
    "lora_rank",
    "task",
    "test_problems",
    "validation_samples",
    "overrides",
)


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a reader needs, without paths."""
    sizes = {name: getattr(options, name) for name in SIZES}
    test = options.out / "test.jsonl"
    if test.is_file() and not options.test_problems:
        sizes["test_problems"] = len(test.read_text().splitlines())
    return {"model": Path(str(options.model)).name, **sizes}


# ---- the table


def column_values(lines: Sequence[Mapping[str, float]], column: Column) -> list[float]:
    """Return the values that a column averages over, of one run."""
    if column.where:
        key, value = column.where
        lines = [line for line in lines if line.get(key) == value]
    values = [line[column.key] for line in lines if column.key in line]
    return values[: column.count] if column.first else values[-column.count :]


def table(claim: Claim, entries: Sequence[Entry]) -> str:
    """Return the claim's Markdown table: a row per arm."""
    heads = ["arm", *(column.heading for column in claim.columns), "steps"]
    rows = [heads, ["---"] * len(heads)]
    sizes = next((e["options"] for e in reversed(entries) if "options" in e), {})
    for arm, labels in labels_by_arm(entries).items():
        runs = [series(entries, label) for _, label in sorted(labels.items())]
        cells = [arm]
        for column in claim.columns:
            found = [values for lines in runs if (values := column_values(lines, column))]
            means = [statistics.mean(values) for values in found]
            cells.append(cell(column, means, sizes))
        steps = sorted({int(lines[-1]["step"]) for lines in runs})
        cells.append(" ".join(map(str, steps)))
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(column: Column, means: Sequence[float], sizes: Mapping[str, Any]) -> str:
    """Return the text of a cell, with an interval where there is one."""
    is_accuracy = column.key.endswith("accuracy")
    num_problems = sizes.get("test_problems", 0)
    is_greedy = sizes.get("validation_samples", 1) == 1
    if len(means) == 1 and is_accuracy and is_greedy and num_problems:
        from postgrad.results.metrics import interval

        num_right = round(means[0] * num_problems)
        low, high = interval([1.0] * num_right + [0.0] * (num_problems - num_right))
        return f"{means[0]:.3f} (Wilson {low:.3f} to {high:.3f})"
    return with_interval(means)


# ---- small raw metrics


def keep(claims: Mapping[str, Claim], arguments: list[str]) -> int:
    """Write docs/research/CLAIM.jsonl from the results of one or several folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(arguments)
    target = options.docs / "research"
    target.mkdir(parents=True, exist_ok=True)
    for folder in options.folders:
        text = (folder / "results.jsonl").read_text()
        entries = [json.loads(line) for line in text.splitlines()]
        for name in dict.fromkeys(entry["claim"] for entry in entries if "claim" in entry):
            lines = thinned(name, claims[name], entries)
            file = target / f"{name}.jsonl"
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
            print(f"{file}: {len(lines)} lines")
    return 0


def thinned(name: str, claim: Claim, entries: Sequence[Entry]) -> list[Entry]:
    """Return the options, and one entry per step and run with the metrics that are shown."""
    shown = {column.key for column in claim.columns} | set(claim.curves) | set(ALWAYS_KEPT)
    shown |= {column.where[0] for column in claim.columns if column.where}
    headers = [entry for entry in entries if entry.get("claim") == name]
    kept: list[Entry] = [headers[-1]]
    for arm, labels in labels_by_arm(entries).items():
        for seed, label in sorted(labels.items()):
            if not label.startswith(f"{name}-"):
                continue
            for line in series(entries, label):
                metrics = {k: rounded(v) for k, v in line.items() if k in shown}
                entry = {"arm": arm, "seed": seed, "label": label, "metrics": metrics}
                timing = {k: line[k] for k in ("elapsed_s", "running") if k in line}
                kept.append(entry | timing)
    return kept


def rounded(value: float) -> float:
    """Return the value with DIGITS significant digits; whole numbers as integers."""
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


# ---- the figures


def figure(claim: Claim, entries: Sequence[Entry], file: Path) -> None:
    """Draw the claim's curves over steps, and the accuracy over seconds where it compares them."""
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
    shape = (4.2 * len(panels), 3.4)
    drawing, axes = pyplot.subplots(1, len(panels), figsize=shape, squeeze=False)
    for axis, (horizontal, key) in zip(axes[0], panels, strict=True):
        for arm, lines in runs.items():
            draw_curve(axis, arm, lines, horizontal, key)
        axis.set_title(key)
        axis.set_xlabel("seconds of training" if horizontal == "train_s" else "step")
    axes[0][0].legend(fontsize=7)
    drawing.tight_layout()
    drawing.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(drawing)


def draw_curve(
    axis: Any, arm: str, runs: Sequence[Sequence[Mapping[str, float]]], horizontal: str, key: str
) -> None:
    """Draw one arm: the mean over seeds at each step, and the range of the seeds."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for lines in runs:
        for line in lines:
            if key in line:
                by_step.setdefault(int(line["step"]), []).append((line[horizontal], line[key]))
    points = [by_step[step] for step in sorted(by_step)]
    places = [statistics.mean(x for x, _ in point) for point in points]
    means = [statistics.mean(y for _, y in point) for point in points]
    (curve,) = axis.plot(places, means, label=arm, linewidth=1.3)
    low = [min(y for _, y in point) for point in points]
    high = [max(y for _, y in point) for point in points]
    axis.fill_between(places, low, high, alpha=0.15, color=curve.get_color(), linewidth=0)


def main(claims: Mapping[str, Claim], arguments: list[str]) -> int:
    """Draw the figures and renew the tables of all claims that have kept metrics."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS)
    docs = parser.parse_args(arguments).docs
    page = docs / "results.md"
    text = page.read_text() if page.is_file() else ""
    for file in sorted((docs / "research").glob("*.jsonl")):
        claim = claims[file.stem]
        entries = [json.loads(line) for line in file.read_text().splitlines()]
        figure(claim, entries, file.with_suffix(".png"))
        markdown = table(claim, entries)
        print(f"{file.stem}: {claim.question}\n\n{markdown}\n")
        block = f"<!-- {file.stem} -->\n{markdown}\n<!-- end -->"
        pattern = rf"<!-- {file.stem} -->\n.*?<!-- end -->"
        text = re.sub(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
    if text:
        page.write_text(text)
    return 0
