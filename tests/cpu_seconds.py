"""A pytest plugin: CPU seconds of every test file, beside those of cpu_seconds.tsv.

    make test PYTEST_ARGS=--record-cpu     # writes cpu_seconds.tsv, on a quiet machine
    make test PYTEST_ARGS=--limit-cpu      # fails if a file needs far more than its seconds

The table has what `make test` runs. Seconds of child processes count when they have ended. What a
session's fixture or a first import costs counts for the first file that needs it.

CI sets the limit: three times the seconds of the table and 30 more; a file that the table does not
have is not limited. It is there for a file that became several times as slow, and must never fail
for another reason: an ARM machine needs about 1.5 times the seconds of the x86-64 machine that
wrote the table, two processes that share a core up to 1.5 times, and the first file of a process
about 10 seconds for what others find imported.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("cpu_seconds.tsv")
LIMIT_TIMES, LIMIT_MORE_S = 3, 30.0
SECONDS = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-cpu", action="store_true", help="write tests/cpu_seconds.tsv")
    parser.addoption(
        "--limit-cpu", action="store_true", help="fail if a file needs thrice its CPU seconds"
    )


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
    """Print the sum, and the files above their limits."""
    config = terminalreporter.config
    seconds, recorded = config.stash[SECONDS], read_table()
    terminalreporter.write_line(
        f"{sum(seconds.values()):.0f} CPU seconds in {len(seconds)} files; "
        f"{TABLE.name} has {sum(recorded.get(file, 0.0) for file in seconds):.0f} for them"
    )
    for line in over_limit(seconds, recorded):
        terminalreporter.write_line(line)
    if config.getoption("--record-cpu"):
        kept = {
            file: value for file, value in recorded.items() if (config.rootpath / file).is_file()
        }
        lines = [f"{file}\t{value:.1f}\n" for file, value in sorted((kept | seconds).items())]
        TABLE.write_text("".join(lines))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With --limit-cpu a file above its limit is a failure."""
    config = session.config
    if config.getoption("--limit-cpu") and over_limit(config.stash[SECONDS], read_table()):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def over_limit(seconds: dict[str, float], recorded: dict[str, float]) -> list[str]:
    """Return one line for each file above its limit."""
    return [
        f"{file}: {value:.0f} CPU seconds, before {recorded[file]:.0f}"
        for file, value in sorted(seconds.items(), key=lambda pair: -pair[1])
        if file in recorded and value > LIMIT_TIMES * recorded[file] + LIMIT_MORE_S
    ]


def read_table() -> dict[str, float]:
    """Return the recorded CPU seconds of each test file."""
    lines = TABLE.read_text().splitlines() if TABLE.is_file() else []
    return {file: float(value) for file, value in (line.split("\t") for line in lines)}


def used_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])
