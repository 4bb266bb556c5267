"""Files of JSON lines in tests."""

import json
from pathlib import Path
from typing import Any


def write_jsonl(path: Path, *rows: Any) -> Path:
    """Write a line per row; a text is a line as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
