"""Waiting for a condition in tests: no fixed pause that a busy machine outlasts."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Returns when the condition holds. Raises AssertionError, which names `what`, after a time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
