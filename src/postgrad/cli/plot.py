"""`postgrad plot RUN [RUN ...] [FILE]`: the charts of `postgrad view` as a picture."""

import argparse
from pathlib import Path
from typing import Annotated

from postgrad.errors import Missing, Unreadable, WrongValue

SUFFIXES = (".png", ".svg", ".pdf")


def smoothing_weight(text: str) -> float:
    """Return an argparse type: a number from 0 to below 1."""
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 <= weight < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 1")
    return weight


def plot(paths: list[Path], *, smoothing: Annotated[float, smoothing_weight] = 0.6) -> int:
    """Draw the charts of `postgrad view` into one picture, for one run or for several runs
    overlaid. FILE is curves.png in the first run folder unless given; its suffix chooses the
    format: .png, .svg or .pdf.
    postgrad eval table FOLDER ... out=bars.png draws evaluations.

    Args:
        paths [RUN]: run folders, and at last the file to write
        --smoothing: weight of the exponential moving average, from 0 to below 1
    """
    runs = list(paths)
    file = None
    if runs[-1].suffix in SUFFIXES and not runs[-1].is_dir():
        file = runs.pop()
    if not runs:
        raise Missing("the run is missing; write postgrad plot RUN [RUN ...] [FILE]", at="RUN")
    for path in runs:
        if path.is_dir():
            continue
        if path.suffix and path == runs[-1] and len(runs) > 1:
            raise WrongValue(f"{path}: the file's name must end in {', '.join(SUFFIXES)}")
        raise Unreadable(f"no run folder {path}")
    from postgrad.view.picture import draw_panels

    print(draw_panels(runs, file or runs[0] / "curves.png", smoothing))
    return 0
