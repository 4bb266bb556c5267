"""Verifiers in child processes: every response gets a Score or a Failure, whatever a verifier does.

A child that exceeds the time limit is killed; a child that dies is replaced. Only the response
that it was scoring fails; the rest of its chunk is scored by another child. Children are fresh
interpreters, not forks of this process and its threads.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from postgrad import phases
from postgrad.cores import available_cores
from postgrad.errors import RunError
from postgrad.problem import Failure, Problem, Score, sent_fields
from postgrad.verifiers.child import encode
from postgrad.verifiers.lookup import find_verifier, load_verifier
from postgrad.verifiers.port import run_verifier
from postgrad.verifiers.table import VerifierSpec

START_LIMIT_S = 60.0  # for a child to start and to import a verifier
CLOSE_LIMIT_S = 5.0
MAX_CHUNK = 32  # responses sent to a child at once
MAX_FAILED_STARTS = 3
MEMORY_BYTES = 2 << 30  # address space of a verifier beyond what its imports took
OWN_WORKERS = 2  # for the user's functions, which may need much memory or a service
MAX_WORKERS = 16


def default_workers(specs: Sequence[VerifierSpec]) -> int:
    """Return how many child processes score with these verifiers if the user does not say it."""
    if any(spec.is_own for spec in specs):
        return OWN_WORKERS
    return max(OWN_WORKERS, min(MAX_WORKERS, available_cores() - 1))


class _Child:
    """One child process.

    Attributes:
        items: the positions of the responses that it has; the first one is being scored.
        ready: it has started.
        started_item: it has begun to score items[0].
        importing: the package that a verifier imports while it scores; its time does not count.
        leaving: it has said that it exits on purpose.
        closed: its end of the socket is closed.
    """

    def __init__(self, timeout_s: float) -> None:
        self.socket, child_socket = socket.socketpair()
        arguments = [child_socket.fileno(), os.getpid(), timeout_s, MEMORY_BYTES]
        search_path = os.pathsep.join(path or str(os.curdir) for path in sys.path)
        environment = {
            "PYTHONPATH": search_path,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        with child_socket:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "postgrad.verifiers.child", *map(str, arguments)],
                pass_fds=[child_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # a verifier's prints go to stderr, not into our output
                start_new_session=True,  # no Ctrl-C for it; its whole group can be killed
                env=os.environ | environment,
            )
        self.socket.setblocking(False)
        self.outbox = bytearray()
        self.inbox = b""
        self.items: deque[int] = deque()
        self.ready = False
        self.started_item = False
        self.importing = ""
        self.leaving = False
        self.closed = False
        self.set_deadline(START_LIMIT_S)

    def set_deadline(self, limit_s: float) -> None:
        """Require the next message within this many seconds from now."""
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s

    def send(self, chunk: dict[str, Any], items: Sequence[int]) -> None:
        """Send a chunk of work; `items` are the positions of its responses."""
        self.items.extend(items)
        self.set_deadline(START_LIMIT_S)
        self.outbox += encode(chunk)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now; the rest stays in the outbox."""
        try:
            while self.outbox:
                del self.outbox[: self.socket.send(self.outbox[: 1 << 20])]
        except BlockingIOError:
            pass  # the socket is full; the rest is sent later
        except OSError:  # the child is dead; receive() will notice
            self.outbox.clear()

    def receive(self) -> list[list[Any]]:
        """Return all complete messages; sets `closed` at the end of the stream."""
        try:
            while data := self.socket.recv(1 << 16):
                self.inbox += data
            self.closed = True
        except BlockingIOError:
            pass  # nothing more has arrived yet
        except OSError:  # the child is dead
            self.closed = True
        *lines, self.inbox = self.inbox.split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        """Kill the process and its descendants. If it was dead already, its exit code stays."""
        if self.process.returncode is not None:  # its process id may belong to another process now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def remove(self) -> int:
        """Kill the process, close the socket, wait; returns the exit code."""
        self.kill()
        self.socket.close()
        try:
            return self.process.wait(CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel; waiting longer would not help
            return -signal.SIGKILL


class VerifierPool:
    """Scores responses in `workers` child processes; 0: see `default_workers`.

    Each response has `timeout_s` seconds from the moment when a child starts on it, or more if its
    verifier has a time limit of its own (code). Children start when they are first needed. Use the
    pool as a context manager, or call close(). Calls from several threads take turns.
    """

    def __init__(self, workers: int = 0, timeout_s: float = 5.0) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        self._children: list[_Child] = []
        self._specs: dict[str, VerifierSpec] = {}
        self._lock = threading.Lock()
        self._num_failed_starts = 0
        self._closed = False
        self._finalizer = weakref.finalize(self, _stop_children, self._children, os.getpid())

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the children and wait for them, at most a few seconds. Ends the use of the pool."""
        self._closed = True
        for child in list(self._children):
            child.kill()  # verify() in another thread notices and releases the lock
        if self._lock.acquire(timeout=CLOSE_LIMIT_S):
            self._lock.release()
        self._finalizer()

    def verify(
        self, items: Sequence[tuple[str, Problem]], verifier_names: Sequence[str]
    ) -> list[Score | Failure]:
        """Return one Score or Failure per (response, problem), in order.

        verifier_names[i] is the verifier of items[i]. The kinds of Failure are timeout, crash (also
        out of memory), error (the verifier raised) and invalid (it returned no finite number).

        Raises:
            ConfigError: there is no such verifier.
            RunError: child processes do not start.
        """
        for name in set(verifier_names) - set(self._specs):
            self._specs[name] = find_verifier(name)
        specs = [self._specs[name] for name in verifier_names]
        work = _Work(items, specs, self.workers or default_workers(specs))
        for position in work.inline:
            verifier = load_verifier(specs[position].path)
            response, problem = items[position]
            work.results[position] = run_verifier(verifier, response, problem)
        if work.pending:
            with self._lock:
                self._run(work)
        return [work.results[position] for position in range(len(items))]

    def _run(self, work: "_Work") -> None:
        try:
            while work.pending or any(child.items for child in self._children):
                self._assign(work)
                busy = [child for child in self._children if child.items]
                for child in _wait_for_messages(busy):
                    for message in child.receive():
                        self._handle(child, message, work)
                phases.count(len(work.results), len(work.items))
                now = time.monotonic()
                for child in busy:
                    late = bool(child.items) and now >= child.deadline
                    if child.closed or child.leaving or late:
                        self._replace(child, work)
        finally:
            for child in [child for child in self._children if child.items]:
                self._remove(child)

    def _assign(self, work: "_Work") -> None:
        """Send every idle child a chunk; start children while there is more work than idle ones."""
        if self._closed:
            raise RunError("the verifier pool is closed")
        for child in list(self._children):
            if not child.items and child.process.poll() is not None:
                self._remove(child)
        num_idle = sum(not child.items for child in self._children)
        while len(self._children) < work.workers and len(work.pending) > num_idle:
            self._children.append(_Child(self.timeout_s))
            num_idle += 1
        for child in self._children[: work.workers]:
            if work.pending and not child.items:
                # Chunks get smaller towards the end, so that the children finish together.
                size = min(MAX_CHUNK, -(-len(work.pending) // (4 * work.workers)))
                positions = [work.pending.popleft() for _ in range(size)]
                child.send(work.chunk(positions), positions)

    def _handle(self, child: _Child, message: list[Any], work: "_Work") -> None:
        match message:
            case ["ready"]:
                child.ready = True
                self._num_failed_starts = 0
            case ["start", position]:
                child.started_item = True
                child.set_deadline(max(self.timeout_s, work.specs[position].time_limit_s))
                child.importing = ""
            case ["importing", _, module]:
                child.importing = module
                child.set_deadline(START_LIMIT_S)
            case ["done", position, value, parts]:
                work.results[position] = Score(value, parts)
            case ["failed", position, kind, reason]:
                work.results[position] = Failure(kind, reason)
            case _:  # bye
                child.leaving = True
        if message[0] in ("done", "failed"):
            child.items.popleft()
            child.started_item = False
            child.set_deadline(START_LIMIT_S)  # the next verifier may have to be imported

    def _replace(self, child: _Child, work: "_Work") -> None:
        """Remove a dead or late child, and put its items back to the pending ones.

        The item that it was scoring fails, unless the child left on purpose. If it died before it
        started on the item, the item is tried once more.
        """
        late = not child.closed and not child.leaving
        exit_code = self._remove(child)
        if not child.ready:
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                raise RunError(
                    f"verifier processes do not start ({_describe_exit(exit_code)}); "
                    "see their output above"
                )
        elif child.items and not child.leaving:
            item = child.items[0]
            if child.started_item or late or item in work.retried:
                child.items.popleft()
                work.results[item] = _failure_of(child, late, exit_code)
            else:
                work.retried.add(item)
        work.pending.extendleft(reversed(child.items))

    def _remove(self, child: _Child) -> int:
        self._children.remove(child)
        return child.remove()


class _Work:
    """The items of one verify() call.

    Attributes:
        results: by position in `items`.
        pending: positions that wait for a child.
        inline: positions whose verifiers run in this process.
        retried: positions whose child died before it started on them, once.
        workers: children that may score them at the same time.
    """

    def __init__(
        self, items: Sequence[tuple[str, Problem]], specs: Sequence[VerifierSpec], workers: int
    ) -> None:
        self.items = items
        self.specs = specs
        self.workers = workers
        self.results: dict[int, Score | Failure] = {}
        self.retried: set[int] = set()
        self.inline = [position for position, spec in enumerate(specs) if spec.inline]
        self.pending = deque(position for position, spec in enumerate(specs) if not spec.inline)

    def chunk(self, positions: Sequence[int]) -> dict[str, Any]:
        """Return the message for these items; a problem that several of them share is sent once."""
        problems: list[Problem] = []
        indices: dict[int, int] = {}
        items = []
        for position in positions:
            response, problem = self.items[position]
            spec = self.specs[position]
            if id(problem) not in indices:
                indices[id(problem)] = len(problems)
                problems.append(problem)
            items.append([position, spec.path, indices[id(problem)], response, spec.time_limit_s])
        return {"problems": [sent_fields(problem) for problem in problems], "items": items}


def _wait_for_messages(children: Sequence[_Child]) -> list[_Child]:
    """Wait until a child can be read or a deadline passes; return the children to read from.

    Sends what is in the outboxes meanwhile.
    """
    with selectors.DefaultSelector() as selector:
        for child in children:
            events = selectors.EVENT_READ
            if child.outbox:
                events |= selectors.EVENT_WRITE
            selector.register(child.socket, events, child)
        first_deadline = min(child.deadline for child in children)
        readable = []
        for key, events in selector.select(max(0.0, first_deadline - time.monotonic())):
            if events & selectors.EVENT_WRITE:
                key.data.flush()
            if events & selectors.EVENT_READ:
                readable.append(key.data)
        return readable


def _failure_of(child: _Child, late: bool, exit_code: int) -> Failure:
    if late or exit_code == -signal.SIGALRM:
        if child.importing:
            return Failure("timeout", f"import {child.importing} took over {child.limit_s:g} s")
        return Failure("timeout", f"no score within {child.limit_s:g} s")
    return Failure("crash", f"the verifier's process ended: {_describe_exit(exit_code)}")


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    is_known_signal = -code in set(signal.Signals)
    return signal.Signals(-code).name if is_known_signal else f"signal {-code}"


def _stop_children(children: list[_Child], owner_pid: int) -> None:
    """Kill all children; does nothing in a fork of the process that started them."""
    while children and os.getpid() == owner_pid:
        children.pop().remove()
