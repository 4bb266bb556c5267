"""Runs sessions in child processes: an environment that hangs or crashes harms itself only.

Each child runs many sessions in threads. If a child dies, its other sessions are made again in
another child by replaying their turns, when they are next needed. The sessions that were running
when it died are replayed each in a child of its own; one that kills that child too has failed.
Children are fresh interpreters, not forks of this process and its threads.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from postgrad.environments.calls import Call
from postgrad.environments.child import decode_result
from postgrad.environments.host import Reply, Result, drain
from postgrad.environments.session import SessionSpec
from postgrad.environments.tools import MAX_CALLS_PER_TURN
from postgrad.errors import RunError
from postgrad.problem import Failure, Problem
from postgrad.verifiers.child import encode

START_LIMIT_S = 60.0  # for a child to start
GRACE_S = 10.0  # a child that is silent for this long beyond all its limits is killed
CHECK_S = 1.0  # between looks at silent children
MAX_FAILED_STARTS = 3


@dataclass(eq=False)
class _Session:
    """The parent's record of a session, from which the session can be replayed."""

    number: int  # unique in the pool
    key: int  # of its owner
    replies: "queue.SimpleQueue[Reply]"
    spec: SessionSpec
    problem: Problem
    seed: int
    history: list[tuple[str, list[Any]]] = field(default_factory=list)
    pending: dict[str, Any] | None = None  # the message of the running operation
    child: "_Child | None" = None
    ran_in_crash: bool = False  # it was running when its child died

    @property
    def limit_s(self) -> float:
        """The longest time of the running operation, which may replay all turns."""
        per_turn = max(self.spec.timeout_s, MAX_CALLS_PER_TURN * self.spec.tool_timeout_s)
        return per_turn * (len(self.history) + 3)


class _Child:
    """One child process and the sessions in it."""

    def __init__(self, pool: "ChildPool") -> None:
        self.socket, child_socket = socket.socketpair()
        environment = {
            "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path),
            "OMP_NUM_THREADS": "1",
        }
        arguments = [str(child_socket.fileno()), str(os.getpid())]
        with child_socket:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "postgrad.environments.child", *arguments],
                pass_fds=[child_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # an environment's prints go to stderr, not into our output
                start_new_session=True,  # no Ctrl-C for it; its whole group can be killed
                env=os.environ | environment,
            )
        self.sessions: dict[int, _Session] = {}
        self.ready = False
        self.retired = False  # a session in it hangs: it gets no new ones
        self.last_message = time.monotonic()
        self.exclusive = False  # it replays one session of `to_isolate`, and has no other
        self.outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(pool,), daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    def _read(self, pool: "ChildPool") -> None:
        try:
            # A killed child may leave half a line.
            with contextlib.suppress(OSError, ValueError), self.socket.makefile("rb") as lines:
                for line in lines:
                    pool.on_message(self, json.loads(line))
        finally:
            pool.on_exit(self)  # else its sessions would wait for answers

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # it is dead; the reader notices
            while data := self.outbox.get():
                self.socket.sendall(data)

    def send(self, message: dict[str, Any]) -> None:
        self.outbox.put(encode(message))

    def kill(self) -> None:
        self.outbox.put(b"")  # ends the writer
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)


class ChildPool:
    """Sessions in `workers` child processes. They start when they are first needed."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.children: list[_Child] = []
        self.to_isolate: deque[_Session] = deque()
        self.numbers = itertools.count()
        self.lock = threading.RLock()
        self.num_failed_starts = 0
        self.closed = False
        self._finalizer = weakref.finalize(self, _kill_all, self.children, os.getpid())

    def new_sessions(self) -> "PoolSessions":
        return PoolSessions(self)

    def close(self) -> None:
        """Kill the children."""
        self.closed = True
        self._finalizer()

    def start(self, session: _Session, message: dict[str, Any]) -> None:
        """Start an operation of a session, in its child or in a new one."""
        with self.lock:
            session.pending = message
            self._place(session)

    def _place(self, session: _Session) -> None:
        if session.child is None:
            if session.ran_in_crash:
                self.to_isolate.append(session)
                self._isolate_next()
                return
            self._move(session, self._choose_child())
        self._send(session)

    def _choose_child(self) -> _Child:
        usable = [c for c in self.children if not (c.retired or c.exclusive)]
        if len(usable) < self.workers:
            usable.append(self._new_child())
            return usable[-1]
        return min(usable, key=lambda child: len(child.sessions))

    def _new_child(self) -> _Child:
        if self.closed:
            raise RunError("the pool of environments is closed")
        if self.num_failed_starts >= MAX_FAILED_STARTS:
            raise RunError("environment processes do not start; see their output above")
        child = _Child(self)
        self.children.append(child)
        return child

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
            self._move(session, child)
            self._send(session)

    def _move(self, session: _Session, child: _Child) -> None:
        session.child = child
        child.sessions[session.number] = session
        assert session.pending is not None
        session.pending["replay"] = {
            "spec": dataclasses.asdict(session.spec),
            "problem": vars(session.problem),
            "seed": session.seed,
            "history": session.history,
        }

    def _send(self, session: _Session) -> None:
        child = session.child
        assert child is not None and session.pending is not None
        if not any(other.pending for other in child.sessions.values() if other is not session):
            child.last_message = time.monotonic()  # it was idle: its clock starts now
        child.send(session.pending)

    # ---- called by the threads that read from children

    def on_message(self, child: _Child, message: list[Any]) -> None:
        with self.lock:
            child.last_message = time.monotonic()
            if message == ["ready"]:
                child.ready = True
                self.num_failed_starts = 0
                return
            number, kind, fields = message
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
            self.children.remove(child)
            child.kill()
            self.num_failed_starts += not child.ready
            sessions = list(child.sessions.values())
            child.sessions.clear()
            for session in sessions:
                session.child = None
                if session.pending is None or self.closed:
                    continue
                if session.ran_in_crash or not child.ready:
                    code = child.process.returncode
                    reason = f"the environment's process ended with exit code {code}"
                    self._reply(session, Failure("crash", reason))
                    continue
                session.ran_in_crash = True
                self.to_isolate.append(session)
            if not self.closed:
                self._isolate_next()

    def _reply(self, session: _Session, result: Result) -> None:
        message = session.pending
        session.pending = None
        if message is not None and message["op"] == "act":
            session.history.append((message["action"], message["calls"]))
        session.replies.put((session.key, result))

    # ---- called by the owners of sessions

    def drop(self, session: _Session) -> None:
        with self.lock:
            child = session.child
            if child is None:
                return
            child.sessions.pop(session.number, None)
            child.send({"op": "close", "key": session.number})
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


class PoolSessions:
    """The sessions of one batch of trajectories in a pool; see host.Sessions."""

    def __init__(self, pool: ChildPool) -> None:
        self.pool = pool
        self.sessions: dict[int, _Session] = {}
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.last_check = time.monotonic()

    def open(self, key: int, spec: SessionSpec, problem: Problem, seed: int) -> None:
        number = next(self.pool.numbers)
        self.sessions[key] = _Session(number, key, self.replies, spec, problem, seed)
        self._start(key, {"op": "open"})

    def act(self, key: int, action: str, calls: Sequence[Call]) -> None:
        self._start(key, {"op": "act", "action": action, "calls": [vars(call) for call in calls]})

    def finish(self, key: int) -> None:
        self._start(key, {"op": "finish"})

    def close(self, key: int) -> None:
        session = self.sessions.pop(key, None)
        if session is not None:
            self.pool.drop(session)

    def collect(self, timeout_s: float) -> list[Reply]:
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            replies = drain(self.replies, max(0.0, min(CHECK_S, deadline - now)))
            if now > self.last_check + CHECK_S:
                self.last_check = now
                self.pool.kill_silent()
            if replies or time.monotonic() >= deadline:
                return replies

    def _start(self, key: int, message: dict[str, Any]) -> None:
        session = self.sessions[key]
        self.pool.start(session, {"key": session.number, **message})


def _kill_all(children: list[_Child], owner_pid: int) -> None:
    """Kill all children; does nothing in a fork of the process that started them."""
    while children and os.getpid() == owner_pid:
        children.pop().kill()
