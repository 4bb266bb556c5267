"""Untrusted programs under bubblewrap: no network, no environment, a read-only minimal system, hard limits; and tests of them.

`Sandbox()` first proves by running a probe that every wall stands; where one does not, it refuses to work (SandboxError). There is no
weaker mode. A program's verdict never comes from the program's own process: outputs are compared here, asserts are evaluated in a
second sandbox that asks the first one for values (see inside/).
"""

import contextlib
import json
import os
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
    bubblewrap,
    filled,
    started,
)
from postgrad.sandbox.outcome import Limits, Outcome, Result, SandboxError, verdict_of
from postgrad.sandbox.seccomp import seccomp_filter
from postgrad.sandbox.suites import assert_results, stdio_results


class Sandbox:
    """Runs and tests programs within `limits`. Every call is independent, so that threads may share one.

    Raises:
        SandboxError: bubblewrap is missing, or a wall does not stand on this machine.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.level = probe()

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
        """Run a program as `python program.py` with this input.

        Raises:
            SandboxError: the interpreter inside did not start.
        """
        return _run(self.level, program, stdin, limits or self.limits)

    def test_stdio(
        self,
        program: str,
        tests: Sequence[dict[str, str]],
        limits: Limits | None = None,
        total_s: float = 60.0,
    ) -> list[Result]:
        """Run the program once for each test's `input` and compare what it prints with `output`; suites.py has the rules."""
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
        """Run each test (asserts, or code that raises when the program is wrong) against a freshly loaded program.

        Args:
            setup: code that runs before each test, imports for instance.
            entry_point: the function the tests are about, needed only where its name is one of Python's own.
        """
        given = {"tests": list(tests), "setup": setup, "entry_point": entry_point}
        return assert_results(
            lambda run: _judge(self.level, program, given | {"run": run}, limits or self.limits),
            len(tests),
            total_s,
        )


def _run(level: Level, program: str, stdin: str, limits: Limits) -> Outcome:
    ready, theirs = os.pipe()
    with (
        os.fdopen(ready, "rb"),
        filled(program.encode("utf-8", "surrogatepass")) as source,
        filled(stdin.encode("utf-8", "surrogatepass")) as given,
    ):
        settings = {"program": source.fileno(), "ready": theirs, "peer": None}
        try:
            inside = SandboxProcess(
                level,
                limits,
                "program",
                settings,
                [source.fileno(), theirs],
                given,
                subprocess.PIPE,
            )
        finally:
            os.close(theirs)
        with (
            inside,
            inside.process.stdout or contextlib.nullcontext(),
            inside.process.stderr or contextlib.nullcontext(),
        ):
            started(inside.process, ready)
            start = time.monotonic()
            output, errors, stopped = _collect(
                inside.process, start + limits.time_s, limits.output_kb << 10
            )
            seconds = time.monotonic() - start
            if stopped:
                inside.process.kill()
            code = inside.process.wait()
        return Outcome(
            code, output.decode(errors="replace"), errors.decode(errors="replace"), seconds, stopped
        )


def _collect(
    process: subprocess.Popen[bytes], deadline: float, limit: int
) -> tuple[bytes, bytes, str]:
    """What it prints until it ends, the time is up or the limit is reached."""
    texts: dict[Any, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in texts:
            selector.register(stream, selectors.EVENT_READ)
        stopped = ""
        while selector.get_map() and not stopped:
            left = deadline - time.monotonic()
            events = selector.select(max(0.0, left)) if left > 0 else []
            if not events:
                stopped = "time"
            for key, _ in events:
                data = os.read(key.fd, 1 << 16)
                texts[key.fileobj] += data
                if not data:
                    selector.unregister(key.fileobj)
                elif len(texts[key.fileobj]) > limit:
                    stopped = "output"
        if not stopped:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                stopped = "time"
    return bytes(texts[process.stdout]), bytes(texts[process.stderr]), stopped


def _judge(
    level: Level, program: str, given: dict[str, Any], limits: Limits
) -> dict[int, Result] | str:
    """One program and its tests, each in a sandbox of its own, until a test fails; or why the program does not load."""
    ready, theirs = os.pipe()
    says, says_theirs = os.pipe()
    judging, judged = socket.socketpair()
    with (
        os.fdopen(ready, "rb"),
        os.fdopen(says, "rb") as control,
        filled(program.encode("utf-8", "surrogatepass")) as source,
        filled(json.dumps(given).encode()) as tests,
        contextlib.ExitStack() as stack,
    ):
        number = {"num_tests": len(given["run"])}
        try:
            settings = {
                "tests": tests.fileno(),
                "control": says_theirs,
                "peer": judging.fileno(),
            } | number
            judge = SandboxProcess(
                level, limits, "tests", settings, [tests.fileno(), says_theirs, judging.fileno()]
            )
            stack.enter_context(judge)
            settings = {
                "program": source.fileno(),
                "ready": theirs,
                "peer": judged.fileno(),
            } | number
            sandboxed = SandboxProcess(
                level, limits, "program", settings, [source.fileno(), theirs, judged.fileno()]
            )
            stack.enter_context(sandboxed)
        finally:
            os.close(theirs)
            os.close(says_theirs)
            judging.close()
            judged.close()
        started(sandboxed.process, ready)
        return _verdicts(control, given["run"], limits.time_s)


def _verdicts(control: IO[bytes], run: list[int], time_s: float) -> dict[int, Result] | str:
    """Read the judging side's messages; every test has `time_s` seconds, the first one also for loading the program."""
    results: dict[int, Result] = {}
    ready, buffer, deadline = False, b"", time.monotonic() + START_LIMIT_S
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while len(results) < len(run):
            in_time = bool(selector.select(max(0.0, deadline - time.monotonic())))
            data = os.read(control.fileno(), 1 << 16) if in_time else b""
            if not data and not ready:
                raise SandboxError("the sandbox of the tests does not start")
            if not data:
                reason = "the tests ended before their verdict" if in_time else "took too long"
                return results | {run[len(results)]: Result(False, reason=reason)}
            *lines, buffer = (buffer + data).split(b"\n")
            for message in map(json.loads, lines):
                ready, deadline = True, time.monotonic() + time_s
                if "broken" in message:
                    return f"does not load: {message['broken']}"
                if "test" in message:
                    results[message["test"]] = verdict_of(message)
                    if not message["passed"]:
                        return results
    return results


# ---- does it hold?

_PROBE = """
import json, os, socket, sys, threading
found = {"environment": sorted(os.environ), "root": sorted(os.listdir("/")), "uid": os.getuid(), "parent": os.getppid()}
def tries(name, action):
    try:
        found[name] = repr(action())
    except BaseException as error:
        found[name] = "refused"
        found[name + "_error"] = type(error).__name__ + ": " + str(error)
marker = input()
tries("fork", lambda: os.fork() or os._exit(0))
tries("network", lambda: socket.create_connection(("127.0.0.1", int(input())), 2))
tries("secret", lambda: open(marker).read())
tries("write_root", lambda: open("/written", "w"))
tries("write_inside", lambda: open("/inside/program.py", "a"))
tries("write_library", lambda: open(os.__file__, "a"))
tries("memory", lambda: len(bytes(2 << 30)))
tries("become_root", lambda: os.setuid(0) if os.getuid() else "was root")
tries("kill_parent", lambda: os.kill(1, 9))
tries("kernel", lambda: os.listdir("/proc") or os.listdir("/sys"))
open("/tmp/mine", "w").write("x")
threading.Thread(target=lambda: found.update(thread=True)).start()
tries("file", lambda: [open("/tmp/large", "wb").write(bytes(1 << 20)) for _ in [0]] and open("/tmp/large", "ab").write(bytes(64 << 20)))
print(json.dumps(found))
"""
# What must be refused inside, and the words for a person.
_WALLS = {
    "network": "the network is in reach",
    "secret": "files of this system can be read",
    "write_root": "the root folder can be written",
    "write_inside": "its own helper can be written",
    "write_library": "Python's library can be written",
    "memory": "memory is not limited",
    "become_root": "root can be had back",
    "kernel": "/proc or /sys is there",
    "file": "file size is not limited",
}


@cache
def probe() -> Level:
    """The level that holds on this machine, shown by an attempt to break out; remembered for the life of the process.

    Raises:
        SandboxError: none does; the message says which wall fell, or why bubblewrap does not start, and what to do.
    """
    version = _version()
    filtered = seccomp_filter() is not None
    ways = [
        Level(version, own_user, filtered)
        for own_user in ((True, False) if os.geteuid() == 0 else (False,))
    ]
    reasons = []
    for level in ways:
        try:
            fallen = _fallen(level)
        except SandboxError as error:
            fallen = [str(error)]
        if not fallen:
            return level
        reasons.append("; ".join(fallen))
    raise SandboxError(
        f"no safe sandbox on this machine ({' / '.join(dict.fromkeys(reasons))}): {INSTALL}"
    )


def _version() -> str:
    try:
        done = subprocess.run(
            [bubblewrap(), "--version"],
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            env={},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"bubblewrap does not run ({error}): {INSTALL}") from error
    return done.stdout.strip()


def _fallen(level: Level) -> list[str]:
    """The walls that do not stand, as words; every one is run against."""
    limits = Limits(time_s=10.0, memory_mb=256, file_mb=4)
    with (
        tempfile.NamedTemporaryFile("w") as secret,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        secret.write("secret")
        secret.flush()
        outcome = _run(level, _PROBE, f"{secret.name}\n{server.getsockname()[1]}\n", limits)
    try:
        found = json.loads(outcome.output)
    except ValueError:
        return [f"the probe ended with code {outcome.code} {outcome.errors.strip()[-200:]}"]
    fallen = [words for name, words in _WALLS.items() if found.get(name) != "refused"]
    if found["fork"] != "refused" and (level.filtered or not level.own_user):
        fallen.append("processes are not limited")
    if set(found["environment"]) - {"PATH", "HOME", "LANG", "PYTHONHASHSEED", "PWD", "LC_CTYPE"}:
        fallen.append("the environment is not empty")
    if not found.get("thread"):
        fallen.append("threads do not start")
    return fallen
