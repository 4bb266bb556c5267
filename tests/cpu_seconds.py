"""A pytest plugin: CPU seconds of every test file, beside those of cpu_seconds.tsv.

    python -m pytest -n 2 --record-cpu      # writes cpu_seconds.tsv, on a quiet machine

Seconds of child processes count when they have ended. What a session's fixture costs counts for
the first file that uses it.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("cpu_seconds.tsv")
SMALL_S = 5.0  # a file below this is not compared
SECONDS = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-cpu", action="store_true", help="write tests/cpu_seconds.tsv")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SECONDS] = defaultdict(float)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Measure a test with its fixtures; its reports carry the seconds to the first process."""
    item.user_properties.append(("cpu_start", used_seconds()))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[object]:
    report = yield
    if report.when == "teardown":
        start = next(value for name, value in item.user_properties if name == "cpu_start")
        report.cpu_s = used_seconds() - start
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown" and (config := _first_config):
        config.stash[SECONDS][report.location[0]] += getattr(report, "cpu_s", 0.0)


_first_config: pytest.Config | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    global _first_config
    _first_config = session.config


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sum, and the files that need more than twice the seconds of the table."""
    config = terminalreporter.config
    seconds = config.stash[SECONDS]
    if config.getoption("--record-cpu"):
        lines = [f"{file}\t{value:.1f}\n" for file, value in sorted(seconds.items())]
        TABLE.write_text("".join(lines))
    recorded = read_table()
    terminalreporter.write_line(
        f"{sum(seconds.values()):.0f} CPU seconds in {len(seconds)} files; "
        f"{TABLE.name} has {sum(recorded.get(file, 0.0) for file in seconds):.0f} for them"
    )
    for file, value in sorted(seconds.items(), key=lambda pair: -pair[1]):
        before = max(recorded.get(file, 0.0), SMALL_S)
        if value > 2 * before:
            terminalreporter.write_line(f"{file}: {value:.0f} CPU seconds, before {before:.0f}")


def read_table() -> dict[str, float]:
    """Return the recorded CPU seconds of each test file."""
    lines = TABLE.read_text().splitlines() if TABLE.is_file() else []
    return {file: float(value) for file, value in (line.split("\t") for line in lines)}


def used_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])
