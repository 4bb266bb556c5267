"""Result files of the benchmarks: one JSON object per line, appended when it is measured.

A line has `name`, what was measured, and `system`, who did it. A benchmark that is started again
with the same file measures only what has no result there yet, so one that was cut continues.
`failed` says why a line has no figures; such a line is measured again. For a program that ended
without a result, such as one that ran out of time:

    python benchmarks/gpu/rows.py NAME SYSTEM REASON FILE
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(files: list[Path]) -> list[Row]:
    """Return the lines of all files; a line that was cut while it was written is left out."""
    rows: list[Row] = []
    for file in files:
        if not file.is_file():
            continue
        for line in file.read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):
                rows.append(json.loads(line))
    return rows


def is_measured(file: Path | None, name: str, system: str) -> bool:
    """Return whether the file has figures of this system for this work."""
    rows = read_rows([file]) if file else []
    return any(
        row.get("name") == name and row.get("system") == system and "failed" not in row
        for row in rows
    )


def write_row(file: Path | None, name: str, system: str, **figures: Any) -> None:
    """Print a result and append it to the file, on the disk before this returns."""
    line = json.dumps({"name": name, "system": system, **figures})
    print(line, flush=True)
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(line + "\n")
        out.flush()
        os.fsync(out.fileno())


def step_name(shape: str, problems: int, samples: int, tokens: int) -> str:
    """Return the name of a GRPO step, the same for every system."""
    return f"step {shape} {problems} x {samples} x {tokens}"


def rollout_name(shape: str, rows: int, samples: int, tokens: int) -> str:
    """Return the name of a rollout, the same for every system."""
    return f"rollout {shape} {rows // samples} x {samples} x {tokens}"


def main() -> None:
    """Write a line that says why a system has no figures, unless it has some."""
    name, system, reason, file = sys.argv[1:5]
    if not is_measured(Path(file), name, system):
        write_row(Path(file), name, system, failed=reason or "no output")


if __name__ == "__main__":
    main()
