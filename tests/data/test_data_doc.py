"""docs/data.md lists every data set, style and common option as they are in the code."""

from pathlib import Path

from postgrad.cli.data import COMMANDS
from postgrad.data.encode.styles import STYLES
from postgrad.data.prepare.catalog import COMMON, SETS

DOC = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_table_has_every_data_set():
    for name, entry in SETS.items():
        source = entry.data_source or "the rows' own"
        repo = entry.repo or "–"
        splits = ", ".join(entry.splits)
        row = f"| `{name}` | {entry.help} | {splits} | {source} | {entry.style} | {repo} |"
        assert row in DOC, row


def test_table_has_every_style():
    for name, style in STYLES.items():
        writes = "whole text" if style.text else "messages"
        assert f"| `{name}` | {style.help} | {writes} |" in DOC, name


def test_every_command_and_common_option_is_documented():
    assert all(f"postgrad data {command}" in DOC for command in COMMANDS)
    assert all(f"`{option}=" in DOC for option in COMMON)
