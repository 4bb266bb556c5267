"""Tables of test cases that are data: tables.yaml beside the tests that read them."""

from pathlib import Path
from typing import Any

import yaml


def table(test_file: str, name: str) -> list[Any]:
    """Return the rows of a table in tables.yaml beside a test file: tuples, or single values."""
    text = Path(test_file).with_name("tables.yaml").read_text(encoding="utf-8")
    tables = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [tuple(row) if isinstance(row, list) else row for row in tables[name]]
