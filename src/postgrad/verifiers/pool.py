"""Verifiers in killable child processes: every response gets a Score or a typed Failure, in order, whatever a verifier does.

A child that overruns the time limit is killed, a child that dies is replaced; only the response it was judging fails, the rest of
its chunk is judged again elsewhere. Children are fresh interpreters, never forks of this process and its threads.
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

from postgrad.errors import RunError
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.child import encode
from postgrad.verifiers.verifier import Spec, find_verifier, load, run_verifier

START_LIMIT_S = 60.0  # for a child to start and to import a verifier
CLOSE_LIMIT_S = 5.0
MAX_CHUNK = 32  # responses sent at once
MEMORY_BYTES = 2 << 30  # address space a verifier may take beyond what its imports took


class _Child:
    """One child process, the items it holds (the first is being judged) and the time by which it must say something."""

    def __init__(self, timeout_s: float) -> None:
        self.socket, theirs = socket.socketpair()
        paths = os.pathsep.join(path or str(os.curdir) for path in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "postgrad.verifiers.child"]
                + [str(value) for value in (theirs.fileno(), os.getpid(), timeout_s, MEMORY_BYTES)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a verifier prints must not get lost, nor mix with our output
                start_new_session=True,  # Ctrl-C is ours alone, and killing the group takes grandchildren along
                env=os.environ
                | {"PYTHONPATH": paths, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            )
        self.socket.setblocking(False)
        self.outbox, self.inbox = bytearray(), b""
        self.items: deque[int] = deque()
        self.ready = self.begun = self.leaving = self.closed = False
        self.expect(START_LIMIT_S)

    def expect(self, limit_s: float) -> None:
        """It must send its next message within so many seconds from now."""
        self.limit_s, self.deadline = limit_s, time.monotonic() + limit_s

    def send(self, chunk: dict[str, Any], items: Sequence[int]) -> None:
        self.items.extend(items)
        self.expect(START_LIMIT_S)
        self.outbox += encode(chunk)
        self.flush()

    def flush(self) -> None:
        try:
            while self.outbox:
                del self.outbox[: self.socket.send(self.outbox[: 1 << 20])]
        except BlockingIOError:
            pass
        except OSError:  # it is dead; receive() will see the end of its messages
            self.outbox.clear()

    def receive(self) -> list[list[Any]]:
        """All complete messages there are; sets `closed` at their end."""
        try:
            while data := self.socket.recv(1 << 16):
                self.inbox += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self.inbox = self.inbox.split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        """End the process and whatever it started. Its own exit code stays if it was dead already."""
        if self.process.returncode is not None:  # collected: its number may be another's by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def remove(self) -> int:
        """Kill, close and collect; returns the exit code."""
        self.kill()
        self.socket.close()
        try:
            return self.process.wait(CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel: nothing that waiting would change
            return -signal.SIGKILL


class VerifierPool:
    """Judges responses with `workers` child processes; each response has `timeout_s` seconds from when a child starts on it,
    or more where its verifier has limits of its own (code).

    Children start when they are first needed. Use it as a context manager, or call close(). Calls from several threads take turns.
    """

    def __init__(self, workers: int = 2, timeout_s: float = 5.0) -> None:
        self.workers, self.timeout_s = workers, timeout_s
        self._children: list[_Child] = []
        self._specs: dict[str, Spec] = {}
        self._turn = threading.Lock()
        self._failed_starts = 0
        self._closed = False
        self._finalizer = weakref.finalize(self, _stop, self._children, os.getpid())

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the children and wait for them, a few seconds at the most. The pool cannot be used afterwards."""
        self._closed = True
        for child in list(self._children):
            child.kill()  # a verify() in another thread sees that and gives up its turn
        if self._turn.acquire(timeout=CLOSE_LIMIT_S):
            self._turn.release()
        self._finalizer()

    def verify(
        self, items: Sequence[tuple[str, Problem]], verifier_names: Sequence[str]
    ) -> list[Score | Failure]:
        """A Score or a Failure for each (response, problem), in order, by the verifier of the same position.

        Failures are of kind timeout, crash (also: out of memory), error (it raised) and invalid (it returned no finite number).

        Raises:
            ConfigError: a verifier does not exist.
            RunError: child processes do not start.
        """
        for name in set(verifier_names) - set(self._specs):
            self._specs[name] = find_verifier(name)
        specs = [self._specs[name] for name in verifier_names]
        work = _Work(items, specs)
        for position in work.inline:
            response, problem = items[position]
            work.results[position] = run_verifier(load(specs[position].path), response, problem)
        if work.waiting:
            with self._turn:
                self._run(work)
        return [work.results[position] for position in range(len(items))]

    def _run(self, work: "_Work") -> None:
        try:
            while work.waiting or any(child.items for child in self._children):
                self._hand_out(work)
                busy = [child for child in self._children if child.items]
                for child in _wait(busy):
                    for message in child.receive():
                        self._note(child, message, work)
                now = time.monotonic()
                for child in busy:
                    if child.closed or child.leaving or (child.items and now >= child.deadline):
                        self._replace(child, work)
        finally:
            for child in [child for child in self._children if child.items]:
                self._remove(child)

    def _hand_out(self, work: "_Work") -> None:
        """Give every idle child a chunk; start children while there is more work than children."""
        if self._closed:
            raise RunError("the verifier pool is closed")
        for child in [
            child
            for child in self._children
            if not child.items and child.process.poll() is not None
        ]:
            self._remove(child)
        while len(self._children) < self.workers and len(work.waiting) > sum(
            not child.items for child in self._children
        ):
            self._children.append(_Child(self.timeout_s))
        for child in self._children:
            if work.waiting and not child.items:
                # Chunks shrink towards the end, so that the children finish together.
                size = min(MAX_CHUNK, -(-len(work.waiting) // (4 * self.workers)))
                chosen = [work.waiting.popleft() for _ in range(size)]
                child.send(work.chunk(chosen), chosen)

    def _note(self, child: _Child, message: list[Any], work: "_Work") -> None:
        match message:
            case ["ready"]:
                child.ready, self._failed_starts = True, 0
            case ["start", position]:
                child.begun = True
                child.expect(max(self.timeout_s, work.specs[position].seconds))
            case ["done", position, value, parts]:
                work.results[position] = Score(value, parts)
            case ["failed", position, kind, reason]:
                work.results[position] = Failure(kind, reason)
            case _:  # bye
                child.leaving = True
        if message[0] in ("done", "failed"):
            child.items.popleft()
            child.begun = False
            child.expect(START_LIMIT_S)  # the next verifier may have to be imported

    def _replace(self, child: _Child, work: "_Work") -> None:
        """Take a dead or stuck child out. The item it was at fails, unless it left on purpose; the others wait again."""
        overran = not child.closed and not child.leaving
        code = self._remove(child)
        if not child.ready:
            self._failed_starts += 1
            if self._failed_starts >= 3:
                raise RunError(
                    f"verifier processes do not start ({_ended(code)}); what they printed is above"
                )
        elif child.items and not (
            child.leaving or child.begun or overran or child.items[0] in work.retried
        ):
            work.retried.add(
                child.items[0]
            )  # it died before it looked at the item: once, that is not the item's fault
        elif child.items and not child.leaving:
            late = overran or code == -signal.SIGALRM
            reason = (
                f"no verdict within {child.limit_s:g} s"
                if late
                else f"the verifier's process ended: {_ended(code)}"
            )
            work.results[child.items.popleft()] = Failure("timeout" if late else "crash", reason)
        work.waiting.extendleft(reversed(child.items))

    def _remove(self, child: _Child) -> int:
        self._children.remove(child)
        return child.remove()


class _Work:
    """The items of one verify() call: which wait, and what came out."""

    def __init__(self, items: Sequence[tuple[str, Problem]], specs: Sequence[Spec]) -> None:
        self.items, self.specs = items, specs
        self.results: dict[int, Score | Failure] = {}
        self.retried: set[int] = set()
        self.inline = [position for position, spec in enumerate(specs) if spec.inline]
        self.waiting = deque(position for position, spec in enumerate(specs) if not spec.inline)

    def chunk(self, positions: Sequence[int]) -> dict[str, Any]:
        """The message for these items; a problem that several of them share travels once."""
        problems: list[Problem] = []
        indices: dict[int, int] = {}
        items = []
        for position in positions:
            response, problem = self.items[position]
            if id(problem) not in indices:
                indices[id(problem)] = len(problems)
                problems.append(problem)
            items.append(
                [
                    position,
                    self.specs[position].path,
                    indices[id(problem)],
                    response,
                    self.specs[position].seconds,
                ]
            )
        return {"problems": [vars(problem) for problem in problems], "items": items}


def _wait(children: Sequence[_Child]) -> list[_Child]:
    """The children with something to read, once there is one or a deadline has come; sends what is still to be sent."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.outbox else 0)
            selector.register(child.socket, events, child)
        limit = max(0.0, min(child.deadline for child in children) - time.monotonic())
        readable = []
        for key, events in selector.select(limit):
            if events & selectors.EVENT_WRITE:
                key.data.flush()
            if events & selectors.EVENT_READ:
                readable.append(key.data)
        return readable


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def _stop(children: list[_Child], owner: int) -> None:
    """Kill all children; does nothing in a fork of the process that started them."""
    while children and os.getpid() == owner:
        children.pop().remove()
