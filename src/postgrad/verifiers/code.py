"""Programs against tests, in the sandbox. Only the pool's child processes import this.

The program is the last fenced block of the response. The tests come with the problem, in any of the shapes that data sets use:

- `tests` in extra, or the ground truth as JSON: a list of asserts, or of {"input", "output"}, or {"inputs", "outputs"} with or
  without `fn_name`;
- MBPP: `test_list`, with `test_setup_code` or `test_imports`;
- HumanEval: `test`, which defines check(candidate), `entry_point`, and `prompt`, which a response may continue;
- otherwise the ground truth is taken as asserts, if it holds any.
"""

import ast
import json
import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from postgrad.problem import Failure, Problem, Score
from postgrad.sandbox.client import FusionSandbox, remote_sandbox
from postgrad.sandbox.local import Sandbox
from postgrad.sandbox.outcome import Limits
from postgrad.verifiers.answers import unusable

LIMITS = Limits()
TOTAL_S = 40.0  # for all tests of one program; the pool's limit for this verifier (verifier.py) is above it

_FENCE = re.compile(r"^[ \t]{0,3}```[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
# For tests that call a function by name with JSON arguments: tuples count as lists, and a method of class Solution as the function.
_BY_NAME = """
def _plain(value):
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
"""


@dataclass(frozen=True)
class Suite:
    """A problem's tests: asserts, or inputs with outputs."""

    asserts: tuple[str, ...] = ()
    stdio: tuple[dict[str, str], ...] = ()
    setup: str = ""
    entry_point: str = ""
    prompt: str = ""


def code(response: str, problem: Problem) -> Score | Failure:
    """1 when the program in the response passes all tests. `passed`: the share it passes; `format`: it stands in a closed fence."""
    suite = suite_of(problem)
    if suite is None:
        return unusable(problem, "a list of tests")
    program, fenced = program_of(response)
    if not program:
        return _scored(0.0, fenced)
    if suite.asserts:
        program = _completed(program, suite)
        results = sandbox().test_asserts(
            program, suite.asserts, suite.setup, suite.entry_point, total_s=TOTAL_S
        )
    else:
        results = sandbox().test_stdio(program, suite.stdio, total_s=TOTAL_S)
    if unsupported := next((result.reason for result in results if result.unsupported), ""):
        return Failure("unsupported", f"a test of problem {problem.uid}: {unsupported}")
    return _scored(sum(result.passed for result in results) / len(results), fenced)


def _scored(share: float, fenced: bool) -> Score:
    right = float(share == 1.0)
    return Score(right, {"answer": right, "passed": share, "format": float(fenced)})


@cache
def sandbox() -> Sandbox | FusionSandbox:
    """This machine's, or the one whose address POSTGRAD_SANDBOX holds (its token in POSTGRAD_SANDBOX_TOKEN).

    Raises:
        SandboxError: this machine has none.
        ConfigError: that is no address.
    """
    url = os.environ.get("POSTGRAD_SANDBOX", "")
    return (
        remote_sandbox(url, os.environ.get("POSTGRAD_SANDBOX_TOKEN", ""), LIMITS)
        if url
        else Sandbox(LIMITS)
    )


def program_of(response: str) -> tuple[str, bool]:
    """The last fenced block, and whether its fence is closed. Without a fence the response itself, if it is Python."""
    fences = list(_FENCE.finditer(response))
    if fences:
        closed = len(fences) % 2 == 0
        start = fences[-2] if closed else fences[-1]
        return response[start.end() : fences[-1].start() if closed else len(response)].strip(
            "\n"
        ), closed
    try:
        lines = ast.parse(response).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "", False
    # A word or a number is Python, too, but no program.
    return (
        (response, False)
        if any(not isinstance(line, ast.Expr) or isinstance(line.value, ast.Call) for line in lines)
        else ("", False)
    )


def _completed(program: str, suite: Suite) -> str:
    """HumanEval's prompt before a response that continues it; a response that defines the function itself stands alone."""
    if not suite.prompt or re.search(
        rf"^(?:async )?def {re.escape(suite.entry_point)}\b", program, re.MULTILINE
    ):
        # Helpers and imports of the prompt may be used without being repeated.
        return program if not suite.prompt else f"{_head(suite)}\n{program}"
    return suite.prompt + ("" if suite.prompt.endswith("\n") else "\n") + program


def _head(suite: Suite) -> str:
    """What stands in the prompt before the function that is asked for."""
    found = re.search(rf"^def {re.escape(suite.entry_point)}\b", suite.prompt, re.MULTILINE)
    return suite.prompt[: found.start()] if found else ""


def suite_of(problem: Problem) -> Suite | None:
    """The problem's tests, or None when it has none that can be read."""
    extra = {
        **_maybe(problem.extra.get("extra_info")),
        **_maybe(problem.extra.get("reward_model")),
        **problem.extra,
    }
    if extra.get("test_list"):
        setup = "\n".join(
            [str(extra.get("test_setup_code") or ""), *map(str, extra.get("test_imports") or ())]
        )
        return Suite(
            tuple(map(str, extra["test_list"])),
            setup=setup,
            entry_point=str(extra.get("entry_point") or ""),
        )
    if extra.get("test") and extra.get("entry_point"):
        prompt = extra.get("prompt")
        test = f"{extra['test']}\ncheck({extra['entry_point']})"
        return Suite(
            (test,),
            entry_point=str(extra["entry_point"]),
            prompt=prompt if isinstance(prompt, str) else "",
        )
    tests = extra.get("tests") or problem.ground_truth
    if isinstance(tests, str):
        tests = _json(tests)
    suite = _listed(tests, str(extra.get("entry_point") or ""))
    if suite is None and re.search(r"^\s*assert\b", problem.ground_truth, re.MULTILINE):
        return Suite((problem.ground_truth,), entry_point=str(extra.get("entry_point") or ""))
    return suite


def _maybe(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _listed(tests: Any, entry_point: str) -> Suite | None:
    if (
        isinstance(tests, dict)
        and isinstance(tests.get("inputs"), list)
        and isinstance(tests.get("outputs"), list)
    ):
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=False))
        if tests.get("fn_name"):
            return Suite(
                tuple(_call(tests["fn_name"], given, wanted) for given, wanted in pairs),
                setup=_BY_NAME,
            )
        tests = [{"input": _lines(given), "output": _lines(wanted)} for given, wanted in pairs]
    if not isinstance(tests, list) or not tests:
        return None
    if all(isinstance(test, str) for test in tests):
        return Suite(tuple(tests), entry_point=entry_point)
    if all(isinstance(test, dict) and "input" in test and "output" in test for test in tests):
        return Suite(
            stdio=tuple(
                {"input": _lines(test["input"]), "output": _lines(test["output"])} for test in tests
            )
        )
    return None


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(name: str, given: Any, wanted: Any) -> str:
    """A test that calls the function with a list of JSON arguments; an output that is wrapped in a list counts as well."""
    arguments = given if isinstance(given, list) else [given]
    return (
        f"try:\n    _function = Solution().{name}\nexcept NameError:\n    _function = {name}\n"
        f"_value, _wanted = _plain(_function(*{arguments!r})), {wanted!r}\n"
        "assert _value == _wanted or [_value] == _wanted\n"
    )
