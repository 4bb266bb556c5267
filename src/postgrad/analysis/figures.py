"""Figures of an entropy analysis, as PNG and PDF: the entropy flow and the changes per layer."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from postgrad.errors import RunError

GOLD = "#d9a400"
RED = "#c0392b"
BLUE = "#2a6fbb"
PURPLE = "#7d3c98"


class Style(NamedTuple):
    label: str
    marker: str
    color: str


CHANGE_STYLES = {
    "ffn": Style("FFN", "D", BLUE),
    "attention": Style("Attention", "s", RED),
    "layer": Style("Layer", "o", PURPLE),
}
FLOW_STYLES = {
    "layer": Style("Layer input or output", "s", GOLD),
    "attention": Style("Attention", "s", RED),
    "ffn": Style("FFN", "D", BLUE),
}


FLOW_MEANING = (
    "A point is the mean entropy of the next token when the output head reads the model at this "
    "place; the last one is the full policy."
)
CHANGE_MEANING = (
    "A point is the mean of output minus input entropy: above the dashed line, the part adds some."
)
BOUNDARY_MEANING = " Dotted: the boundary layer."
CHARACTERS_PER_INCH = 22  # of the caption


class Point(NamedTuple):
    x: int
    entropy: float
    kind: str  # layer, attention or ffn


def flow_points(report: dict[str, Any]) -> list[Point]:
    """Return the 3L + 1 points of the entropy flow, in the order of computation.

    Each block has three: its input, its attention's output, its FFN's output. A block's output
    is the next block's input. The last point is the model's policy, after the final norm.
    """
    points: list[Point] = []
    for number, layer in enumerate(report["layers"]):
        points.append(Point(3 * number, layer["layer"]["input"]["mean"], "layer"))
        points.append(Point(3 * number + 1, layer["attention"]["output"]["mean"], "attention"))
        points.append(Point(3 * number + 2, layer["ffn"]["output"]["mean"], "ffn"))
    points.append(Point(3 * len(report["layers"]), report["full_policy"]["mean"], "layer"))
    return points


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write all figures of the report into the folder; return the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figures: dict[str, Any] = {"entropy_flow": _draw_flow(plt, report)}
    for module in CHANGE_STYLES:
        figure, axes = plt.subplots(figsize=(5, 2.5), layout="constrained")
        _draw_change(axes, report, module)
        _add_caption(figure, report, _change_meaning(report, [module]))
        figures[f"{module}_change"] = figure
    figure, columns = plt.subplots(1, 3, figsize=(13, 2.8), layout="constrained")
    for axes, module in zip(columns, CHANGE_STYLES, strict=True):
        _draw_change(axes, report, module)
    _add_caption(figure, report, _change_meaning(report, list(CHANGE_STYLES)))
    figures["changes"] = figure
    files: list[Path] = []
    try:
        for name, figure in figures.items():
            for extension in ("png", "pdf"):
                files.append(folder / f"{name}.{extension}")
                figure.savefig(files[-1], dpi=300)
            plt.close(figure)
    except OSError as error:
        raise RunError(f"{files[-1]} could not be written: {error.strerror}") from error
    return files


def _draw_flow(plt: Any, report: dict[str, Any]) -> Any:
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(figsize=(5, 2.5), layout="constrained")
    points = flow_points(report)
    x = [point.x for point in points]
    y = [point.entropy for point in points]
    axes.plot(x, y, color="gray", linewidth=0.7, zorder=1)
    for kind, style in FLOW_STYLES.items():
        x = [point.x for point in points if point.kind == kind]
        y = [point.entropy for point in points if point.kind == kind]
        axes.scatter(x, y, marker=style.marker, color=style.color, s=9, zorder=2)
    numbers = tick_layers(report["num_layers"])
    centers = [3 * (number - 1) + 1.5 for number in numbers]
    axes.set_xticks(centers, [str(number) for number in numbers])
    axes.set(xlabel="Layer Index", ylabel="Entropy (nats)")
    axes.tick_params(labelsize=7)
    patches = [Patch(color=style.color, label=style.label) for style in FLOW_STYLES.values()]
    # The legend is above the axes: in a corner it would cover the points of some models.
    axes.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=7
    )
    _add_caption(figure, report, FLOW_MEANING)
    return figure


def caption(report: dict[str, Any], meaning: str) -> str:
    """Return what a figure shows: the model, the number of tokens, and what a point means."""
    model = "/".join(str(report["model"]).rstrip("/").split("/")[-3:])
    count = f"{report['rows']:,} responses with {report['tokens']:,} tokens"
    return f"{model}, {count}. {meaning}"


def _change_meaning(report: dict[str, Any], modules: Sequence[str]) -> str:
    has_boundary = "ffn" in modules and report["boundary_layer"] is not None
    return CHANGE_MEANING + (BOUNDARY_MEANING if has_boundary else "")


def _add_caption(figure: Any, report: dict[str, Any], meaning: str) -> None:
    """Write the caption below the axes. A `$` of a path is no formula."""
    width = int(figure.get_figwidth() * CHARACTERS_PER_INCH)
    text = textwrap.fill(caption(report, meaning), width)
    figure.supxlabel(text, fontsize=6, color="dimgray", parse_math=False)


def _draw_change(axes: Any, report: dict[str, Any], module: str) -> None:
    style = CHANGE_STYLES[module]
    numbers = [layer["number"] for layer in report["layers"]]
    values = [layer[module]["change"]["mean"] for layer in report["layers"]]
    axes.axhline(0, color="red", linestyle="--", linewidth=0.8)
    axes.plot(numbers, values, marker=style.marker, color=style.color, markersize=3.5, linewidth=1)
    if module == "ffn" and report["boundary_layer"] is not None:
        axes.axvline(report["boundary_layer"], color="gray", linestyle=":", linewidth=0.8)
    axes.set(xlabel="Layer Index", ylabel="Entropy change (nats)", title=style.label)
    axes.set_xticks(tick_layers(report["num_layers"]))
    axes.tick_params(labelsize=7)


def tick_layers(num_layers: int) -> Sequence[int]:
    """Return the layer numbers to label on an axis: layer 1 and at most 20 others."""
    interval = -(-num_layers // 20)
    return [1, *(number for number in range(2, num_layers + 1) if number % interval == 0)]
