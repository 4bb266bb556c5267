"""What the program is doing, for the person who waits: phases, and counts within a phase.

A command chooses what shows them; nothing else in the program knows it.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Receives the phase, how many are done and of how many; 0 for a number that nobody knows.
Show = Callable[[str, int, int], None]


class _Display:
    """What shows the phases of this process, and the phase it is in."""

    show: Show | None = None
    phase = ""


def begin(phase: str) -> None:
    """Begin a phase, such as "reading problems.jsonl"."""
    _Display.phase = phase
    count(0, 0)


def count(done: int, total: int) -> None:
    """Report how far the current phase is."""
    if _Display.show is not None:
        _Display.show(_Display.phase, done, total)


def shown() -> Show | None:
    """Return what shows phases now."""
    return _Display.show


@contextmanager
def shown_by(show: Show | None) -> Iterator[None]:
    """Show the phases of the block by `show`; None shows nothing."""
    before = _Display.show
    _Display.show = show
    try:
        yield
    finally:
        _Display.show = before


class PhaseLines:
    """Prints phases as lines: each one when it begins, its counts every `every_s` seconds.

    With `is_patient` a phase without a line gets one only after `every_s` seconds.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        self.every_s = every_s
        self.is_patient = False
        self.phase = ""
        self.last_printed = 0.0

    def show(self, phase: str, done: int, total: int) -> None:
        """Print the phase, or its count, if it is time for a line."""
        now = time.monotonic()
        is_new = phase != self.phase
        self.phase = phase
        if is_new and self.is_patient:
            self.last_printed = now
        elif is_new or (done and now - self.last_printed >= self.every_s):
            self.last_printed = now
            print_line(describe(phase, done, total))


def describe(phase: str, done: int, total: int) -> str:
    """Return a phase with its count, such as "sampling 40/128" or "reading rows.jsonl 30,000"."""
    if total:
        return f"{phase} {done:,}/{total:,}"
    return f"{phase} {done:,}" if done else phase


def duration(seconds: float) -> str:
    """Return seconds as 1h02m, 3m05s or 12s."""
    total = round(seconds)
    hours, minutes = divmod(total // 60, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{total % 60:02d}s"
    return f"{total}s"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 step` and `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_line(text: str) -> None:
    """Print a line. If the reader of the pipe has gone, as in `| head -1`, discard the output."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    """Send stdout to /dev/null, and stderr too if it goes to the same pipe."""
    closed_pipe = os.fstat(sys.stdout.fileno())
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if os.path.samestat(os.fstat(stream.fileno()), closed_pipe):
            os.dup2(null, stream.fileno())
    os.close(null)
