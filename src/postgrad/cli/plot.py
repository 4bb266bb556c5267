"""`postgrad plot RUN [RUN ...] [FILE]`: the charts of `postgrad view` as a picture."""

import argparse
from pathlib import Path

from postgrad.cli.arguments import Parser
from postgrad.errors import ConfigError

DESCRIPTION = """\
Draws the charts of `postgrad view` into one picture, for one run or for several runs overlaid.
FILE is curves.png in the first run folder unless given; its suffix chooses the format: .png,
.svg or .pdf."""

SUFFIXES = (".png", ".svg", ".pdf")


def make_parser() -> Parser:
    parser = Parser(
        "plot RUN [RUN ...] [FILE] [--poster] [--title TITLE] [--smoothing 0.6]", DESCRIPTION
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--poster",
        action="store_true",
        help="one summary picture instead: reward, validation accuracy, and answers of the first "
        "and the last step",
    )
    parser.add_argument(
        "--title",
        default="",
        help="title of the poster; default: the run's name, method and data",
    )
    parser.add_argument(
        "--smoothing",
        type=smoothing_weight,
        default=0.6,
        help="weight of the exponential moving average, from 0 to below 1 (default 0.6)",
    )
    return parser


def smoothing_weight(text: str) -> float:
    """An argparse type: a number from 0 to below 1."""
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 <= weight < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 1")
    return weight


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv, help_if_empty=True)
    if arguments.title and not arguments.poster:
        raise ConfigError("--title needs --poster; the other charts have their own titles")
    runs, file = split_paths(arguments.paths)
    if arguments.poster and len(runs) > 1:
        raise ConfigError("--poster shows one run; name one run, or leave --poster out")
    from postgrad.view.picture import draw_panels, draw_poster

    if arguments.poster:
        print(draw_poster(runs[0], file, arguments.title))
    else:
        print(draw_panels(runs, file, arguments.smoothing))
    return 0


def split_paths(paths: list[Path]) -> tuple[list[Path], Path]:
    """Returns the run folders and the picture file. Raises ConfigError."""
    runs = list(paths)
    file = None
    if runs[-1].suffix in SUFFIXES and not runs[-1].is_dir():
        file = runs.pop()
    if not runs:
        raise ConfigError("the run is missing; write postgrad plot RUN [RUN ...] [FILE]")
    for path in runs:
        if path.is_dir():
            continue
        if path.suffix and path == runs[-1] and len(runs) > 1:
            raise ConfigError(f"{path}: a picture's name must end in .png, .svg or .pdf")
        raise ConfigError(f"no run folder {path}")
    return runs, file or runs[0] / "curves.png"
