"""Many evaluations in one table, models by sets: Markdown, CSV, or bars in a picture."""

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postgrad.errors import Damaged, Missing, Unwritable, WrongValue, first_line
from postgrad.evaluation.report import align, markdown_table, percent

METRICS = ("avg", "best", "maj", "format", "answer", "score", "length")
Pivot = dict[str, dict[str, float | None]]  # model -> set -> value


def read_summaries(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the summaries of evaluation folders, and of all evaluations below other folders.

    Each has its folder as `folder`.

    Raises: ConfigError if a folder has none, or a file is not a summary.
    """
    summaries: list[dict[str, Any]] = []
    for folder in folders:
        files = sorted(folder.rglob("summary.json")) if folder.is_dir() else []
        if not files:
            raise Missing(f"{folder} has no summary.json; give folders of evaluations")
        for file in files:
            try:
                summary = json.loads(file.read_text())
            except (ValueError, RecursionError) as error:
                raise Damaged(f"{file} is not JSON ({first_line(error)})") from error
            if isinstance(summary, dict) and isinstance(summary.get("sets"), dict):
                summaries.append(summary | {"folder": str(file.parent)})
    if not any(summary["sets"] for summary in summaries):
        raise Missing(f"{folders[0]} has no evaluation of a data set; give other folders")
    return summaries


def make_pivot(summaries: Sequence[dict[str, Any]], metric: str = "avg") -> Pivot:
    """Return the metric by model and set.

    avg is avg@k, best is pass@k and maj is maj@k, each of the set's own k. Evaluations of one model
    share a row; if they have a set in common, each has a row of its own that names its folder.
    """
    pairs = Counter((str(one["model"]), name) for one in summaries for name in one["sets"])
    pivot: Pivot = {}
    for summary in summaries:
        model = str(summary["model"])
        if any(pairs[model, name] > 1 for name in summary["sets"]):
            model = f"{model} ({summary['folder']})"
        row = pivot.setdefault(model, {})
        for name, result in summary["sets"].items():
            row[name] = _value(result, metric)
    return pivot


def sets_of(pivot: Pivot) -> list[str]:
    """Return the sets of all models, in the order in which they occur first."""
    return list(dict.fromkeys(name for row in pivot.values() for name in row))


def _value(result: dict[str, Any], metric: str) -> float | None:
    k = str(result["samples"])
    if metric == "avg":
        return result["avg"]["value"]
    if metric == "best":
        return result["pass"][k]["value"]
    if metric == "maj":
        return ((result["maj"] or {}).get(k) or {}).get("value")
    if metric == "score":
        return result["score"]
    if metric == "length":
        return result["length"]["mean"]
    return result["parts"].get(metric)


def table_rows(pivot: Pivot, metric: str) -> list[list[str]]:
    """Return a header and one row per model, as text."""
    sets = sets_of(pivot)
    rows = [["model", *sets]]
    for model, values in pivot.items():
        rows.append([model, *(_cell(values.get(name), metric) for name in sets)])
    return rows


def _cell(value: float | None, metric: str) -> str:
    if value is None:
        return "-"
    if metric in ("score", "length"):
        return f"{value:.3g}" if metric == "score" else f"{value:.0f}"
    return percent(value)


def as_text(pivot: Pivot, metric: str) -> str:
    return align(table_rows(pivot, metric))


def as_markdown(pivot: Pivot, metric: str) -> str:
    return "\n".join([*markdown_table(table_rows(pivot, metric)), ""])


def as_csv(pivot: Pivot) -> str:
    """Return the table as CSV with full numbers; empty where there is none."""
    sets = sets_of(pivot)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["model", *sets])
    for model, values in pivot.items():
        numbers = [values.get(name) for name in sets]
        writer.writerow([model, *("" if number is None else repr(number) for number in numbers)])
    return stream.getvalue()


def draw_bars(pivot: Pivot, metric: str, file: Path) -> None:
    """Draws grouped bars, one group per set and one bar per model, with values above them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sets = sets_of(pivot)
    width = 0.8 / len(pivot)
    figure, axes = pyplot.subplots(figsize=(max(4.0, 1.6 * len(sets)), 3.2))
    for i, (model, values) in enumerate(pivot.items()):
        positions = [number + i * width for number in range(len(sets))]
        heights = [values.get(name) or 0.0 for name in sets]
        bars = axes.bar(positions, heights, width, label=model)
        axes.bar_label(bars, [_cell(values.get(name), metric) for name in sets], fontsize=6)
    axes.set_xticks([number + 0.4 - width / 2 for number in range(len(sets))], sets)
    axes.set_ylabel(metric)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=200)
    pyplot.close(figure)


def write_pivot(pivot: Pivot, metric: str, out: Path) -> None:
    """Write FILE.md, FILE.csv or a picture. Raises ConfigError for another ending."""
    try:
        if out.suffix == ".md":
            out.write_text(as_markdown(pivot, metric))
        elif out.suffix == ".csv":
            out.write_text(as_csv(pivot))
        elif out.suffix in (".png", ".pdf", ".svg"):
            draw_bars(pivot, metric, out)
        else:
            raise WrongValue(f"out={out} must end in .md, .csv, .png, .pdf or .svg")
    except OSError as error:
        raise Unwritable(f"out={out} cannot be written: {error.strerror}") from error
