"""Calls a child process that holds models. Every wait has a time limit."""

import queue
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from postgrad.cluster.engines import is_remote, shares_weights
from postgrad.cluster.ports import ENGINE, POLICY, START_S, RemotePort, RunModels, to_exception
from postgrad.cluster.wire import decode, encode
from postgrad.config.compose import to_yaml
from postgrad.config.schema import Config, EngineConfig, engine_config
from postgrad.errors import RunError
from postgrad.methods.ports import Role
from postgrad.processes.child import Child

CLOSE_S = 20.0  # time to end by itself before the child is killed
CLOSE_AFTER_FAILURE_S = 1.0


class ChildProcess:
    """A child process. Calls are (port, method, arguments).

    With an EngineConfig the child holds an engine alone, with a Config all models of a run.

    Raises: ConfigError or RunError if the child cannot start.
    """

    def __init__(self, config: Config | EngineConfig, label: str) -> None:
        self.label = label
        self.wait_s = config.cluster.wait_s
        self.lock = threading.RLock()
        # The child's threads know the queue alone, so that an unused object is garbage-collected.
        answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.answers = answers
        self.child = Child(
            "postgrad.cluster.child_main",
            [ENGINE] if isinstance(config, EngineConfig) else [],
            lambda _, data: answers.put(data),
            lambda _: answers.put(None),
            exit_limit_s=CLOSE_S,
        )
        self._finalizer = weakref.finalize(self, self.child.kill)
        try:
            self.child.send(to_yaml(config).encode())
            self._receive("start", START_S)
        except BaseException:
            self.close(CLOSE_AFTER_FAILURE_S)
            raise

    def call(self, port: str, method: str, *arguments: Any) -> Any:
        """Return the result of a port's method. Raises its ConfigError or RunError.

        Also raises RunError if the child dies or does not answer within cluster.wait_s.
        """
        name = f"{port}.{method}"
        with self.lock:  # the prefetcher's thread and the driver may call one engine
            self.child.send(encode([port, method, list(arguments)]))
            return self._receive(name, self.wait_s)

    def _receive(self, name: str, timeout_s: float) -> Any:
        try:
            data = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            raise self._timeout_error(name, timeout_s) from None
        if data is None:
            self.answers.put(None)  # the next call fails at once, too
            raise RunError(
                f"the {self.label} process died during {name} ({self.child.close()}); "
                "the same command continues the run"
            )
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

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Close the connection, which ends the child; kill it after `timeout_s` seconds."""
        self.child.close(timeout_s)


@contextmanager
def open_child_processes(config: Config, roles: dict[str, Role]) -> Iterator[RunModels]:
    """Yield the models of a run in one child process, or in two with cluster.engines=1."""
    with ExitStack() as stack:
        process = stack.enter_context(closing(ChildProcess(config, POLICY)))
        engine_process = process
        if config.cluster.engines:
            engine_process = ChildProcess(engine_config(config), ENGINE)
            stack.enter_context(closing(engine_process))
        engine: RemotePort | None = None
        if not is_remote(config):
            engine = RemotePort(engine_process, ENGINE, "engine", shares_weights(config))
        models = {name: RemotePort(process, name, role.kind) for name, role in roles.items()}
        yield RunModels(RemotePort(process, POLICY, "policy"), engine, models)


@contextmanager
def open_child_engine(config: EngineConfig) -> Iterator[Any]:
    """Yield an engine alone, in a child process."""
    with closing(ChildProcess(config, ENGINE)) as process:
        yield RemotePort(process, ENGINE, "engine")
