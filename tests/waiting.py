"""Waiting for a condition in tests: no fixed pause that a busy machine outlasts."""

import threading
import time
from collections.abc import Callable
from pathlib import Path


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Returns when the condition holds. Raises AssertionError, which names `what`, after a time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(*pids: int) -> None:
    for pid in pids:
        wait_for(lambda pid=pid: not is_alive(pid), f"process {pid} to end", 60)


def in_threads(*calls: Callable[[], object]) -> list[threading.Thread]:
    """Start each call in a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread], seconds: float = 300) -> None:
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
