"""Ports whose models live in a child process. Same methods, same numbers; every wait has a time limit and names what it waits for."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from postgrad.cluster.wire import decode, encode
from postgrad.config.compose import to_yaml
from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import ConfigError, RunError
from postgrad.model.views import FULL, View
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.types import Batch

START_S = 300.0  # a cold start imports torch and loads the model
OURS = (
    signal.SIGINT,
    signal.SIGTERM,
)  # what the driver handles, also where all processes of a run get it


class Child:
    """One child process that hosts models. Calls are (port, method, arguments) over a private socket pair.

    With an EngineConfig the child holds an engine alone, else all models of a run.
    """

    def __init__(self, config: Config | EngineConfig, label: str) -> None:
        self.label, self.wait_s, self.lock = label, config.cluster.wait_s, threading.RLock()
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "postgrad.cluster.worker",
            str(theirs.fileno()),
            "engine" if isinstance(config, EngineConfig) else "run",
        ]
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, OURS
        )  # the child is born with them blocked, so that none meets its imports
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.socket = ours
        try:
            with contextlib.suppress(
                OSError
            ):  # a child that is dead already is noticed when it does not answer
                send(self.socket, to_yaml(config).encode())
            self._receive("start", START_S)
        except BaseException:
            self.close(patience_s=1.0)
            raise

    def call(self, port: str, method: str, *arguments: Any) -> Any:
        what = f"{port}.{method}"
        with self.lock:  # rollouts ahead and the step before them may want one engine
            try:
                self.socket.settimeout(self.wait_s)
                send(self.socket, encode([port, method, list(arguments)]))
            except TimeoutError as error:  # a child that hangs does not even read
                raise self._silence(what, self.wait_s) from error
            except OSError as error:
                raise self._death(what) from error
            return self._receive(what, self.wait_s)

    def _receive(self, what: str, limit_s: float) -> Any:
        data = receive(self.socket, limit_s)
        if data is None:
            if self.process.poll() is None and not _readable(self.socket):
                raise self._silence(what, limit_s)
            raise self._death(what)
        kind, value = decode(data)
        if kind == "config":
            raise ConfigError(value)
        if kind == "error":
            raise RunError(value)
        return value

    def _silence(self, what: str, limit_s: float) -> RunError:
        self.close(patience_s=1.0)
        return RunError(
            f"the {self.label} process did not answer {what} within {limit_s:g} s (cluster.wait_s); it was stopped"
        )

    def _death(self, what: str) -> RunError:
        self.close()
        return RunError(
            f"the {self.label} process died during {what} (exit code {self.process.returncode}); the same command continues the run"
        )

    def close(self, patience_s: float = 20.0) -> None:
        """End the child: by itself if it does so in time."""
        self.socket.close()
        try:
            self.process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Caller(Protocol):
    """Somebody who carries calls to models elsewhere: a child process, or actors on Ray."""

    def call(self, port: str, method: str, *arguments: Any) -> Any: ...


class RemoteModel:
    """The port of one model that lives elsewhere: a policy, a reference or a critic, by the name of its role."""

    def __init__(self, child: Caller, role: str) -> None:
        self.child, self.role = child, role

    def logprobs(self, batch: Batch, view: View = FULL) -> dict[str, Tensor]:
        return self.child.call(self.role, "logprobs", batch, view)

    def values(self, batch: Batch) -> Tensor:
        return self.child.call(self.role, "values", batch)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        return self.child.call(self.role, "update", batch, step)

    def token_stats(self) -> dict[str, Tensor]:
        return self.child.call(self.role, "token_stats")

    def weights(self) -> dict[str, Tensor]:
        return self.child.call(self.role, "weights")

    def save(self, folder: str) -> None:
        self.child.call(self.role, "save", folder)

    def load(self, folder: str) -> None:
        self.child.call(self.role, "load", folder)

    def begin_save(self, folder: str) -> None:
        self.child.call(self.role, "begin_save", folder)

    def saved(self, wait: bool) -> bool:
        return self.child.call(self.role, "saved", wait)


class RemoteEngine:
    """The port of an engine that lives elsewhere, or of a role that continues text."""

    def __init__(self, child: Caller, shares_weights: bool, role: str = "engine") -> None:
        self.child, self.shares_weights, self.role = child, shares_weights, role

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return self.child.call(self.role, "generate", list(requests), sampling)

    def publish(self, weights: dict[str, Tensor]) -> None:
        self.child.call(self.role, "publish", weights)


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(8, "little") + data)


def receive(connection: socket.socket, limit_s: float | None) -> bytes | None:
    """One message, or None when the other side is gone or silent for `limit_s`."""
    connection.settimeout(limit_s)
    try:
        header = _exactly(connection, 8)
        return None if header is None else _exactly(connection, int.from_bytes(header, "little"))
    except OSError:
        return None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])
