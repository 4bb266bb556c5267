"""Rows of every documented layout, real files and prepared sets are read as they were recorded.

After a change on purpose: python tests/golden/record.py problems, and read the diff.
"""

import pytest
from layouts import ITEMS, LAYOUTS
from problems import REAL_DATA, Line, file_lines, is_real, read, row_lines, set_lines

AGAIN = "if this is meant: python tests/golden/record.py problems"


def check(recorded: list[Line], found: list[Line]) -> None:
    """Fail with what differs: the first three lines of each layout."""
    assert recorded and {key(line) for line in recorded} == {key(line) for line in found}, AGAIN
    old = {key(line): line for line in recorded}
    shown: dict[str, list[str]] = {}
    for line in found:
        if line != old[key(line)]:
            shown.setdefault(line[1], []).append(f"- {old[key(line)]}\n+ {line}")
    texts = [f"{name}, {len(lines)} lines" for name, lines in shown.items()]
    texts += [text for lines in shown.values() for text in lines[:3]]
    assert not shown, "\n".join([*texts, AGAIN])


def key(line: Line) -> tuple[str, ...]:
    """Return what a line is about: its kind, its name, and its row or file."""
    number_of_names = 2 if line[0] == "file" else 3
    return tuple(map(str, line[:number_of_names]))


@pytest.mark.slow
def test_rows_of_every_layout_are_read_and_encoded_as_recorded():
    recorded = read("row")
    assert len(recorded) == len(LAYOUTS) * len(ITEMS) and len(ITEMS) == 20
    check(recorded, list(row_lines()))


@pytest.mark.slow
@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"no real data at {REAL_DATA}")
def test_real_files_are_read_as_recorded():
    check(read("file"), list(file_lines()))


@pytest.mark.slow
def test_sets_are_prepared_as_recorded():
    recorded = read("set")
    if not REAL_DATA.is_dir():
        recorded = [line for line in recorded if not is_real(line)]
    check(recorded, list(set_lines()))
