"""`postgrad plot RUN [RUN ...] [FILE]`: the charts of `postgrad view` as a picture."""

import argparse
from pathlib import Path
from typing import Annotated

from postgrad.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")
TABLE_SUFFIXES = (".md", ".csv")


def smoothing_weight(text: str) -> float:
    """Return an argparse type: a number from 0 to below 1."""
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 <= weight < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 1")
    return weight


def plot(
    paths: list[Path],
    *,
    poster: bool = False,
    title: str = "",
    smoothing: Annotated[float, smoothing_weight] = 0.6,
    bars: bool = False,
    metric: str = "avg",
) -> int:
    """Draw the charts of `postgrad view` into one picture, for one run or for several runs
    overlaid. FILE is curves.png in the first run folder unless given; its suffix chooses the
    format: .png, .svg or .pdf.
    postgrad plot --bars FOLDER [FOLDER ...] [FILE] draws evaluations instead, models by data sets:
    FILE is bars.png in the first folder unless given, or a table as .md or .csv.

    Args:
        paths [RUN]: run folders, and at last the file to write
        --poster: one summary picture instead: reward, validation accuracy, and answers of the
            first and the last step
        --title: title of the poster; default: the run's name, method and data
        --smoothing: weight of the exponential moving average, from 0 to below 1
        --bars: bars of evaluations below the folders, one group per data set, one bar per model
        --metric: of the bars: avg, best, maj, format, answer, score or length
    """
    if title and not poster:
        raise ConfigError("--title needs --poster; the other charts have their own titles")
    if bars:
        if poster:
            raise ConfigError("--bars shows evaluations, --poster a run; use one of them")
        return draw_evaluations(paths, metric)
    if metric != "avg":
        raise ConfigError("--metric needs --bars; a run's charts show all its metrics")
    runs, file = split_paths(paths)
    if poster and len(runs) > 1:
        raise ConfigError("--poster shows one run; name one run, or leave --poster out")
    from postgrad.view.picture import draw_panels, draw_poster

    print(draw_poster(runs[0], file, title) if poster else draw_panels(runs, file, smoothing))
    return 0


def draw_evaluations(paths: list[Path], metric: str) -> int:
    """Write the evaluations below the folders as bars or as a table. Raises ConfigError."""
    from postgrad.evaluation.pivot import METRICS, make_pivot, read_summaries, write_pivot

    if metric not in METRICS:
        raise ConfigError(f"--metric {metric} is unknown; use one of {', '.join(METRICS)}")
    folders, file = split_paths(paths, (*SUFFIXES, *TABLE_SUFFIXES), "bars.png")
    write_pivot(make_pivot(read_summaries(folders), metric), metric, file)
    print(file)
    return 0


def split_paths(
    paths: list[Path], suffixes: tuple[str, ...] = SUFFIXES, default: str = "curves.png"
) -> tuple[list[Path], Path]:
    """Return the folders and the file to write. Raises ConfigError."""
    runs = list(paths)
    file = None
    if runs[-1].suffix in suffixes and not runs[-1].is_dir():
        file = runs.pop()
    if not runs:
        raise ConfigError("the run is missing; write postgrad plot RUN [RUN ...] [FILE]")
    for path in runs:
        if path.is_dir():
            continue
        if path.suffix and path == runs[-1] and len(runs) > 1:
            raise ConfigError(f"{path}: the file's name must end in {', '.join(suffixes)}")
        raise ConfigError(f"no run folder {path}")
    return runs, file or runs[0] / default
