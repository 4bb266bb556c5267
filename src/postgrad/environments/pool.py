"""Runs sessions in child processes: an environment that hangs or crashes harms itself only.

Each child runs many sessions in threads. If a child dies, its other sessions are made again in
another child by replaying their turns, when they are next needed. The sessions that were running
when it died are replayed each in a child of its own; one that kills that child too has failed.
"""

import itertools
import json
import queue
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from postgrad.environments.child import decode_result
from postgrad.environments.host import Reply, Result, Sessions
from postgrad.environments.session import Operation, SessionSpec
from postgrad.environments.tools import MAX_CALLS_PER_TURN
from postgrad.errors import RunError
from postgrad.problem import Failure, Problem, sent_fields
from postgrad.processes.channel import to_json
from postgrad.processes.child import START_LIMIT_S, Child
from postgrad.processes.supervisor import Supervisor

GRACE_S = 10.0  # a child that is silent for this long beyond all its limits is killed
CHECK_S = 1.0  # between looks at silent children


@dataclass(eq=False)
class _Session:
    """The parent's record of a session, from which the session can be replayed."""

    number: int  # unique in the pool
    key: int  # of its owner
    replies: "queue.SimpleQueue[Reply]"
    spec: SessionSpec
    problem: Problem
    seed: int
    history: list[Operation] = field(default_factory=list)
    pending: Operation | None = None  # the running one
    child: "_Child | None" = None
    ran_in_crash: bool = False  # it was running when its child died

    @property
    def limit_s(self) -> float:
        """The longest time of the running operation, which may replay all turns."""
        per_turn = max(self.spec.timeout_s, MAX_CALLS_PER_TURN * self.spec.tool_timeout_s)
        return per_turn * (len(self.history) + 3)


class _Child(Child):
    """A child process and the sessions in it."""

    def __init__(self, *arguments: Any) -> None:
        self.sessions: dict[int, _Session] = {}
        self.retired = False  # a session in it hangs: it gets no new ones
        self.exclusive = False  # it replays one session of `to_isolate`, and has no other
        super().__init__(*arguments)


class ChildPool:
    """Sessions in `workers` child processes. They start when they are first needed."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        environment = {"OMP_NUM_THREADS": "1"}
        self.processes = Supervisor("postgrad.environments.child", [], "environment", environment)
        self.to_isolate: deque[_Session] = deque()
        self.numbers = itertools.count()
        self.lock = threading.RLock()

    @property
    def children(self) -> list[_Child]:
        return self.processes.children

    def new_sessions(self) -> "PoolSessions":
        return PoolSessions(self)

    def close(self) -> None:
        """Kill the children."""
        self.processes.close()

    def start(self, session: _Session, operation: Operation) -> None:
        """Start an operation of a session, in its child or in a new one."""
        with self.lock:
            session.pending = operation
            if session.child is not None:
                self._send(session, session.child)
            elif session.ran_in_crash:
                self.to_isolate.append(session)
                self._isolate_next()
            else:
                self._send(session, self._choose_child())

    def _choose_child(self) -> _Child:
        usable = [c for c in self.children if not (c.retired or c.exclusive)]
        if len(usable) < self.workers:
            return self._new_child()
        return min(usable, key=lambda child: len(child.sessions))

    def _new_child(self) -> _Child:
        return self.processes.start(_Child, self.on_message, self.on_exit)

    def _isolate_next(self) -> None:
        """Replay the next session that ran in a crash, in a child of its own, one at a time."""
        if self.to_isolate and not any(child.exclusive for child in self.children):
            session = self.to_isolate.popleft()
            try:
                child = self._new_child()
            except RunError as error:
                self._reply(session, Failure("crash", str(error)))
                return
            child.exclusive = True
            self._send(session, child)

    def _send(self, session: _Session, child: _Child) -> None:
        """Send the pending operation; to another child with all that makes the session again."""
        assert session.pending is not None
        message: dict[str, Any] = {"key": session.number, "operation": asdict(session.pending)}
        if child is not session.child:
            session.child = child
            child.sessions[session.number] = session
            message["made"] = {
                "spec": asdict(session.spec),
                "problem": sent_fields(session.problem),
                "seed": session.seed,
                "history": [asdict(operation) for operation in session.history],
            }
        if not any(other.pending for other in child.sessions.values() if other is not session):
            child.last_message = time.monotonic()  # it was idle: its clock starts now
        child.send(to_json(message))

    # ---- called by the threads that read from children

    def on_message(self, child: _Child, message: bytes) -> None:
        with self.lock:
            number, kind, fields = json.loads(message)
            session = child.sessions.get(number)
            if session is None or session.pending is None:
                return
            result = decode_result(kind, fields)
            if isinstance(result, Failure) and result.kind == "timeout":
                child.retired = True
            if child.exclusive:  # the session did not crash it this time
                child.exclusive = False
                self._isolate_next()
            self._reply(session, result)

    def on_exit(self, child: _Child) -> None:
        with self.lock:
            if child not in self.children:
                return
            how = self.processes.remove(child)
            sessions = list(child.sessions.values())
            child.sessions.clear()
            for session in sessions:
                session.child = None
                if session.pending is None or self.processes.closed:
                    continue
                if session.ran_in_crash or not child.ready:
                    reason = f"the environment's process ended: {how}"
                    self._reply(session, Failure("crash", reason))
                    continue
                session.ran_in_crash = True
                self.to_isolate.append(session)
            if not self.processes.closed:
                self._isolate_next()

    def _reply(self, session: _Session, result: Result) -> None:
        if session.pending is not None:
            session.history.append(session.pending)
            session.pending = None
        session.replies.put((session.key, result))

    # ---- called by the owners of sessions

    def drop(self, session: _Session) -> None:
        with self.lock:
            child = session.child
            if child is None:
                return
            child.sessions.pop(session.number, None)
            child.send(to_json({"key": session.number, "operation": None}))
            usable = [c for c in self.children if not c.retired]
            if not child.sessions and (child.retired or len(usable) > self.workers):
                self.children.remove(child)
                child.kill()

    def kill_silent(self) -> None:
        """Kill children that hold the interpreter and cannot keep their own time limits."""
        now = time.monotonic()
        with self.lock:
            for child in list(self.children):
                limits = [s.limit_s for s in child.sessions.values() if s.pending]
                limit_s = (max(limits) if child.ready else START_LIMIT_S) if limits else None
                if limit_s is not None and now > child.last_message + limit_s + GRACE_S:
                    child.kill()  # its reader calls on_exit


class PoolSessions(Sessions):
    """Sessions in a pool of child processes."""

    def __init__(self, pool: ChildPool) -> None:
        super().__init__()
        self.pool = pool
        self.sessions: dict[int, _Session] = {}
        self.last_check = time.monotonic()

    def open(self, key: int, spec: SessionSpec, problem: Problem, seed: int) -> None:
        number = next(self.pool.numbers)
        self.sessions[key] = _Session(number, key, self.replies, spec, problem, seed)
        self.start(key, Operation("open"))

    def start(self, key: int, operation: Operation) -> None:
        self.pool.start(self.sessions[key], operation)

    def close(self, key: int) -> None:
        session = self.sessions.pop(key, None)
        if session is not None:
            self.pool.drop(session)

    def collect(self, timeout_s: float) -> list[Reply]:
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            replies = super().collect(max(0.0, min(CHECK_S, deadline - now)))
            if now > self.last_check + CHECK_S:
                self.last_check = now
                self.pool.kill_silent()
            if replies or time.monotonic() >= deadline:
                return replies
