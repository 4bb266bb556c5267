"""Programs against tests, in the sandbox. Only the pool's child processes import this.

The program is the last fenced block of the response. The tests come with the problem, in one of the
forms that data sets use:

- `tests` in extra, or the ground truth as JSON: a list of asserts, or of {"input", "output"}, or
  {"inputs", "outputs"} with or without `fn_name`;
- MBPP: `test_list`, with `test_setup_code` or `test_imports`;
- HumanEval: `test`, which defines check(candidate), `entry_point`, and `prompt`, which a response
  may continue;
- otherwise the ground truth is taken as asserts, if it has any.

The asserts run in another process than the program and get plain values only (sandbox/inside/).
Some tests can still be passed without a right program:

- A test with few possible answers can be guessed.
- `assert 41 in f(1)` passes with a result that contains everything, and
  `assert set(f(1)) <= {1, 2}` with an empty one.
- `assert f(1) > 40 and f(1) < 42` passes with a function that returns something else each time.
- `assert f(x) == sorted(x)` passes with a function that empties `x`.
- `assert Stack().is_empty()` asks a class of the program about itself.

docs/rewards.md has the complete list.
"""

import ast
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from postgrad.problem import Failure, Problem, Score
from postgrad.sandbox.local import Sandbox
from postgrad.sandbox.outcome import Limits, Result
from postgrad.sandbox.remote import FusionSandbox, remote_sandbox
from postgrad.verifiers.grading.answers import unusable

LIMITS = Limits()
TOTAL_S = 40.0  # for all tests of one program; this verifier's limit in table.py is above it

_FENCE = re.compile(r"^([ \t]{0,3})```[^\n]*$", re.MULTILINE)
# For tests that call a function by name with JSON arguments: tuples count as lists.
_TUPLES_TO_LISTS = """
def _as_lists(value):
    return [_as_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
"""


@dataclass(frozen=True)
class Suite:
    """A problem's tests: asserts, or inputs with outputs.

    Attributes:
        setup: code that runs before each assert, in the tests' process.
        entry_point: the function that the asserts are about, or "".
        prompt: the beginning of the program, which a response may continue.
    """

    asserts: tuple[str, ...] = ()
    stdio: tuple[dict[str, str], ...] = ()
    setup: str = ""
    entry_point: str = ""
    prompt: str = ""


def code(response: str, problem: Problem) -> Score | Failure:
    """1 if the program in the response passes all tests.

    Parts: `passed` is the share of all tests that pass; `format` is 1 if the program is in a
    closed fence.
    """
    suite = suite_of(problem)
    if suite is None:
        return unusable(problem, "a list of tests")
    box = sandbox()  # a machine without one scores no response, not even one without a program
    program, fenced = find_program(response)
    if not program:
        return _score(0.0, fenced)
    if suite.asserts:
        program = _complete(program, suite)
        results = box.test_asserts(
            program, suite.asserts, suite.setup, suite.entry_point, total_s=TOTAL_S
        )
    else:
        results = box.test_stdio(program, suite.stdio, total_s=TOTAL_S)
    return _score_results(results, problem, fenced)


def _score_results(results: Sequence[Result], problem: Problem, fenced: bool) -> Score | Failure:
    """Return the score of a program by its tests.

    A test that cannot be judged says nothing, so one failed test makes the program wrong whatever
    the other tests say; without one, the program is neither right nor wrong.
    """
    unsupported = [result for result in results if result.unsupported]
    has_failed = any(not result.passed and not result.unsupported for result in results)
    if unsupported and not has_failed:
        return Failure("unsupported", f"a test of problem {problem.uid}: {unsupported[0].reason}")
    return _score(sum(result.passed for result in results) / len(results), fenced)


def _score(share: float, fenced: bool) -> Score:
    right = float(share == 1.0)
    return Score(right, {"answer": right, "passed": share, "format": float(fenced)})


@cache
def sandbox() -> Sandbox | FusionSandbox:
    """Return the sandbox of this machine, or the client for the server POSTGRAD_SANDBOX.

    The server's token is in POSTGRAD_SANDBOX_TOKEN.

    Raises:
        SandboxError: this machine has no safe sandbox.
        ConfigError: POSTGRAD_SANDBOX is not an address.
    """
    url = os.environ.get("POSTGRAD_SANDBOX", "")
    if not url:
        return Sandbox(LIMITS)
    return remote_sandbox(url, os.environ.get("POSTGRAD_SANDBOX_TOKEN", ""), LIMITS)


def find_program(response: str) -> tuple[str, bool]:
    """Return the last fenced block and whether its fence is closed.

    Without a fence, it is the response itself if that is Python, else "".
    """
    fences = list(_FENCE.finditer(response))
    if not fences:
        return (response if _is_program(response) else ""), False
    if len(fences) % 2 == 0:
        return _block(response[fences[-2].end() : fences[-1].start()], fences[-2]), True
    return _block(response[fences[-1].end() :], fences[-1]), False


def _block(text: str, fence: re.Match[str]) -> str:
    """Return the lines of a block without the indentation of its fence, as in an item of a list."""
    indentation = len(fence.group(1))
    return re.sub(rf"^[ \t]{{0,{indentation}}}", "", text.strip("\n"), flags=re.MULTILINE)


def _is_program(text: str) -> bool:
    """Return whether a text is Python and does something: a word or a number alone does not."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        not isinstance(statement, ast.Expr) or isinstance(statement.value, ast.Call)
        for statement in statements
    )


def _complete(program: str, suite: Suite) -> str:
    """Return the program with HumanEval's prompt before it.

    If the program defines the function itself, only the prompt's imports and helpers are added.
    """
    if not suite.prompt:
        return program
    definition = rf"^(?:async )?def {re.escape(suite.entry_point)}\b"
    if re.search(definition, program, re.MULTILINE):
        return f"{_prompt_head(suite.prompt, suite.entry_point)}\n{program}"
    return suite.prompt.removesuffix("\n") + "\n" + program


def _prompt_head(prompt: str, entry_point: str) -> str:
    """Return the imports and helpers of a prompt: what is before the function to write."""
    definition = re.search(rf"^def {re.escape(entry_point)}\b", prompt, re.MULTILINE)
    return prompt[: definition.start()] if definition else ""


def suite_of(problem: Problem) -> Suite | None:
    """Return the problem's tests, or None if it has none in a known form."""
    extra = {
        **_dict_or_empty(problem.extra.get("extra_info")),
        **_dict_or_empty(problem.extra.get("reward_model")),
        **problem.extra,
    }
    entry_point = str(extra.get("entry_point") or "")
    if extra.get("test_list"):
        setup = [
            str(extra.get("test_setup_code") or ""),
            *map(str, extra.get("test_imports") or ()),
        ]
        asserts = tuple(map(str, extra["test_list"]))
        return Suite(asserts, setup="\n".join(setup), entry_point=entry_point)
    if extra.get("test") and entry_point:
        return _humaneval_suite(str(extra["test"]), entry_point, extra.get("prompt"))
    tests = extra.get("tests") or problem.ground_truth
    if isinstance(tests, str):
        tests = _parse_json(tests)
    suite = _listed_suite(tests, entry_point)
    if suite is None and re.search(r"^\s*assert\b", problem.ground_truth, re.MULTILINE):
        return Suite((problem.ground_truth,), entry_point=entry_point)
    return suite


def _humaneval_suite(test: str, entry_point: str, prompt: Any) -> Suite:
    """Return a suite with one test, check(entry_point).

    The prompt's helpers are the test's own too: a program that redefines `poly`, which the test of
    find_zero calls, must not change what the test checks.
    """
    prompt = prompt if isinstance(prompt, str) else ""
    return Suite(
        (f"{test}\ncheck({entry_point})",),
        setup=_prompt_head(prompt, entry_point),
        entry_point=entry_point,
        prompt=prompt,
    )


def _dict_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _listed_suite(tests: Any, entry_point: str) -> Suite | None:
    """Return the suite of a list of tests, or of {"inputs": list, "outputs": list}."""
    if isinstance(tests, dict):
        return _paired_suite(tests)
    if not isinstance(tests, list) or not tests:
        return None
    if all(isinstance(test, str) for test in tests):
        return Suite(tuple(tests), entry_point=entry_point)
    if all(isinstance(test, dict) and "input" in test and "output" in test for test in tests):
        return _stdio_suite([(test["input"], test["output"]) for test in tests])
    return None


def _paired_suite(tests: dict[str, Any]) -> Suite | None:
    inputs = tests.get("inputs")
    outputs = tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        return None
    if not inputs or len(inputs) != len(outputs):
        return None
    pairs = list(zip(inputs, outputs, strict=True))
    if not tests.get("fn_name"):
        return _stdio_suite(pairs)
    asserts = [_call_test(tests["fn_name"], given, expected) for given, expected in pairs]
    return Suite(tuple(asserts), setup=_TUPLES_TO_LISTS)


def _stdio_suite(pairs: list[tuple[Any, Any]]) -> Suite:
    tests = [{"input": _as_text(given), "output": _as_text(expected)} for given, expected in pairs]
    return Suite(stdio=tuple(tests))


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call_test(name: str, given: Any, expected: Any) -> str:
    """Return a test that calls a function, or a method of class Solution, with JSON arguments.

    An expected value that is wrapped in a list counts as well.
    """
    arguments = given if isinstance(given, list) else [given]
    return (
        f"try:\n    _function = Solution().{name}\nexcept NameError:\n    _function = {name}\n"
        f"_value = _as_lists(_function(*{arguments!r}))\n"
        f"_expected = {expected!r}\n"
        "assert _value == _expected or [_value] == _expected\n"
    )
