"""Tables of test cases that are data: tables.yaml beside the tests that read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


def table(test_file: str, name: str) -> list[Any]:
    """Return the rows of a table in tables.yaml beside a test file: tuples, or single values."""
    text = Path(test_file).with_name("tables.yaml").read_text(encoding="utf-8")
    tables = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [tuple(row) if isinstance(row, list) else row for row in tables[name]]


def tabled(names: str) -> Callable[..., Any]:
    """Run a test once per row of the table that has the test's name, without `test_`."""

    def parametrized(test: Any) -> Any:
        rows = table(test.__code__.co_filename, test.__name__.removeprefix("test_"))
        return pytest.mark.parametrize(names, rows)(test)

    return parametrized
