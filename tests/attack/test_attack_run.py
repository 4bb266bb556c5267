"""The table of `make attack`: what counts as tried, held, failed and not tried."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from attack_areas import AREAS
from run import case_outcomes, count_outcomes, untried_areas

TESTS = Path(__file__).parents[1]
PRINTED = "<system-out>2000 combinations tried: 900 trained; {} wrong; seeds []</system-out>"


def test_the_files_of_all_areas_exist():
    assert not [name for name in AREAS if not (TESTS / name).is_file()]


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("", {"tried": 1, "held": 1, "failed": 0}),
        ("<failure/>", {"tried": 1, "held": 0, "failed": 1}),
        ("<error/>", {"tried": 1, "held": 0, "failed": 1}),
        ("<skipped/>", {"skipped": 1}),
        (PRINTED.format(0), {"tried": 2000, "held": 2000, "failed": 0}),
        ("<failure/>" + PRINTED.format(3), {"tried": 2000, "held": 1997, "failed": 3}),
    ],
)
def test_outcomes_of_a_test(inside, expected):
    assert case_outcomes(ElementTree.fromstring(f"<testcase>{inside}</testcase>")) == expected


def test_an_area_without_tests_or_with_skipped_ones_is_not_tried(tmp_path):
    cases = {"escapes": "tests.sandbox.test_sandbox", "wire": "tests.cluster.test_wire"}
    report = tmp_path / "report.xml"
    skipped = f'<testcase classname="{cases["escapes"]}"><skipped/></testcase>'
    held = "".join(f'<testcase classname="{name}"/>' for name in cases.values())
    report.write_text(f"<testsuite>{skipped * 2}{held}</testsuite>")
    untried = untried_areas(count_outcomes(report))
    assert "escapes from the sandbox" in untried
    assert "messages between processes" not in untried
    assert "attacks on the page" in untried
