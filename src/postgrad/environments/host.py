"""Runs sessions in threads of this process. Operations return at once; results are collected."""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from postgrad.environments.calls import Call
from postgrad.environments.port import EnvironmentFailure, Observation, Outcome
from postgrad.environments.session import Operation, Session, SessionSpec
from postgrad.problem import Failure, Problem
from postgrad.verifiers.port import one_line

MAX_THREADS = 256  # sessions that run at the same time, per process

# A result: the Observation of open or act, the Outcome of finish; or a Failure.
Result = Observation | Outcome | Failure
Entry = TypeVar("Entry")
Reply = tuple[int, Result]  # the key of a session, and the result of its operation


class Sessions:
    """The sessions of one batch of trajectories, by keys that the caller chooses.

    A session does one operation at a time; `collect` returns its result. Subclasses say where.
    """

    def __init__(self) -> None:
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def open(self, key: int, spec: SessionSpec, problem: Problem, seed: int) -> None:
        raise NotImplementedError

    def start(self, key: int, operation: Operation) -> None:
        raise NotImplementedError

    def close(self, key: int) -> None:
        raise NotImplementedError

    def act(self, key: int, action: str, calls: Sequence[Call]) -> None:
        self.start(key, Operation("act", action, tuple(calls)))

    def finish(self, key: int) -> None:
        self.start(key, Operation("finish"))

    def collect(self, timeout_s: float) -> list[Reply]:
        """Return the results that are there; waits up to timeout_s for the first one."""
        return drain(self.replies, timeout_s)


class Host(Protocol):
    """Where sessions run."""

    def new_sessions(self) -> Sessions: ...

    def close(self) -> None: ...


class ThreadHost:
    """Runs sessions in threads of this process."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="environment")

    def new_sessions(self) -> "ThreadSessions":
        return ThreadSessions(self.executor)

    def close(self) -> None:
        """Stop. Threads that still run are not waited for."""
        self.executor.shutdown(wait=False, cancel_futures=True)


class ThreadSessions(Sessions):
    """Sessions in threads."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        super().__init__()
        self.executor = executor
        self.sessions: dict[int, Session] = {}

    def open(self, key: int, spec: SessionSpec, problem: Problem, seed: int) -> None:
        self.sessions[key] = Session(spec, problem, seed)
        self.start(key, Operation("open"))

    def start(self, key: int, operation: Operation) -> None:
        session = self.sessions[key]
        self.executor.submit(
            lambda: self.replies.put((key, attempt(lambda: session.run(operation))))
        )

    def close(self, key: int) -> None:
        session = self.sessions.pop(key, None)
        if session is not None:
            self.executor.submit(session.close)


def attempt(operation: Callable[[], Result]) -> Result:
    """Return the operation's result, or the Failure of what it raised."""
    try:
        return operation()
    except EnvironmentFailure as error:
        return error.failure
    except Exception as error:
        return Failure("error", one_line(error))


def drain(entries: "queue.SimpleQueue[Entry]", timeout_s: float) -> list[Entry]:
    """Return all entries of a queue; waits up to timeout_s for the first one."""
    found: list[Entry] = []
    try:
        if timeout_s > 0:
            found.append(entries.get(timeout=timeout_s))
        while True:
            found.append(entries.get_nowait())
    except queue.Empty:
        return found
