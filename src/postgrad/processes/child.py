"""A child process from its parent's side: its start, its messages, its end."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from postgrad.processes.channel import Channel
from postgrad.processes.program import PARENT_SIGNALS

START_LIMIT_S = 60.0  # for a child to start, and to import what it needs
CLOSE_LIMIT_S = 5.0


class Child:
    """A child process. A thread receives its messages, another one sends.

    Attributes:
        process: the process; its return code is set once `on_exit` is called.
        ready: it has started.
        last_message: when its last message came, in time.monotonic(); at first, when it started.
        deadline: when its next message is due; see set_deadline.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[object],
        on_message: Callable[["Child", bytes], None],
        on_exit: Callable[["Child"], None],
        environment: Mapping[str, str] | None = None,
        exit_limit_s: float = 0.0,
    ) -> None:
        """Start `python -m module`. The threads call `on_message` and, once, `on_exit`.

        `exit_limit_s` is its time to end by itself once it has closed its end of the channel.
        """
        self.owner_pid = os.getpid()
        self.exit_limit_s = exit_limit_s
        self.ready = False
        self.last_message = time.monotonic()
        self.set_deadline(START_LIMIT_S)
        connection, child_end = socket.socketpair()
        with child_end:
            self.process = start_process(module, arguments, child_end, environment or {})
        self._channel = Channel(connection)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(on_message, on_exit), daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, daemon=True).start()

    def _read(
        self, on_message: Callable[["Child", bytes], None], on_exit: Callable[["Child"], None]
    ) -> None:
        try:
            while (data := self._channel.receive()) is not None:
                self.ready = True
                self.last_message = time.monotonic()
                if data:
                    on_message(self, data)
                del data  # it may be large
        finally:
            self._outbox.put(None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.exit_limit_s)
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                self.process.wait(CLOSE_LIMIT_S)
            self._channel.close()
            on_exit(self)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # it is dead; the reader notices
            while (data := self._outbox.get()) is not None:
                self._channel.send(data)
                del data

    def send(self, data: bytes) -> None:
        """Send a message; returns at once."""
        self._outbox.put(data)

    def set_deadline(self, limit_s: float) -> None:
        """Require the next message within this many seconds from now."""
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s

    def kill(self) -> None:
        """Kill the process and its descendants; returns at once.

        If it was dead already, its exit code stays. A fork of the parent kills nothing.
        """
        if os.getpid() != self.owner_pid:
            return
        if self.process.returncode is None:  # else the number may belong to another process now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._channel.shutdown()

    def close(self, limit_s: float = 0.0) -> str:
        """End the channel, kill the process after `limit_s` seconds; returns how it ended."""
        if limit_s:
            self._channel.shutdown(socket.SHUT_WR)  # it reads the end, and may still answer
            self._reader.join(limit_s)
        if self._reader.is_alive():
            self.kill()
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_LIMIT_S)
        return describe_exit(self.process.returncode)


def start_process(
    module: str, arguments: Sequence[object], child_end: socket.socket, env: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a fresh interpreter that runs a module; see program.run_child."""
    command = [sys.executable, "-P", "-m", module, child_end.fileno(), os.getpid(), *arguments]
    search_path = os.pathsep.join(path or os.curdir for path in sys.path)
    # The child inherits blocked signals: one that arrives during its imports must not end it.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)
    try:
        return subprocess.Popen(
            [str(part) for part in command],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what it prints goes to stderr, not into our output
            start_new_session=True,  # no Ctrl-C for it; its whole group can be killed
            env={**os.environ, "PYTHONPATH": search_path, **env},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def describe_exit(code: int | None) -> str:
    """Return how a process ended, from its return code."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    is_known_signal = -code in set(signal.Signals)
    return signal.Signals(-code).name if is_known_signal else f"signal {-code}"
