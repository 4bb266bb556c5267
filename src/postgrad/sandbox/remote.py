"""The sandbox of another machine, over HTTP: `postgrad sandbox` or a Sandbox Fusion server.

Sandbox Fusion, the sandbox that verl uses, runs one program per POST /run_code and returns how it
ended. Outputs are compared in this process. For asserts the folder inside/ is sent along: one
process there runs the tests, another one the program (inside/single_sandbox.py). The isolation of
both is the server's, not ours.
"""

import base64
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import httpx

from postgrad.errors import WrongValue
from postgrad.net.client import HttpClient, NoAnswer, error_message
from postgrad.sandbox.bubblewrap import INSIDE
from postgrad.sandbox.outcome import Limits, Outcome, Result, SandboxError, parse_result
from postgrad.sandbox.suites import assert_results, stdio_results

RUN_CODE = "/run_code"
START_S = 1.0  # the server's clock also counts the start of the interpreter, ours does not
TESTS_START_S = 4.0  # the same for asserts, where two interpreters start
MANY_THREADS = 1 << 20  # the limit counts all processes of the server's user
MAIN_PROGRAM = "from inside.single_sandbox import main\nmain()\n"


def remote_sandbox(
    url: str, token: str = "", limits: Limits | None = None, retry_s: float = 30.0
) -> "FusionSandbox":
    """Return the client for an address.

    An address that ends in /run_code is a Sandbox Fusion server's, any other one that of
    `postgrad sandbox`.

    Raises:
        ConfigError: it is not an http address, or contains a password.
    """
    is_fusion = url.rstrip("/").endswith(RUN_CODE)
    client = FusionSandbox if is_fusion else RemoteSandbox
    return client(url, token, limits, retry_s)


class FusionSandbox:
    """Runs and tests programs on the server whose address ends in /run_code.

    It has the methods of local.Sandbox. Threads may share it.

    Args:
        token: sent as a Bearer token, if it is not empty.
        retry_s: how long a server that is busy or not reachable is asked again.

    Raises (every method):
        SandboxError: the server gave no result.
    """

    kind = "Sandbox Fusion"
    route = ""  # from the address to /run_code

    def __init__(
        self, url: str, token: str = "", limits: Limits | None = None, retry_s: float = 30.0
    ) -> None:
        if not _is_address(url):
            raise WrongValue(
                f"POSTGRAD_SANDBOX={url} is not an address such as http://host:1234; "
                "a token is given in POSTGRAD_SANDBOX_TOKEN"
            )
        self.url = url.rstrip("/")
        self.limits = limits or Limits()
        self.retry_s = retry_s
        self._http = HttpClient(self.url, token, uses_proxy=True)

    def run(self, program: str, stdin: str = "") -> Outcome:
        """Run a program with this input."""
        return self.run_code(program, stdin, self.limits, self.limits.time_s, {}, self.retry_s)

    def test_stdio(
        self, program: str, tests: Sequence[dict[str, str]], total_s: float = 60.0
    ) -> list[Result]:
        """Test as Sandbox.test_stdio does; waiting for the server does not count in `total_s`."""
        budget = _TimeBudget(self, total_s)

        def run(stdin: str) -> Outcome:
            return budget.run(program, stdin, self.limits, self.limits.time_s, {})

        return stdio_results(run, tests, total_s, budget.clock)

    def test_asserts(
        self,
        program: str,
        tests: Sequence[str],
        setup: str = "",
        entry_point: str = "",
        total_s: float = 60.0,
    ) -> list[Result]:
        """Test as Sandbox.test_asserts does; waiting for the server does not count in `total_s`."""
        budget = _TimeBudget(self, total_s)
        limits = replace(self.limits, threads=MANY_THREADS)
        suite = {"tests": list(tests), "setup": setup, "entry_point": entry_point}

        def run_tests(indices: list[int]) -> dict[int, Result] | str:
            key = secrets.token_hex(16)
            settings = limits.settings(uid=0, num_tests=len(indices))
            message = {
                "settings": settings | {"test_s": limits.time_s, "key": key},
                "program": program,
                "suite": suite | {"run": indices},
            }
            left_s = total_s - budget.used_s
            run_s = min(limits.time_s * len(indices), left_s) + TESTS_START_S
            outcome = budget.run(MAIN_PROGRAM, json.dumps(message), limits, run_s, _inside_files())
            return _read_test_output(outcome, indices, key)

        return assert_results(run_tests, len(tests), total_s, budget.clock)

    def run_code(
        self,
        code: str,
        stdin: str,
        limits: Limits,
        run_s: float,
        files: dict[str, str],
        retry_s: float,
    ) -> Outcome:
        """Run one program on the server.

        Args:
            run_s: the program's time limit.
            files: files in the program's folder, in base64 by name.
            retry_s: how long the request is repeated.
        """
        server_s = run_s + START_S
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": server_s,
            "run_timeout": server_s,
            "memory_limit_MB": limits.memory_mb,
            "files": files,
            "fetch_files": [],
        }
        hint = "is it the address of a Sandbox Fusion server?"
        reply = self.post(self.route, body, server_s, retry_s, f"no POST {RUN_CODE}; {hint}")
        try:
            return parse_outcome(reply)
        except ValueError as error:
            raise self.error(str(error)) from error

    def post(
        self, path: str, body: dict[str, Any], server_s: float, retry_s: float, missing: str
    ) -> dict[str, Any]:
        """Send JSON and return the JSON object of the reply.

        Args:
            server_s: how long the server needs, about.
            retry_s: how long the request is repeated.
            missing: what a server lacks that does not have the path.
        """
        retry_until = time.monotonic() + retry_s
        deadline = retry_until + server_s
        try:
            status, reply = self._http.send("POST", path, body, deadline, retry_until, _read_object)
        except NoAnswer as error:
            raise self.error(f"{error.status or ''} {error}".strip()) from error
        if status in (404, 405):
            raise self.error(f"{status}, it has {missing}")
        if status != 200:
            raise self.error(f"{status} {error_message(reply)}")
        return reply

    def error(self, reason: str) -> SandboxError:
        """Return a SandboxError, because the program was not tested."""
        return SandboxError(f"the sandbox at {self.url} gave no result: {reason}")


class RemoteSandbox(FusionSandbox):
    """Runs and tests programs on a `postgrad sandbox` server.

    The server has /run_code as Sandbox Fusion has it, and routes of its own for tests.
    """

    kind = "postgrad sandbox"
    route = RUN_CODE

    def test_asserts(
        self,
        program: str,
        tests: Sequence[str],
        setup: str = "",
        entry_point: str = "",
        total_s: float = 60.0,
    ) -> list[Result]:
        suite = {"setup": setup, "entry_point": entry_point}
        return self._test("/test_program", program, tests, suite, total_s)

    def test_stdio(
        self, program: str, tests: Sequence[dict[str, str]], total_s: float = 60.0
    ) -> list[Result]:
        return self._test("/test_program_stdio", program, tests, {}, total_s)

    def _test(
        self, path: str, program: str, tests: Sequence[Any], suite: dict[str, str], total_s: float
    ) -> list[Result]:
        limit = {"max_execution_time": self.limits.time_s}
        body = {"program": program, "tests": list(tests), **suite, **limit}
        hint = f"the address of a Sandbox Fusion server ends in {RUN_CODE}"
        reply = self.post(path, body, total_s, self.retry_s, f"no POST {path}; {hint}")
        names = ("results", "runtimes", "reasons", "unsupported")
        columns: list[Any] = [reply.get(name) for name in names]
        if not all(isinstance(column, list) and len(column) == len(tests) for column in columns):
            raise SandboxError("the sandbox's reply does not have one result per test")
        return [
            Result(bool(passed), float(seconds), str(reason), bool(unsupported))
            for passed, seconds, reason, unsupported in zip(*columns, strict=True)
        ]


class _TimeBudget:
    """The time that the requests for one program share.

    `used_s` is the time that the program ran. The requests together, with all waiting, end with an
    error at `end`.
    """

    def __init__(self, sandbox: FusionSandbox, total_s: float) -> None:
        self.sandbox = sandbox
        self.used_s = 0.0
        self.end = time.monotonic() + total_s + sandbox.retry_s

    def clock(self) -> float:
        return self.used_s

    def run(
        self, code: str, stdin: str, limits: Limits, run_s: float, files: dict[str, str]
    ) -> Outcome:
        left_s = self.end - time.monotonic()
        if left_s <= 0:
            reason = f"it is too slow: the tests themselves took {self.used_s:.1f} s"
            raise self.sandbox.error(reason)
        retry_s = min(left_s, self.sandbox.retry_s)
        outcome = self.sandbox.run_code(code, stdin, limits, run_s, files, retry_s)
        self.used_s += outcome.seconds
        return outcome


def _is_address(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):  # a port that is not a number, for instance
        return False
    has_password = bool(parsed.userinfo) or "@" in url.partition("://")[2].partition("/")[0]
    return parsed.scheme in ("http", "https") and bool(parsed.host) and not has_password


def _read_object(status: int, raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a reply; anything else becomes an `error`."""
    try:
        reply = json.loads(raw)
    except (ValueError, RecursionError):
        reply = None
    if isinstance(reply, dict):
        return reply
    start = raw[:60].decode(errors="replace")
    return {"error": f"the reply is no JSON object but {start!r}"}


def parse_outcome(reply: dict[str, Any]) -> Outcome:
    """Return how the program ended, from the reply to /run_code.

    Raises:
        ValueError: the sandbox failed, or the reply is not Sandbox Fusion's.
    """
    status = reply.get("status")
    if status == "SandboxError":
        raise ValueError(f"SandboxError {reply.get('message')}")
    compile_result = reply.get("compile_result")
    run_result = reply.get("run_result")
    if isinstance(run_result, dict):
        last = run_result
        did_run = True
    elif isinstance(compile_result, dict):  # a program that does not compile is not run
        last = compile_result
        did_run = False
    else:
        raise _not_fusion(reply)
    if status not in ("Success", "Failed"):
        raise _not_fusion(reply)
    code = last.get("return_code")
    ended = last.get("status")
    output = str(last.get("stdout") or "") if did_run else ""
    errors = str(last.get("stderr") or "")
    execution_time = last.get("execution_time")
    seconds = float(execution_time) if isinstance(execution_time, int | float) else 0.0
    if ended == "TimeLimitExceeded" and status == "Failed":
        return Outcome(-9, output, errors, seconds, stopped="time")
    contradiction = ValueError(
        f"{status} with a program that ended as {ended}, code {code} {errors[-80:]}".strip()
    )
    if ended != "Finished" or not isinstance(code, int):
        raise contradiction
    if (code == 0) != (status == "Success") or (code == 0 and not did_run):
        raise contradiction
    return Outcome(code, output, errors, seconds)


def _not_fusion(reply: dict[str, Any]) -> ValueError:
    shown = error_message(reply) if "error" in reply else json.dumps(reply)[:80]
    return ValueError(f"the reply is not Sandbox Fusion's: {shown}")


def _read_test_output(outcome: Outcome, indices: list[int], key: str) -> dict[int, Result] | str:
    """Return the results that the test runner printed, or why the program does not load."""
    try:
        messages = [json.loads(line) for line in outcome.output.splitlines()]
        if not messages or any(message["key"] != key for message in messages):
            raise ValueError("not the test runner's output")
        broken = [message["broken"] for message in messages if "broken" in message]
        results = {
            message["test"]: parse_result(message) for message in messages if "test" in message
        }
    except (ValueError, LookupError, TypeError) as error:
        lines = outcome.errors.strip().splitlines() or outcome.output.splitlines()
        last_line = lines[-1] if lines else outcome.stopped
        raise SandboxError(
            f"the tests do not start in that sandbox: code {outcome.code} {last_line[-100:]}"
        ) from error
    if broken:
        return f"does not load: {broken[0]}"
    for index in indices:
        if index not in results:
            late = Result(False, reason="took too long, or ended the tests")
            return results | {index: late}
    return results


@cache
def _inside_files() -> dict[str, str]:
    """Return the folder inside/ as /run_code takes files."""
    return {
        f"inside/{file.name}": base64.b64encode(file.read_bytes()).decode()
        for file in sorted(INSIDE.glob("*.py"))
    }
