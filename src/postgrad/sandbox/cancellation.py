"""Ends the sandboxes of a job that nobody waits for any more."""

import threading
from contextvars import ContextVar
from typing import Protocol

from postgrad.sandbox.outcome import SandboxError


class Process(Protocol):
    """What a job runs."""

    def kill(self) -> None: ...


class Cancellation:
    """Kills the sandboxes of one job, and lets it start no others. Thread-safe."""

    def __init__(self) -> None:
        self._processes: set[Process] = set()
        self._has_begun = False
        self._is_cancelled = False
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Note that the job begins; return False if it must not."""
        with self._lock:
            self._has_begun = not self._is_cancelled
            return self._has_begun

    def cancel(self) -> bool:
        """End the job; return whether it has begun."""
        with self._lock:
            self._is_cancelled = True
            for process in self._processes:
                process.kill()
            return self._has_begun

    def add(self, process: Process) -> None:
        """Add a process of the job. Raises SandboxError, and kills it, if the job is cancelled."""
        with self._lock:
            if not self._is_cancelled:
                self._processes.add(process)
                return
        process.kill()
        raise SandboxError("the client has disconnected")

    def remove(self, process: Process) -> None:
        """Forget a process that has ended."""
        with self._lock:
            self._processes.discard(process)


current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)
