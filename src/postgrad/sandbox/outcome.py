"""What a program may use, how it ended, and whether it passes a test; shared by all sandboxes."""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any


class SandboxError(Exception):
    """The sandbox does not work, so the program was not tested."""


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    `time_s` is the time of one test. It starts when the interpreter in the sandbox is ready.
    """

    time_s: float = 4.0
    memory_mb: int = 512
    threads: int = 32
    file_mb: int = 16  # the size of one file
    disk_mb: int = 64  # all files in its private /tmp
    output_kb: int = 1024

    def settings(self, uid: int, num_tests: int = 1) -> dict[str, Any]:
        """Return the settings for inside/limits.py."""
        return {
            "memory_mb": self.memory_mb,
            "file_mb": self.file_mb,
            "threads": self.threads,
            "cpu_s": int(self.time_s * num_tests) + 2,
            "uid": uid,
        }


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `stopped` is the limit that ended it, "time" or "output", or ""."""

    code: int
    output: str
    errors: str
    seconds: float
    stopped: str = ""


@dataclass(frozen=True)
class Result:
    """The result of one test.

    Attributes:
        seconds: how long the test took; -1.0 if it did not pass.
        reason: why it did not pass.
        unsupported: the test itself cannot be run this way, so it says nothing about the program.
    """

    passed: bool
    seconds: float = -1.0
    reason: str = ""
    unsupported: bool = False


def stdio_result(outcome: Outcome, expected: str) -> Result:
    """Return the result of a test that compares a program's output with the expected one."""
    if outcome.stopped or outcome.code != 0 or not same_output(outcome.output, expected):
        return Result(False, reason=_failure_reason(outcome))
    return Result(True, outcome.seconds)


def parse_result(message: dict[str, Any]) -> Result:
    """Return the result in a message of inside/test_runner.py."""
    if message["passed"]:
        return Result(True, message["seconds"])
    if "unsupported" in message:
        return Result(False, reason=message["unsupported"], unsupported=True)
    return Result(False, reason=message.get("reason", ""))


def same_output(output: str, expected: str) -> bool:
    """Return whether two outputs are equal line by line.

    White space around lines does not count. Two lines are also equal if their words are equal as
    decimal numbers: 2.0 is 2.
    """
    lines = [line.strip() for line in output.strip().splitlines()]
    expected_lines = [line.strip() for line in expected.strip().splitlines()]
    if len(lines) != len(expected_lines):
        return False
    return all(map(_same_line, lines, expected_lines))


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    words = line.split()
    expected_words = expected.split()
    if len(words) != len(expected_words):
        return False
    try:
        return all(map(_same_word, words, expected_words))
    except InvalidOperation:  # not a number
        return False


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    is_plain = word.isascii() and "_" not in word  # Decimal reads 4_2 and Arabic digits too
    return is_plain and Decimal(word) == Decimal(expected)


def _failure_reason(outcome: Outcome) -> str:
    if outcome.stopped == "time":
        return "took too long"
    if outcome.stopped == "output":
        return "printed too much"
    if outcome.code:
        last_line = outcome.errors.strip().splitlines()[-1:] or [""]
        return f"ended with code {outcome.code} {last_line[0]}".strip()[:300]
    return "wrong output"
