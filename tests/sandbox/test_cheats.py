"""Asserts cannot be cheated: each cheat fails a test that an honest program passes.

The programs run without bubblewrap, as on a Sandbox Fusion server (inside/single_sandbox.py): what
is tested here is not the isolation but what a test believes. test_sandbox.py has the escapes.
"""

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from typing import Any

import pytest
from sandbox_programs import CHEATS, RIGHT, Cheat

from postgrad.sandbox.bubblewrap import INSIDE
from postgrad.sandbox.outcome import Limits, Result, parse_result
from postgrad.sandbox.remote import MAIN_PROGRAM, MANY_THREADS

KEY = "the test runner's key"
PER_GROUP = 5  # cheats of a group that `make test` tries; make test-nightly tries all
LIMITS = Limits(time_s=60.0, memory_mb=1024, threads=MANY_THREADS)


def run_tests(
    program: str, tests: list[str], setup: str = "", entry_point: str = ""
) -> list[Result]:
    """Run tests on one loaded program, each whether or not the others pass."""
    message = {
        "settings": LIMITS.settings(uid=0) | {"key": KEY},
        "program": program,
        "suite": {
            "tests": tests,
            "setup": setup,
            "entry_point": entry_point,
            "run": list(range(len(tests))),
        },
    }
    code = f"import sys; sys.path.insert(0, {str(INSIDE.parent)!r}); {MAIN_PROGRAM}"
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code.replace("\n", ";")],
        input=json.dumps(message),
        capture_output=True,
        text=True,
        timeout=600,
    )
    messages = [json.loads(line) for line in process.stdout.splitlines()]
    assert messages, process.stderr
    assert all(message["key"] == KEY for message in messages)
    results = [parse_result(message) for message in messages if "test" in message]
    broken = [message["broken"] for message in messages if "broken" in message]
    return results or [Result(False, reason=str(broken or process.stderr))]


@cache
def results_of(program: str, setup: str, entry_point: str) -> dict[str, Result]:
    """Run all tests of the table that this program meets, in one process."""
    tests = [
        cheat.test
        for cheat in CHEATS
        if (cheat.setup, cheat.entry_point) == (setup, entry_point)
        and program in (cheat.program, cheat.honest)
    ]
    return dict(zip(tests, run_tests(program, tests, setup, entry_point), strict=True))


def run_cheat(cheat: Cheat, program: str) -> Result:
    return results_of(program, cheat.setup, cheat.entry_point)[cheat.test]


def test_there_are_enough_cheats_with_names_of_their_own():
    assert len({(cheat.group, cheat.name) for cheat in CHEATS}) == len(CHEATS) >= 220
    assert all(cheat.honest or cheat.refused == "unsupported" for cheat in CHEATS)


def cheat_params() -> list[Any]:
    """Return the cheats as parameters; all but the first of each group are marked nightly."""
    groups: Counter[str] = Counter()
    params: list[Any] = []
    for cheat in CHEATS:
        groups[cheat.group] += 1
        is_frequent = groups[cheat.group] <= PER_GROUP
        mark = pytest.mark.slow if is_frequent else pytest.mark.nightly
        params.append(pytest.param(cheat, id=f"{cheat.group}: {cheat.name}", marks=mark))
    return params


@pytest.mark.parametrize("cheat", cheat_params())
def test_a_cheat_is_refused_and_an_honest_program_passes(cheat):
    result = run_cheat(cheat, cheat.program)
    assert not result.passed
    assert result.unsupported == (cheat.refused == "unsupported"), result.reason
    if cheat.honest:
        honest = run_cheat(cheat, cheat.honest)
        assert honest.passed, honest.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes_all_its_tests_that_are_supported(name):
    program, tests, unsupported = RIGHT[name]
    if name == "global state":  # each test needs a freshly loaded program
        tests = tests[:1]
    results = run_tests(program, tests)
    assert {n for n, result in enumerate(results) if result.unsupported} == unsupported
    failed = [r for r in results if not r.passed and not r.unsupported]
    assert not failed
