"""Tables of test cases that are data: tables.yaml beside the tests that read them."""

from pathlib import Path
from typing import Any

import yaml


def table(test_file: str, name: str) -> list[tuple[Any, ...]]:
    """Return the rows of a table in tables.yaml beside a test file."""
    text = Path(test_file).with_name("tables.yaml").read_text(encoding="utf-8")
    tables = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [tuple(row) for row in tables[name]]
