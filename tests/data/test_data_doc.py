"""docs/data.md names every set, style and common word as they are in the code."""

from pathlib import Path

from postgrad.cli.data import COMMANDS
from postgrad.data.prepare.catalog import COMMON, SETS
from postgrad.data.styles import STYLES

DOC = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_every_set_stands_in_the_table():
    for name, entry in SETS.items():
        source, repo = entry.data_source or "the rows' own", entry.repo or "–"
        row = f"| `{name}` | {entry.help} | {', '.join(entry.splits)} | {source} | {entry.style} | {repo} |"
        assert row in DOC, row


def test_every_style_stands_in_the_table():
    for name, style in STYLES.items():
        assert (
            f"| `{name}` | {style.help} | {'whole text' if style.text else 'messages'} |" in DOC
        ), name


def test_every_command_and_common_word_is_told():
    assert all(f"postgrad data {command}" in DOC for command in COMMANDS)
    assert all(f"`{word}=" in DOC for word in COMMON)
