"""`postgrad runs [FOLDER]`: the runs of a folder, in the terminal."""

import time
from pathlib import Path
from typing import Any

HEADER = ("run", "method", "model", "step", "last value", "state", "age")
MAX_WIDTH = 40  # characters of a column
MAX_REASON = 200  # characters


def runs(folder: Path = Path("runs")) -> int:
    """List the runs below a folder, the newest first.

    Args:
        folder: folder of runs
    """
    from postgrad.view.folder import Folder
    from postgrad.view.runs import Runs

    overviews = Runs(Folder(folder)).all()
    if not overviews:
        print(f"no runs in {folder}; postgrad train RECIPE key=value ... starts one")
        return 0
    newest_first = sorted(overviews, key=lambda run: run["changed"], reverse=True)
    rows = [HEADER, *(_row(run) for run in newest_first)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    for run_ in newest_first:
        if run_["state"] in ("failed", "unreadable"):
            print(f"{_printable(run_['name'])}: {_printable(run_['reason'], MAX_REASON)}")
    return 0


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    step = f"{run['step']}/{run['steps']}" if run["steps"] else f"{run['step']}"
    last = f"{run['last']:.4g} {run['metric']}" if run["last"] is not None else "-"
    model = Path(run["model"]).name if run["model"].startswith("/") else run["model"]
    state = "cannot be read" if run["state"] == "unreadable" else run["state"]
    cells = (run["name"], run["method"], model, step, last, state, age(run["changed"]))
    return tuple(_printable(cell) for cell in cells)


def age(changed: float) -> str:
    """Return the time since a moment in its largest unit, such as `3 h`."""
    seconds = max(0.0, time.time() - changed)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _printable(text: str, width: int = MAX_WIDTH) -> str:
    """Return a text without control characters, which could rewrite the terminal."""
    shown = "".join(one if one.isprintable() else "?" for one in text) or "-"
    return shown if len(shown) <= width else f"{shown[: width - 3]}..."
