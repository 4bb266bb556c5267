"""The tests of one program, one after the other: the same rules for every sandbox, here or elsewhere."""

import time
from collections.abc import Callable, Sequence

from postgrad.sandbox.outcome import Outcome, Result, judged

Clock = Callable[[], float]


def stdio_results(
    run: Callable[[str], Outcome],
    tests: Sequence[dict[str, str]],
    total_s: float,
    clock: Clock = time.monotonic,
) -> list[Result]:
    """Run the program with each test's `input` and compare what it prints with `output`, which it never sees.

    Tests that do not get their turn within `total_s` seconds of `clock` count as not passed.
    """
    end, results = clock() + total_s, []
    for test in tests:
        results.append(
            judged(run(test["input"]), test["output"]) if clock() < end else _used_up(total_s)
        )
    return results


def assert_results(
    judge: Callable[[list[int]], dict[int, Result] | str],
    num_tests: int,
    total_s: float,
    clock: Clock = time.monotonic,
) -> list[Result]:
    """Have the tests judged by their numbers, in turn, on a program that they share while they pass.

    One that fails is run again on a fresh one before it counts, so that what an earlier test left behind decides nothing.

    Args:
        judge: runs these tests on a freshly loaded program, at least until one fails; or says why it does not load.
    """
    results: dict[int, Result] = {}
    end = clock() + total_s
    waiting = list(range(num_tests))
    while waiting:
        if clock() >= end:
            return [results.get(index, _used_up(total_s)) for index in range(num_tests)]
        found = judge(waiting)
        if isinstance(found, str):  # it does not even load: no test can pass
            return [results.get(index, Result(False, reason=found)) for index in range(num_tests)]
        fresh = waiting[0]
        for index in list(waiting):
            result = found.get(index)
            if result is None or not (result.passed or index == fresh):
                break
            results[index] = result
            waiting.remove(index)
            if not result.passed:
                break
    return [results[index] for index in range(num_tests)]


def _used_up(total_s: float) -> Result:
    return Result(False, reason=f"the program's {total_s:g} s for all tests are used up")
