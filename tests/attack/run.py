"""Runs every attack and prints a table: what was tried, what held, what failed.

python tests/attack/run.py           all attacks, 2,000 random combinations of settings included
python tests/attack/run.py --short   the ones that take a second or less
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from attack_areas import AREAS, area_of  # noqa: E402

COLUMNS = ("tried", "held", "failed", "skipped")


def count_outcomes(report: Path) -> dict[str, Counter[str]]:
    """Return the outcomes by area from a JUnit file that pytest wrote."""
    counts: dict[str, Counter[str]] = {area: Counter() for area in AREAS.values()}
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").replace(".", "/")
        area = area_of(f"{module}.py")
        if area:
            counts[area] += case_outcomes(case)
    return counts


def case_outcomes(case: ElementTree.Element) -> Counter[str]:
    """Return what one test adds to the counts.

    A test that runs combinations of settings prints how many and how many were wrong: each counts.
    """
    if case.find("skipped") is not None:
        return Counter(skipped=1)
    failed = int(case.find("failure") is not None or case.find("error") is not None)
    tried = 1
    printed = case.findtext("system-out") or ""
    if found := re.search(r"(\d+) combinations tried: .*; (\d+) wrong", printed):
        tried = int(found[1])
        failed = max(failed, int(found[2]))
    return Counter(tried=tried, held=tried - failed, failed=failed)


def untried_areas(counts: dict[str, Counter[str]]) -> list[str]:
    """Return the areas of which nothing ran, or more was skipped than ran: they have not held."""
    return [
        area
        for area, outcomes in counts.items()
        if not outcomes["tried"] or outcomes["skipped"] > outcomes["tried"]
    ]


def table(counts: dict[str, Counter[str]]) -> str:
    width = max(len(area) for area in counts)
    lines = [f"{'area':<{width}}" + "".join(f"{name:>9}" for name in COLUMNS)]
    for area, outcomes in counts.items():
        numbers = "".join(f"{outcomes[name]:>9}" for name in COLUMNS)
        lines.append(f"{area:<{width}}{numbers}")
    total = sum(counts.values(), Counter())
    lines.append(f"{'all':<{width}}" + "".join(f"{total[name]:>9}" for name in COLUMNS))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="without slow attacks")
    parser.add_argument("--jobs", default="2", help="processes")
    options = parser.parse_args()
    files = [str(TESTS / name) for name in AREAS]
    selection = ["-m", "attack", "--long", "--nightly"]
    if options.short:
        selection = ["-m", "attack and not slow and not nightly"]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        outputs = [f"--junitxml={report}", "-o", "junit_logging=system-out"]
        command = [sys.executable, "-m", "pytest", "-q", "-n", options.jobs, *selection, *outputs]
        code = subprocess.run([*command, *files], cwd=TESTS.parent).returncode
        if not report.is_file():
            return code
        counts = count_outcomes(report)
    print(f"\n{table(counts)}\n{time.monotonic() - started:.0f} s")
    if code and not any(outcomes["failed"] for outcomes in counts.values()):
        print(f"pytest ended with code {code} although no attack failed: see its errors above")
    # --short selects tests, and of some areas none.
    untried = [area for area in untried_areas(counts) if counts[area] or not options.short]
    for area in untried:
        print(f"not tried: {area}; the tests that were skipped say why")
    return code or int(bool(untried))


if __name__ == "__main__":
    sys.exit(main())
