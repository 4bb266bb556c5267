"""The five pictures of an entropy analysis, as PNG and PDF: the flow through the depth, and the changes by layer. Layers count from 1."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from postgrad.errors import RunError

GOLD, RED, BLUE, PURPLE = "#d9a400", "#c0392b", "#2a6fbb", "#7d3c98"
CHANGES = {
    "ffn": ("FFN", "D", BLUE),
    "attention": ("Attention", "s", RED),
    "layer": ("Layer", "o", PURPLE),
}


class Point(NamedTuple):
    x: int
    entropy: float
    kind: str  # layer, attention or ffn


def flow_points(report: dict[str, Any]) -> list[Point]:
    """One point a place, 3L + 1 of them: each block's input, attention, FFN; a block's output is the next one's input.

    The last is the whole model's own policy, final norm included.
    """
    points: list[Point] = []
    for number, layer in enumerate(report["layers"]):
        points.append(Point(3 * number, layer["layer"]["input"]["mean"], "layer"))
        points.append(Point(3 * number + 1, layer["attention"]["output"]["mean"], "attention"))
        points.append(Point(3 * number + 2, layer["ffn"]["output"]["mean"], "ffn"))
    return [*points, Point(3 * len(report["layers"]), report["full_policy"]["mean"], "layer")]


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write all figures; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figures: dict[str, Any] = {"entropy_flow": _flow(plt, report)}
    for module in CHANGES:
        figure, axes = plt.subplots(figsize=(5, 2.5), layout="constrained")
        _change(axes, report, module)
        figures[f"{module}_change"] = figure
    figure, rows = plt.subplots(1, 3, figsize=(13, 2.8), layout="constrained")
    for axes, module in zip(rows, CHANGES, strict=True):
        _change(axes, report, module)
    figures["changes"] = figure
    files: list[Path] = []
    try:
        for name, figure in figures.items():
            for ending in ("png", "pdf"):
                files.append(folder / f"{name}.{ending}")
                figure.savefig(files[-1], dpi=300)
            plt.close(figure)
    except OSError as error:
        raise RunError(f"{files[-1]} could not be written: {error.strerror}") from error
    return files


def _flow(plt: Any, report: dict[str, Any]) -> Any:
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(figsize=(5, 2.5), layout="constrained")
    points = flow_points(report)
    axes.plot(
        [p.x for p in points], [p.entropy for p in points], color="gray", linewidth=0.7, zorder=1
    )
    looks = {
        "layer": ("Layer in and out", "s", GOLD),
        "attention": ("Attention", "s", RED),
        "ffn": ("FFN", "D", BLUE),
    }
    for kind, (_, marker, color) in looks.items():
        own = [p for p in points if p.kind == kind]
        axes.scatter(
            [p.x for p in own], [p.entropy for p in own], marker=marker, color=color, s=9, zorder=2
        )
    numbers = ticks(report["num_layers"])
    axes.set_xticks(
        [3 * (number - 1) + 1.5 for number in numbers], [str(number) for number in numbers]
    )
    axes.set(xlabel="Layer Index", ylabel="Entropy (nats)")
    axes.tick_params(labelsize=7)
    patches = [Patch(color=color, label=label) for label, _, color in looks.values()]
    # Above the axes: in a corner it would lie over the points of some models.
    axes.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=7
    )
    return figure


def _change(axes: Any, report: dict[str, Any], module: str) -> None:
    label, marker, color = CHANGES[module]
    numbers = [layer["number"] for layer in report["layers"]]
    axes.axhline(0, color="red", linestyle="--", linewidth=0.8)
    values = [layer[module]["change"]["mean"] for layer in report["layers"]]
    axes.plot(numbers, values, marker=marker, color=color, markersize=3.5, linewidth=1)
    if module == "ffn" and report["boundary_layer"] is not None:
        axes.axvline(report["boundary_layer"], color="gray", linestyle=":", linewidth=0.8)
    axes.set(xlabel="Layer Index", ylabel="Entropy change (nats)", title=label)
    axes.set_xticks(ticks(report["num_layers"]))
    axes.tick_params(labelsize=7)


def ticks(num_layers: int) -> Sequence[int]:
    """Layer numbers written on an axis: all of them while there is room."""
    every = -(-num_layers // 20)
    return [number for number in range(1, num_layers + 1) if number == 1 or number % every == 0]
