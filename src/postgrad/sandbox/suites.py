"""The tests of one program, one after the other: the same rules for every sandbox."""

import time
from collections.abc import Callable, Sequence

from postgrad.sandbox.outcome import Outcome, Result, stdio_result

Clock = Callable[[], float]


def stdio_results(
    run: Callable[[str], Outcome],
    tests: Sequence[dict[str, str]],
    total_s: float,
    clock: Clock = time.monotonic,
) -> list[Result]:
    """Run the program with each test's `input` and compare what it prints with `output`.

    Tests that cannot start within `total_s` seconds of `clock` do not pass.
    """
    end = clock() + total_s
    results: list[Result] = []
    for test in tests:
        if clock() < end:
            results.append(stdio_result(run(test["input"]), test["output"]))
        else:
            results.append(_out_of_time(total_s))
    return results


def assert_results(
    run_tests: Callable[[list[int]], dict[int, Result] | str],
    num_tests: int,
    total_s: float,
    clock: Clock = time.monotonic,
) -> list[Result]:
    """Run the tests in order; they share one loaded program as long as they pass.

    A test that fails is run again on a freshly loaded program before it counts, so that the state
    that an earlier test left cannot make it fail.

    Args:
        run_tests: runs tests, given by their numbers, on a freshly loaded program, at least until
            one fails; returns why the program does not load if it does not.
    """
    results: dict[int, Result] = {}
    end = clock() + total_s
    pending = list(range(num_tests))
    while pending:
        if clock() >= end:
            return [results.get(index, _out_of_time(total_s)) for index in range(num_tests)]
        new_results = run_tests(pending)
        if isinstance(new_results, str):  # it does not load: no test can pass
            failed = Result(False, reason=new_results)
            return [results.get(index, failed) for index in range(num_tests)]
        first = pending[0]
        for index in list(pending):
            result = new_results.get(index)
            if result is None or not (result.passed or index == first):
                break
            results[index] = result
            pending.remove(index)
            if not result.passed:
                break
    return [results[index] for index in range(num_tests)]


def _out_of_time(total_s: float) -> Result:
    return Result(False, reason=f"the {total_s:g} s for all tests are used up")
