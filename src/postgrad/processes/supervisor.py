"""The child processes of one program: they start when needed, and are replaced when they die.

`Supervisor.run` gives items to them. An item that exceeds its deadline or kills its child fails
alone; the other items of that child go to another one. Messages are JSON:

- to a child: whatever `pack` returns for some items.
- from a child, per item: ["start", item], then ["done", item, *result]. ["pause", item, why] stops
  the item's clock until its next "start". ["bye"] before the child exits on purpose; the items that
  it still has are not to blame.
"""

import contextlib
import json
import queue
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from postgrad.errors import RunError
from postgrad.processes.channel import to_json
from postgrad.processes.child import CLOSE_LIMIT_S, START_LIMIT_S, Child

MAX_CHUNK = 32  # items sent to a child at once
MAX_FAILED_STARTS = 3  # in a row

AnyChild = TypeVar("AnyChild", bound=Child)


@dataclass(frozen=True)
class Ended:
    """How the child process ended that had started on an item.

    Attributes:
        late: it exceeded the item's limit of `limit_s` seconds.
        how: its exit code or signal, in words.
        paused_for: why the item's clock was stopped at that moment; "" if it was not.
    """

    late: bool
    how: str
    limit_s: float
    paused_for: str = ""


class Supervisor:
    """The child processes of one program. `label` names them in messages.

    Close it, or let it be garbage-collected: both kill the children.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[object],
        label: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.module = module
        self.arguments = arguments
        self.label = label
        self.environment = environment
        self.children: list[Any] = []
        self.closed = False
        self._num_failed_starts = 0
        self._how_it_failed = ""
        self._lock = threading.Lock()
        # Readers of children put (child, message) here, and (child, None) at its end. They know the
        # queue alone, so that an unused supervisor is garbage-collected.
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._finalizer = weakref.finalize(self, _close_all, self.children)

    def start(
        self,
        kind: type[AnyChild],
        on_message: Callable[[Any, bytes], None],
        on_exit: Callable[[Any], None],
    ) -> AnyChild:
        """Start one more child. Raises RunError if closed, or if the last few did not start."""
        if self.closed:
            raise RunError(f"the pool of {self.label} processes is closed")
        if self.children and self.children[-1].ready:
            self._num_failed_starts = 0
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            self._num_failed_starts = 0
            raise RunError(
                f"{self.label} processes do not start ({self._how_it_failed}); "
                "see their output above"
            )
        child = kind(self.module, self.arguments, on_message, on_exit, self.environment)
        self.children.append(child)
        return child

    def remove(self, child: Child) -> str:
        """Kill a child and forget it; returns how it ended."""
        with contextlib.suppress(ValueError):  # close() may have been faster
            self.children.remove(child)
        how = child.close()
        if not child.ready:
            self._num_failed_starts += 1
            self._how_it_failed = how
        return how

    def close(self) -> None:
        """Kill the children and wait for them, at most a few seconds. Ends the use."""
        self.closed = True
        for child in list(self.children):
            child.kill()  # run() in another thread notices and releases the lock
        if self._lock.acquire(timeout=CLOSE_LIMIT_S):
            self._lock.release()
        self._finalizer()

    def run(
        self,
        num_items: int,
        workers: int,
        pack: Callable[[Sequence[int]], Any],
        limit_s_of: Callable[[int], float],
        on_done: Callable[[int], None] = lambda num_done: None,
    ) -> list[Any]:
        """Return per item what its child answered, as a list, or how the child ended (Ended).

        Calls from several threads take turns.

        Args:
            num_items: items are 0 .. num_items - 1.
            workers: children that work on them at the same time.
            pack: makes the message for some items.
            limit_s_of: seconds that an item may take from its start.
            on_done: called with the number of finished items.

        Raises:
            RunError: children do not start, or the supervisor is closed.
        """
        work = _Work(deque(range(num_items)), workers, pack, limit_s_of)
        with self._lock:
            self._num_failed_starts = 0
            try:
                while work.pending or any(child.items for child in self.children):
                    self._assign(work)
                    busy = [child for child in self.children if child.items]
                    for child, message in self._next_events(min(one.deadline for one in busy)):
                        if child not in self.children:
                            continue  # it was removed meanwhile
                        if message is not None:
                            self._handle(child, json.loads(message), work)
                        if message is None or child.leaving:
                            self._replace(child, work)
                    now = time.monotonic()
                    for child in [one for one in self.children if one.items]:
                        if now >= child.deadline:
                            self._replace(child, work, late=True)
                    on_done(len(work.results))
            finally:
                for child in [one for one in self.children if one.items]:
                    self.remove(child)
        return [work.results[item] for item in range(num_items)]

    def _next_events(self, deadline: float) -> "Iterator[tuple[_Worker, bytes | None]]":
        """Wait for an event until the deadline; yield those that are there."""
        with contextlib.suppress(queue.Empty):
            yield self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            while True:
                yield self._events.get_nowait()

    def _assign(self, work: "_Work") -> None:
        """Send every idle child items; start children while there is more work than idle ones."""
        put = self._events.put
        num_idle = sum(not child.items for child in self.children)
        while len(self.children) < work.workers and len(work.pending) > num_idle:
            self.start(_Worker, lambda *event: put(event), lambda child: put((child, None)))
            num_idle += 1
        for child in self.children[: work.workers]:
            if work.pending and not child.items:
                # Chunks get smaller towards the end, so that the children finish together.
                size = min(MAX_CHUNK, -(-len(work.pending) // (4 * work.workers)))
                child.items.extend(work.pending.popleft() for _ in range(size))
                child.set_deadline(START_LIMIT_S)
                child.send(to_json(work.pack(child.items)))

    def _handle(self, child: "_Worker", message: list[Any], work: "_Work") -> None:
        match message:
            case ["start", item]:
                child.started_item = True
                child.paused_for = ""
                child.set_deadline(work.limit_s_of(item))
            case ["pause", _, why]:
                child.paused_for = why
                child.set_deadline(START_LIMIT_S)
            case ["done", item, *result]:
                work.results[item] = result
                child.items.popleft()
                child.started_item = False
                child.set_deadline(START_LIMIT_S)  # the next item may have to import something
            case _:  # bye
                child.leaving = True

    def _replace(self, child: "_Worker", work: "_Work", late: bool = False) -> None:
        """Remove a dead or late child, and put its items back to the pending ones.

        The item that it had started fails, unless the child left on purpose. If it died before it
        started on the item, the item is tried once more.
        """
        how = self.remove(child)
        if child.ready and child.items and not child.leaving:
            item = child.items[0]
            if child.started_item or late or item in work.retried:
                child.items.popleft()
                late = late or how == signal.SIGALRM.name  # the child's own alarm
                work.results[item] = Ended(late, how, child.limit_s, child.paused_for)
            else:
                work.retried.add(item)
        work.pending.extendleft(reversed(child.items))


class _Worker(Child):
    """A child and its items; it works on the first one.

    Attributes:
        started_item: it has begun with items[0].
        paused_for: why the clock of items[0] is stopped.
        leaving: it has said that it exits on purpose.
    """

    def __init__(self, *arguments: Any) -> None:
        self.items: deque[int] = deque()
        self.started_item = False
        self.paused_for = ""
        self.leaving = False
        super().__init__(*arguments)


@dataclass
class _Work:
    """The items of one call of `run`; `retried` are those whose child died before their start."""

    pending: deque[int]
    workers: int
    pack: Callable[[Sequence[int]], Any]
    limit_s_of: Callable[[int], float]
    results: dict[int, Any] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)


def _close_all(children: list[Child]) -> None:
    """Kill all children; in a fork of the process that started them nothing happens."""
    for child in list(children):
        child.close()
    children.clear()
