"""Starts a child process that holds models, and calls it. Every wait has a time limit."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from postgrad.cluster.connection import DRIVER_SIGNALS, is_readable, receive, send
from postgrad.cluster.ports import to_exception
from postgrad.cluster.remote_ports import START_S
from postgrad.cluster.wire import decode, encode
from postgrad.config.compose import to_yaml
from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import RunError

CLOSE_S = 20.0  # time to end by itself before the child is killed
CLOSE_AFTER_FAILURE_S = 1.0


class ChildProcess:
    """A child process. Calls are (port, method, arguments) over a private socket pair.

    With an EngineConfig the child holds an engine alone, with a Config all models of a run.

    Raises: ConfigError or RunError if the child cannot start.
    """

    def __init__(self, config: Config | EngineConfig, label: str) -> None:
        self.label = label
        self.wait_s = config.cluster.wait_s
        self.lock = threading.RLock()
        self.socket, child_socket = socket.socketpair()
        contents = "engine" if isinstance(config, EngineConfig) else "run"
        self.process = _start(child_socket, contents)
        child_socket.close()
        try:
            # If the child is already dead, `_receive` reports it.
            with contextlib.suppress(OSError):
                send(self.socket, to_yaml(config).encode())
            self._receive("start", START_S)
        except BaseException:
            self.close(CLOSE_AFTER_FAILURE_S)
            raise

    def call(self, port: str, method: str, *arguments: Any) -> Any:
        """Returns the result of a port's method. Raises its ConfigError or RunError.

        Also raises RunError if the child dies or does not answer within cluster.wait_s.
        """
        name = f"{port}.{method}"
        with self.lock:  # the prefetcher's thread and the driver may call one engine
            try:
                self.socket.settimeout(self.wait_s)
                send(self.socket, encode([port, method, list(arguments)]))
            except TimeoutError as error:  # the child hangs and does not even read
                raise self._timeout_error(name, self.wait_s) from error
            except OSError as error:
                raise self._exit_error(name) from error
            return self._receive(name, self.wait_s)

    def _receive(self, name: str, timeout_s: float) -> Any:
        data = receive(self.socket, timeout_s)
        if data is None:
            if self.process.poll() is None and not is_readable(self.socket):
                raise self._timeout_error(name, timeout_s)
            raise self._exit_error(name)
        kind, value = decode(data)
        if kind != "ok":
            raise to_exception(kind, value)
        return value

    def _timeout_error(self, name: str, timeout_s: float) -> RunError:
        self.close(CLOSE_AFTER_FAILURE_S)
        return RunError(
            f"the {self.label} process did not answer {name} within {timeout_s:g} s "
            "(cluster.wait_s) and was stopped; the same command continues the run"
        )

    def _exit_error(self, name: str) -> RunError:
        self.close()
        return RunError(
            f"the {self.label} process died during {name} (exit code {self.process.returncode}); "
            "the same command continues the run"
        )

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Closes the connection, which ends the child; kills it after `timeout_s` seconds."""
        self.socket.close()
        try:
            self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _start(child_socket: socket.socket, contents: str) -> subprocess.Popen[bytes]:
    descriptor = child_socket.fileno()
    command = [sys.executable, "-m", "postgrad.cluster.child_main", str(descriptor), contents]
    # The child inherits blocked signals: one that arrives during its imports must not end it.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, DRIVER_SIGNALS)
    try:
        return subprocess.Popen(
            command,
            pass_fds=[descriptor],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
