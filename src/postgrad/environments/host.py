"""Runs sessions in threads of this process. Operations return at once; results are collected."""

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from postgrad.environments.calls import Call
from postgrad.environments.port import EnvironmentFailure, Observation, Outcome
from postgrad.environments.session import Session, SessionSpec
from postgrad.problem import Failure, Problem
from postgrad.verifiers.port import one_line

MAX_THREADS = 256  # sessions that run at the same time, per process

# A result: the text of open, the Observation of act, the Outcome of finish; or a Failure.
Result = str | Observation | Outcome | Failure
Entry = TypeVar("Entry")
Reply = tuple[int, Result]  # the key of a session, and the result of its operation


class Sessions(Protocol):
    """The sessions of one batch of trajectories, by keys that the caller chooses.

    A session does one operation at a time; `collect` returns its result.
    """

    def open(self, key: int, spec: SessionSpec, problem: Problem, seed: int) -> None: ...

    def act(self, key: int, action: str, calls: Sequence[Call]) -> None: ...

    def finish(self, key: int) -> None: ...

    def close(self, key: int) -> None: ...

    def collect(self, timeout_s: float) -> list[Reply]:
        """Return the results that are there; waits up to timeout_s for the first one."""
        ...


class Host(Protocol):
    """Where sessions run."""

    def new_sessions(self) -> Sessions: ...

    def close(self) -> None: ...


class ThreadHost:
    """Runs sessions in threads of this process."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self.executor = ThreadPoolExecutor(max_threads, thread_name_prefix="environment")

    def new_sessions(self) -> "ThreadSessions":
        return ThreadSessions(self.executor)

    def close(self) -> None:
        """Stop. Threads that still run are not waited for."""
        self.executor.shutdown(wait=False, cancel_futures=True)


class ThreadSessions:
    """Sessions in threads; see Sessions."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.executor = executor
        self.sessions: dict[int, Session] = {}
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def open(self, key: int, spec: SessionSpec, problem: Problem, seed: int) -> None:
        session = self.new(key, spec, problem, seed)
        if spec.environment:
            self._submit(key, session.open)
        else:
            self.replies.put((key, ""))

    def replay(
        self,
        key: int,
        spec: SessionSpec,
        problem: Problem,
        seed: int,
        history: Sequence[tuple[str, Sequence[Call]]],
    ) -> None:
        """Open a session and repeat its turns, so that it has the state of one that was lost."""
        session = self.new(key, spec, problem, seed)
        session.open()
        for action, calls in history:
            session.act(action, calls)

    def act(self, key: int, action: str, calls: Sequence[Call]) -> None:
        self._submit(key, lambda: self.sessions[key].act(action, calls))

    def finish(self, key: int) -> None:
        self._submit(key, lambda: self.sessions[key].finish())

    def close(self, key: int) -> None:
        session = self.sessions.pop(key, None)
        if session is not None:
            self.executor.submit(session.close)

    def collect(self, timeout_s: float) -> list[Reply]:
        return drain(self.replies, timeout_s)

    def new(self, key: int, spec: SessionSpec, problem: Problem, seed: int) -> Session:
        self.sessions[key] = Session(spec, problem, seed)
        return self.sessions[key]

    def _submit(self, key: int, operation: Any) -> None:
        self.executor.submit(lambda: self.replies.put((key, attempt(operation))))


def attempt(operation: Any) -> Result:
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
