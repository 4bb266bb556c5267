"""What a program may use, how it ended, and whether that passes a test: the words of every sandbox, here or elsewhere."""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any


class SandboxError(Exception):
    """The sandbox itself does not work: nothing was judged."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. `time_s` is for one test, and starts when the interpreter inside is ready."""

    time_s: float = 4.0
    memory_mb: int = 512
    threads: int = 32
    file_mb: int = 16
    disk_mb: int = 64  # of its private /tmp
    output_kb: int = 1024

    def settings(self, uid: int, num_tests: int = 1) -> dict[str, int]:
        """What inside/confine.py wants."""
        cpu_s = int(self.time_s * num_tests) + 2
        return {
            "memory_mb": self.memory_mb,
            "file_mb": self.file_mb,
            "threads": self.threads,
            "cpu_s": cpu_s,
            "uid": uid,
        }


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `stopped` is "", or the limit that ended it: time or output."""

    code: int
    output: str
    errors: str
    seconds: float
    stopped: str = ""


@dataclass(frozen=True)
class Result:
    """One test. `seconds` is -1.0 where it did not pass; `unsupported`: the test itself cannot be run this way."""

    passed: bool
    seconds: float = -1.0
    reason: str = ""
    unsupported: bool = False


def judged(outcome: Outcome, wanted: str) -> Result:
    """A program's run against the output that a test wants."""
    passed = not outcome.stopped and outcome.code == 0 and same_output(outcome.output, wanted)
    return Result(True, outcome.seconds) if passed else Result(False, reason=_why(outcome))


def verdict_of(message: dict[str, Any]) -> Result:
    """The judging side's words on one test of asserts (inside/tests.py)."""
    if message["passed"]:
        return Result(True, message["seconds"])
    reason = message.get("unsupported") or message.get("reason", "")
    return Result(False, reason=reason, unsupported="unsupported" in message)


def same_output(given: str, wanted: str) -> bool:
    """Equal line by line without the white space around each line, or word by word as decimal numbers (2.0 is 2)."""
    lines, wanted_lines = (
        [line.strip() for line in text.strip().splitlines()] for text in (given, wanted)
    )
    if len(lines) != len(wanted_lines):
        return False
    return all(
        one == other or _same_decimals(one.split(), other.split())
        for one, other in zip(lines, wanted_lines, strict=True)
    )


def _same_decimals(one: list[str], other: list[str]) -> bool:
    if len(one) != len(other):
        return False
    try:
        return all(a == b or Decimal(a) == Decimal(b) for a, b in zip(one, other, strict=True))
    except InvalidOperation:
        return False


def _why(outcome: Outcome) -> str:
    if outcome.stopped == "time":
        return "took too long"
    if outcome.stopped == "output":
        return "printed too much"
    if outcome.code:
        last = outcome.errors.strip().splitlines()[-1:] or [""]
        return f"ended with code {outcome.code} {last[0]}".strip()[:300]
    return "printed something else"
