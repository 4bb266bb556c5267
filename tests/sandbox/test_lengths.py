"""Which forms of a test the length of a result decides: the table in docs/rewards.md is true."""

from pathlib import Path

import pytest
from test_cheats import run_tests

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
SETUP = "from itertools import starmap\nfrom operator import eq\nwant = [1, 2, 3]\n"
RETURNS = ("[1, 2, 3]", "[]", "[1]")  # the right result, and those of the columns


def rows() -> list[list[str]]:
    table = PAGE.read_text().split("<!-- table: lengths -->")[1].split("<!-- end")[0]
    return [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]


@pytest.mark.slow
def test_the_table_of_the_page_is_true():
    expected = [[test, "passes", *ends] for test, *ends in rows()]
    assert len(expected) >= 12
    tests = [test.strip("`") for test, *_ in expected]
    tests = [test if test.startswith("for ") else f"assert {test}" for test in tests]
    found = [[test] for test, *_ in expected]
    for returned in RETURNS:
        program = f"def f(x): return {returned}"
        for row, result in zip(found, run_tests(program, tests, SETUP), strict=True):
            row.append(
                "passes" if result.passed else "unsupported" if result.unsupported else "fails"
            )
    assert found == expected
