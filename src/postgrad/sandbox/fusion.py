"""Programs on a Sandbox Fusion server (the sandbox that verl uses): POST /run_code runs one program and answers with how it ended.

What the program prints is compared here. Asserts go there with the folder inside/: one process judges and asks the other, which has
the program, for values; inside/alone.py. The walls around both are Fusion's, not ours.
"""

import base64
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from postgrad.sandbox.bubblewrap import INSIDE
from postgrad.sandbox.http_client import HttpClient, reason_in
from postgrad.sandbox.outcome import Limits, Outcome, Result, SandboxError, verdict_of
from postgrad.sandbox.suites import assert_results, stdio_results

RUN_CODE = "/run_code"
START_S = 1.0  # Fusion's clock runs while the interpreter starts, ours when it has
SLACK_S = 4.0  # more of that for asserts, where an alarm inside keeps each test's time
MANY = 1 << 20  # threads: Fusion's users share a number of processes


class FusionSandbox:
    """Asks the server whose address ends in /run_code. One that is busy or not there is asked again while `patience_s` lasts.

    Raises (from every call):
        SandboxError: the server gave no verdict; its reason.
    """

    kind = "Sandbox Fusion"
    route = ""  # from the address to /run_code

    def __init__(
        self, url: str, token: str = "", limits: Limits | None = None, patience_s: float = 30.0
    ) -> None:
        self.line, self.limits = HttpClient(url, token, patience_s), limits or Limits()

    def run(self, program: str, stdin: str = "") -> Outcome:
        """Run a program with this input."""
        return run_code(self.line, self.route, program, stdin, self.limits, self.limits.time_s)

    def test_stdio(
        self, program: str, tests: Sequence[dict[str, str]], total_s: float = 60.0
    ) -> list[Result]:
        """As Sandbox.test_stdio; of `total_s` the program uses what it runs, not what it waits for the server."""
        turns = _Turns(self.line, total_s)
        return stdio_results(
            lambda stdin: turns.run(program, stdin, self.limits, self.limits.time_s, {}),
            tests,
            total_s,
            lambda: turns.used_s,
        )

    def test_asserts(
        self,
        program: str,
        tests: Sequence[str],
        setup: str = "",
        entry_point: str = "",
        total_s: float = 60.0,
    ) -> list[Result]:
        """As Sandbox.test_asserts; `total_s` as above."""
        turns = _Turns(self.line, total_s)
        limits = replace(self.limits, threads=MANY)

        def judge(run: list[int]) -> dict[int, Result] | str:
            settings = limits.settings(uid=0, num_tests=len(run)) | {"test_s": limits.time_s}
            given = {"tests": list(tests), "setup": setup, "entry_point": entry_point, "run": run}
            seconds = min(limits.time_s * len(run), total_s - turns.used_s) + SLACK_S
            stdin = json.dumps({"settings": settings, "program": program, "given": given})
            outcome = turns.run(
                "from inside.alone import main\nmain()\n", stdin, limits, seconds, _inside()
            )
            return _verdicts(outcome, run)

        return assert_results(judge, len(tests), total_s, lambda: turns.used_s)


class _Turns:
    """The requests of one program, which share its time: what it ran, and what all of it may take by the clock on the wall."""

    def __init__(self, line: HttpClient, total_s: float) -> None:
        self.line, self.used_s, self.end = line, 0.0, time.monotonic() + total_s + line.patience_s

    def run(
        self, code: str, stdin: str, limits: Limits, seconds: float, files: dict[str, str]
    ) -> Outcome:
        left_s = self.end - time.monotonic()
        if left_s <= 0:
            raise self.line.silent(f"it is too slow, {self.used_s:.1f} s of tests took it too long")
        outcome = run_code(
            self.line, "", code, stdin, limits, seconds, min(left_s, self.line.patience_s), files
        )
        self.used_s += outcome.seconds
        return outcome


def run_code(
    line: HttpClient,
    path: str,
    code: str,
    stdin: str,
    limits: Limits,
    seconds: float,
    patience_s: float | None = None,
    files: dict[str, str] | None = None,
) -> Outcome:
    """One program within `limits` and `seconds`, with `files` (base64 by name) beside it.

    Raises:
        SandboxError: the server did not run it.
    """
    seconds += START_S
    body = {
        "code": code,
        "language": "python",
        "stdin": stdin,
        "compile_timeout": seconds,
        "run_timeout": seconds,
    }
    body |= {"memory_limit_MB": limits.memory_mb, "files": files or {}, "fetch_files": []}
    status, answer = line.ask(path, body, seconds, patience_s)
    if status in (404, 405):
        raise line.silent(
            f"{status}, no POST {RUN_CODE} there; is it the address of a Sandbox Fusion server?"
        )
    if status != 200:
        raise line.silent(f"{status} {reason_in(answer)}")
    try:
        return outcome_of(answer)
    except ValueError as error:
        raise line.silent(str(error)) from error


def outcome_of(answer: dict[str, Any]) -> Outcome:
    """How the program ended, by Fusion's answer to /run_code.

    Raises:
        ValueError: the answer does not say; the sandbox failed, or it is not Fusion's.
    """
    status = answer.get("status")
    if status == "SandboxError":
        raise ValueError(f"SandboxError {answer.get('message')}")
    steps = [
        answer[name]
        for name in ("compile_result", "run_result")
        if isinstance(answer.get(name), dict)
    ]
    if status not in ("Success", "Failed") or not steps:
        raise ValueError(
            f"the answer is not Sandbox Fusion's: {reason_in(answer) if 'error' in answer else json.dumps(answer)[:80]}"
        )
    ended = steps[-1]  # a program that does not compile is not run
    code, how = ended.get("return_code"), ended.get("status")
    output, errors = (str(ended.get(name) or "") for name in ("stdout", "stderr"))
    taken = ended.get("execution_time")
    seconds = float(taken) if isinstance(taken, int | float) else 0.0
    if how == "TimeLimitExceeded" and status == "Failed":
        return Outcome(-9, output, errors, seconds, stopped="time")
    compiled = ended is answer.get("compile_result")
    if (
        how != "Finished"
        or not isinstance(code, int)
        or (code == 0) != (status == "Success")
        or (compiled and code == 0)
    ):
        raise ValueError(
            f"{status} with a program that ended as {how}, code {code} {errors[-80:]}".strip()
        )
    return Outcome(code, "" if compiled else output, errors, seconds)


def _verdicts(outcome: Outcome, run: list[int]) -> dict[int, Result] | str:
    """What the judging side printed on the tests `run`, or why the program does not load."""
    try:
        _ready, *messages = map(json.loads, outcome.output.splitlines())
        found = {message["test"]: verdict_of(message) for message in messages if "test" in message}
        broken = next((message["broken"] for message in messages if "broken" in message), None)
    except (ValueError, LookupError, TypeError) as error:
        last = (
            outcome.errors.strip().splitlines()[-1:]
            or outcome.output.splitlines()[-1:]
            or [outcome.stopped]
        )
        raise SandboxError(
            f"the tests do not start in that sandbox: code {outcome.code} {last[0][-100:]}"
        ) from error
    if broken is not None:
        return f"does not load: {broken}"
    late = next((index for index in run if index not in found), None)
    return (
        found
        if late is None
        else found | {late: Result(False, reason="took too long, or ended the tests")}
    )


@cache
def _inside() -> dict[str, str]:
    """The folder inside/ as /run_code takes files."""
    return {
        f"inside/{file.name}": base64.b64encode(file.read_bytes()).decode()
        for file in sorted(INSIDE.glob("*.py"))
    }
