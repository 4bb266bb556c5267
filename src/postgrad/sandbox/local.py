"""Runs and tests untrusted programs under bubblewrap.

A program has no network, no environment, a read-only minimal system and hard limits. `Sandbox()`
first runs a probe that tries to break out; where one protection does not hold, it refuses to work
(SandboxError). There is no weaker mode.

A test's result never comes from the program's own process. Outputs are compared in this process.
Asserts run in a second sandbox that asks the first one for values (inside/). What a test cannot
check this way is listed in docs/rewards.md.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from typing import IO, Any

from postgrad.sandbox.bubblewrap import (
    INSTALL,
    START_LIMIT_S,
    Level,
    SandboxProcess,
    find_bubblewrap,
    readable_file,
    wait_until_ready,
)
from postgrad.sandbox.outcome import Limits, Outcome, Result, SandboxError, parse_result
from postgrad.sandbox.seccomp import seccomp_filter
from postgrad.sandbox.suites import assert_results, stdio_results


class Sandbox:
    """Runs and tests programs within `limits`. Calls are independent, so threads may share one.

    Raises:
        SandboxError: bubblewrap is missing, or a protection does not hold on this machine.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.level = probe()

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
        """Run a program as `python program.py` with this input.

        Raises:
            SandboxError: the interpreter in the sandbox does not start.
        """
        return _run(self.level, program, stdin, limits or self.limits)

    def test_stdio(
        self,
        program: str,
        tests: Sequence[dict[str, str]],
        limits: Limits | None = None,
        total_s: float = 60.0,
    ) -> list[Result]:
        """Run the program with each test's `input` and compare its output with `output`.

        suites.stdio_results has the rules.
        """
        return stdio_results(lambda stdin: self.run(program, stdin, limits), tests, total_s)

    def test_asserts(
        self,
        program: str,
        tests: Sequence[str],
        setup: str = "",
        entry_point: str = "",
        limits: Limits | None = None,
        total_s: float = 60.0,
    ) -> list[Result]:
        """Run each test: asserts, or other code that raises if the program is wrong.

        suites.assert_results has the rules.

        Args:
            setup: code that runs before each test, such as imports. Names that it defines are the
                test's own; the program does not get them.
            entry_point: the function that the tests are about.
        """
        suite = {"tests": list(tests), "setup": setup, "entry_point": entry_point}

        def run_tests(indices: list[int]) -> dict[int, Result] | str:
            return _run_tests(self.level, program, suite | {"run": indices}, limits or self.limits)

        return assert_results(run_tests, len(tests), total_s)


def _run(level: Level, program: str, stdin: str, limits: Limits) -> Outcome:
    ready, child_ready = os.pipe()
    with (
        os.fdopen(ready, "rb"),
        readable_file(program.encode("utf-8", "surrogatepass")) as source,
        readable_file(stdin.encode("utf-8", "surrogatepass")) as stdin_file,
    ):
        try:
            sandboxed = SandboxProcess(
                level,
                limits,
                "program_runner",
                {"program": source.fileno(), "ready": child_ready, "peer": None},
                [source.fileno(), child_ready],
                stdin_file,
                subprocess.PIPE,
            )
        finally:
            os.close(child_ready)
        process = sandboxed.process
        with (
            sandboxed,
            process.stdout or contextlib.nullcontext(),
            process.stderr or contextlib.nullcontext(),
        ):
            wait_until_ready(process, ready)
            start = time.monotonic()
            output, errors, stopped = _read_output(
                process, start + limits.time_s, limits.output_kb << 10
            )
            seconds = time.monotonic() - start
            if stopped:
                process.kill()
            code = process.wait()
        return Outcome(
            code, output.decode(errors="replace"), errors.decode(errors="replace"), seconds, stopped
        )


def _read_output(
    process: subprocess.Popen[bytes], deadline: float, max_bytes: int
) -> tuple[bytes, bytes, str]:
    """Read stdout and stderr until the process ends or reaches a limit.

    Returns:
        stdout, stderr, and the limit that was reached: "time", "output" or "".
    """
    outputs: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    stopped = ""
    with selectors.DefaultSelector() as selector:
        for stream in outputs:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and not stopped:
            left_s = deadline - time.monotonic()
            events = selector.select(left_s) if left_s > 0 else []
            if not events:
                stopped = "time"
            for key, _ in events:
                data = os.read(key.fd, 1 << 16)
                outputs[key.fileobj] += data
                if not data:
                    selector.unregister(key.fileobj)
                elif len(outputs[key.fileobj]) > max_bytes:
                    stopped = "output"
    if not stopped:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stopped = "time"
    return bytes(outputs[process.stdout]), bytes(outputs[process.stderr]), stopped


def _run_tests(
    level: Level, program: str, suite: dict[str, Any], limits: Limits
) -> dict[int, Result] | str:
    """Run tests until one fails, with the program and the tests each in a sandbox of their own.

    Returns:
        The results by number, or why the program does not load.
    """
    ready, program_ready = os.pipe()
    results, test_results = os.pipe()
    test_socket, program_socket = socket.socketpair()
    key = secrets.token_hex(16)
    with (
        os.fdopen(ready, "rb"),
        os.fdopen(results, "rb") as results_pipe,
        readable_file(program.encode("utf-8", "surrogatepass")) as source,
        readable_file(json.dumps(suite).encode()) as suite_file,
        contextlib.ExitStack() as stack,
    ):
        try:
            test_fds = {
                "tests": suite_file.fileno(),
                "control": test_results,
                "peer": test_socket.fileno(),
            }
            program_fds = {
                "program": source.fileno(),
                "ready": program_ready,
                "peer": program_socket.fileno(),
            }
            tests = SandboxProcess(
                level,
                limits,
                "test_runner",
                test_fds | {"key": key},
                list(test_fds.values()),
                num_tests=len(suite["run"]),
            )
            stack.enter_context(tests)
            sandboxed = SandboxProcess(
                level,
                limits,
                "program_runner",
                program_fds,
                list(program_fds.values()),
                num_tests=len(suite["run"]),
            )
            stack.enter_context(sandboxed)
        finally:
            os.close(program_ready)
            os.close(test_results)
            test_socket.close()
            program_socket.close()
        wait_until_ready(sandboxed.process, ready)
        return _read_results(results_pipe, suite["run"], limits.time_s, key)


def _read_results(
    pipe: IO[bytes], indices: list[int], time_s: float, key: str
) -> dict[int, Result] | str:
    """Read the test runner's messages.

    Every test has `time_s` seconds; the first one shares them with the loading of the program.
    """
    results: dict[int, Result] = {}
    is_ready = False
    buffer = b""
    deadline = time.monotonic() + START_LIMIT_S
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while len(results) < len(indices):
            in_time = bool(selector.select(max(0.0, deadline - time.monotonic())))
            data = os.read(pipe.fileno(), 1 << 16) if in_time else b""
            if not data and not is_ready:
                raise SandboxError("the sandbox of the tests does not start")
            if not data:
                reason = "the tests ended without a result" if in_time else "took too long"
                return results | {indices[len(results)]: Result(False, reason=reason)}
            *lines, buffer = (buffer + data).split(b"\n")
            for message in map(json.loads, lines):
                if message["key"] != key:
                    raise SandboxError("a message among the results is not the test runner's")
                is_ready = True
                deadline = time.monotonic() + time_s
                if "broken" in message:
                    return f"does not load: {message['broken']}"
                if "test" in message:
                    results[message["test"]] = parse_result(message)
                    if not message["passed"]:
                        return results
    return results


# ---- does it hold?

_PROBE = """
import json, os, socket, sys, threading
found = {"environment": sorted(os.environ), "root": sorted(os.listdir("/"))}
def attempt(name, action):
    try:
        found[name] = repr(action())
    except BaseException as error:
        found[name] = "refused"
def write_large_file():
    with open("/tmp/large", "wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        file.write(bytes(64 << 20))
        file.flush()
secret = input()
attempt("fork", lambda: os.fork() or os._exit(0))
attempt("network", lambda: socket.create_connection(("127.0.0.1", int(input())), 2))
attempt("secret", lambda: open(secret).read())
attempt("write_root", lambda: open("/written", "w"))
attempt("write_inside", lambda: open("/inside/program_runner.py", "a"))
attempt("write_library", lambda: open(os.__file__, "a"))
attempt("memory", lambda: len(bytes(2 << 30)))
attempt("become_root", lambda: os.setuid(0) if os.getuid() else "was root")
attempt("kernel", lambda: os.listdir("/proc") or os.listdir("/sys"))
open("/tmp/mine", "w").write("x")
thread = threading.Thread(target=lambda: found.update(thread=True))
thread.start()
thread.join()
attempt("file", write_large_file)
print(json.dumps(found))
"""
# What must be refused inside, and what it means if it is not.
_PROTECTIONS = {
    "network": "the network can be reached",
    "secret": "files of this system can be read",
    "write_root": "the root folder can be written",
    "write_inside": "the runner's own code can be written",
    "write_library": "Python's library can be written",
    "memory": "memory is not limited",
    "become_root": "a program can become root",
    "kernel": "/proc or /sys is visible",
    "file": "file size is not limited",
}
_ENVIRONMENT_NAMES = {"PATH", "HOME", "LANG", "PYTHONHASHSEED", "PWD", "LC_CTYPE"}


@cache
def probe() -> Level:
    """Return the level of isolation that holds on this machine; cached per process.

    Raises:
        SandboxError: none holds. The message says which protection failed and what to do.
    """
    version = _version()
    filtered = seccomp_filter() is not None
    ways = (True, False) if os.geteuid() == 0 else (False,)
    reasons: list[str] = []
    for own_user in ways:
        level = Level(version, own_user, filtered)
        try:
            failures = failed_protections(level)
        except SandboxError as error:
            failures = [str(error)]
        if not failures:
            return level
        reasons.append("; ".join(failures))
    all_reasons = " / ".join(dict.fromkeys(reasons))
    raise SandboxError(f"no safe sandbox on this machine ({all_reasons}): {INSTALL}")


def _version() -> str:
    try:
        process = subprocess.run(
            [find_bubblewrap(), "--version"],
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            env={},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"bubblewrap does not run ({error}): {INSTALL}") from error
    return process.stdout.strip()


def failed_protections(level: Level) -> list[str]:
    """Try to break out, and return what succeeded, in words. Raises SandboxError."""
    limits = Limits(time_s=10.0, memory_mb=256, file_mb=4)
    with (
        tempfile.NamedTemporaryFile("w") as secret,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        secret.write("secret")
        secret.flush()
        port = server.getsockname()[1]
        outcome = _run(level, _PROBE, f"{secret.name}\n{port}\n", limits)
    try:
        found = json.loads(outcome.output)
    except ValueError:
        return [f"the probe ended with code {outcome.code} {outcome.errors.strip()[-200:]}"]
    failures = [meaning for name, meaning in _PROTECTIONS.items() if found.get(name) != "refused"]
    forks_are_refused = level.filtered or not level.own_user
    if found["fork"] != "refused" and forks_are_refused:
        failures.append("processes are not limited")
    if set(found["environment"]) - _ENVIRONMENT_NAMES:
        failures.append("the environment is not empty")
    if not found.get("thread"):
        failures.append("threads do not start")
    return failures
