"""One thread per model decodes for all requests together.

A new request joins the rows that are decoding after their next token, or on a GPU with captured
graphs, after their next few tokens.
"""

import asyncio
import contextlib
import math
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from postgrad.net.bodies import HttpError
from postgrad.rollout.engine import make_stops
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.sampling import TopTokens
from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.sequence import Job, Sequence
from postgrad.serving.memory import explain_memory_error

IDLE_S = 5.0  # time without work after which the cache's memory is freed
# While one thread captures a CUDA graph, no other thread may allocate or wait.
DEVICE_LOCK = threading.Lock()


@dataclass(frozen=True)
class RowUpdate:
    """The new tokens of one row; `finish` is stop or length when the row has ended, else ""."""

    prompt: int
    index: int
    tokens: list[int]
    logprobs: list[float]
    top_tokens: list[TopTokens]
    finish: str = ""


@dataclass(eq=False)
class PendingRequest:
    """The jobs of one request. `updates` gets an HttpError when the request cannot be served.

    Made in the event loop of the request.
    """

    jobs: list[Job]
    per_token: bool  # updates while a row decodes, or only one when it has ended
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    updates: "asyncio.Queue[RowUpdate | HttpError]" = field(default_factory=asyncio.Queue)
    rows_left: int = 0
    has_begun: bool = False  # a token of it was sampled

    def __post_init__(self) -> None:
        self.rows_left = sum(len(job.request.seeds) for job in self.jobs)
        for number, job in enumerate(self.jobs):
            job.owner = self, number
            job.is_watched = True


class _Task(NamedTuple):
    """A function to run in the worker's thread, and the future that gets its result."""

    function: Callable[[], Any]
    future: "Future[Any]"

    def refuse(self, error: HttpError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class DecodeWorker:
    """Steps a scheduler of the native engine in its own thread.

    Args:
        engine: the engine; nothing else may use it at the same time.
        capacity: rows that decode at the same time.
        longest: tokens of prompt and response together.
        queue: rows that may wait.
        cache_bytes: memory for keys and values in pages.
        stopping: true once the server shuts down: requests that have begun continue, the others
            are refused.
    """

    def __init__(
        self,
        engine: NativeEngine,
        capacity: int,
        longest: int,
        queue: int,
        cache_bytes: int,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engine = engine
        self.capacity = capacity
        self.longest = longest
        self.queue = queue
        self.cache_bytes = cache_bytes
        self.stopping = stopping
        self.rows = 0  # of all requests that have not ended
        self._changed = threading.Condition()  # guards the fields that both sides change
        self._requests: dict[PendingRequest, None] = {}  # that have rows, in the order of arrival
        self._submitted: list[PendingRequest] = []
        self._cancelled: list[PendingRequest] = []
        self._tasks: list[_Task] = []
        self._ended = False
        self._broken: set[PendingRequest] = set()  # since the last step
        self._unsent: list[tuple[PendingRequest, RowUpdate | HttpError]] = []
        self._scheduler: Scheduler | None = None
        self._device_lock = threading.Lock() if engine.device.type == "cpu" else DEVICE_LOCK
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    # ---- called from the event loop

    def submit(self, pending: PendingRequest) -> None:
        """Queue a request. Raises HttpError: too large, no free place, or shutting down."""
        max_rows = self.capacity + self.queue
        if pending.rows_left > max_rows:
            raise HttpError(
                400,
                f"the request asks for {pending.rows_left} completions, but the server holds "
                f"{max_rows}; ask for fewer",
            )
        with self._changed:
            if self._ended or self.stopping():
                raise HttpError(503, "the server is shutting down")
            if self.rows + pending.rows_left > max_rows:
                raise HttpError(429, f"all {max_rows} places are taken; try again later")
            self.rows += pending.rows_left
            self._requests[pending] = None
            self._submitted.append(pending)
            self._changed.notify()

    def cancel(self, pending: PendingRequest) -> None:
        """Drop the rows of a request that have not ended."""
        with self._changed:
            if pending.rows_left:
                self._cancelled.append(pending)
                self._changed.notify()

    def end_requests(self) -> None:
        """Send 503 to all requests and tasks that have not ended. Called in their event loop.

        It does not wait for the decode step that is running.
        """
        error = HttpError(503, "the server has shut down before the response was complete")
        with self._changed:
            requests = list(self._requests)
            tasks, self._tasks = self._tasks, []
        for pending in requests:
            pending.updates.put_nowait(error)
        for task in tasks:
            task.refuse(error)

    async def run_when_idle(self, function: Callable[[], Any]) -> Any:
        """Run a function in the worker's thread when no row is decoding; returns its result.

        Requests that have not begun wait until it is done. Raises HttpError when the server is
        shutting down.
        """
        task = _Task(function, Future())
        with self._changed:
            if self._ended or self.stopping():
                raise HttpError(503, "the server is shutting down")
            self._tasks.append(task)
            self._changed.notify()
        return await asyncio.wrap_future(task.future)

    def end(self, wait_s: float = 10.0) -> bool:
        """Stop the thread after its current step; returns whether it has stopped."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # ---- in the worker's thread

    def _run(self) -> None:
        self.engine.model.eval()
        with torch.no_grad():
            while self._wait_for_work():
                try:
                    self._receive(self._open())
                    self._advance()
                except Exception as error:  # the decoding requests fail, the server continues
                    traceback.print_exc(file=sys.stderr)
                    reason = explain_memory_error(error) or f"{type(error).__name__}: {error}"
                    self._fail_all(HttpError(500, f"the engine failed: {reason}"))
                self._send_updates()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; frees memory meanwhile. False at the end."""
        with self._changed:
            is_idle = not self._changed.wait_for(self._has_work, IDLE_S)
        if is_idle:
            self._close()
            with self._changed:
                self._changed.wait_for(self._has_work)
        return not self._ended

    def _receive(self, scheduler: Scheduler) -> None:
        """Take new and cancelled requests."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
            submitted, self._submitted = self._submitted, []
            must_wait = bool(self._tasks) and not self.stopping()
        scheduler.cancel({job for pending in cancelled for job in pending.jobs})
        for pending in cancelled:
            self._count_ended(pending, pending.rows_left)
        submitted = [pending for pending in submitted if pending.rows_left]
        if must_wait:  # until the tasks are done
            submitted = self._take_waiting(scheduler) + submitted
            with self._changed:
                self._submitted = submitted + self._submitted
            return
        for pending in submitted:
            for job in pending.jobs:
                job.stops = make_stops(self.engine.tokenizer, job.sampling)
                scheduler.add(job)

    def _take_waiting(self, scheduler: Scheduler) -> list[PendingRequest]:
        """Remove the requests that have not begun from the scheduler; returns them in order."""
        waiting = _waiting_requests(scheduler)
        with self._changed:
            requests = list(self._requests)
        taken: list[PendingRequest] = []
        for pending in requests:
            if pending in waiting and not pending.has_begun:
                taken.append(pending)
                scheduler.cancel(pending.jobs)
                for job in pending.jobs:
                    job.forget_prompt()
        return taken

    def _open(self) -> Scheduler:
        if self._scheduler is None:
            with self._device_lock:
                self._scheduler = self.engine.open_server(
                    self.capacity, self.longest, self.cache_bytes
                )
        return self._scheduler

    def _close(self) -> None:
        """Free the memory of keys and values; an error of the device is printed, and no more."""
        scheduler, self._scheduler = self._scheduler, None
        try:
            if scheduler is not None:
                with self._device_lock:
                    scheduler.store.close()
        except Exception:
            traceback.print_exc(file=sys.stderr)

    def _has_work(self) -> bool:
        is_busy = self._scheduler is not None and self._scheduler.busy
        has_input = bool(self._submitted or self._cancelled or self._tasks)
        return self._ended or is_busy or has_input

    def _advance(self) -> None:
        """Do one round of decoding, or a task when no row is decoding."""
        scheduler = self._open()
        if self.stopping():
            self._refuse_waiting(scheduler)
        if scheduler.busy:
            with self._device_lock:
                ended = scheduler.step()
            for row in [*scheduler.running, *ended]:
                self._report(row)
            self._fail_broken(scheduler)
        elif self._tasks:
            self._run_task()

    def _refuse_waiting(self, scheduler: Scheduler) -> None:
        """Refuse the requests that have not begun, because the server is shutting down.

        A row that has begun may wait, too: it had to give up its pages.
        """
        for pending in _waiting_requests(scheduler):
            if not pending.has_begun:
                self._fail(scheduler, pending, HttpError(503, "the server is shutting down"))

    def _fail_broken(self, scheduler: Scheduler) -> None:
        """Fail the requests whose tokens were sampled from logits that are not numbers."""
        broken, self._broken = self._broken, set()
        for pending in broken:
            reason = "the model's log-probs are not numbers; its weights are broken"
            self._fail(scheduler, pending, HttpError(500, reason))

    def _run_task(self) -> None:
        with self._changed:
            task = self._tasks.pop(0)
        is_wanted = task.future.set_running_or_notify_cancel()  # the client may have gone
        result: Any = None
        error: Exception | None = None
        try:
            with self._device_lock:  # a graph that another model captures allows no copies
                result = task.function()
        except Exception as raised:
            error = raised
        self._close()  # it may hold values computed from the old weights
        if not is_wanted:
            return
        if error is None:
            task.future.set_result(result)
        else:
            task.future.set_exception(error)

    def _report(self, row: Sequence) -> None:
        """Send the new tokens of a row."""
        num_new = row.read()
        finish = row.finish
        pending, number = row.job.owner
        pending.has_begun = True
        if any(map(math.isnan, row.logprobs[len(row.logprobs) - num_new :])):
            self._broken.add(pending)
        if pending in self._broken:
            return
        if not pending.per_token and not finish:
            return
        first = len(row.tokens) - num_new if pending.per_token else 0
        top_tokens = row.top_tokens[first:]
        update = RowUpdate(
            number, row.index, row.tokens[first:], row.logprobs[first:], top_tokens, finish
        )
        self._unsent.append((pending, update))
        if finish:
            self._count_ended(pending, 1)

    def _count_ended(self, pending: PendingRequest, num_rows: int) -> None:
        with self._changed:
            self.rows -= num_rows
            pending.rows_left -= num_rows
            if not pending.rows_left:
                self._requests.pop(pending, None)

    def _fail(self, scheduler: Scheduler, pending: PendingRequest, error: HttpError) -> None:
        """Drop the rows of a request and send it an error."""
        scheduler.cancel(pending.jobs)
        self._count_ended(pending, pending.rows_left)
        self._unsent.append((pending, error))

    def _fail_all(self, error: HttpError) -> None:
        """Send an error to all requests of the scheduler; without one, to all that waits."""
        scheduler = self._scheduler
        if scheduler is None:
            with self._changed:
                cancelled, self._cancelled = set(self._cancelled), []
                failed, self._submitted = set(self._submitted) - cancelled, []
                tasks, self._tasks = self._tasks, []
            for pending in cancelled:
                self._count_ended(pending, pending.rows_left)
            for task in tasks:
                task.refuse(error)
        else:
            running = {row.job.owner[0] for row in scheduler.running}
            failed = _waiting_requests(scheduler) | running
            self._close()
        for pending in failed:
            self._count_ended(pending, pending.rows_left)
            self._unsent.append((pending, error))

    def _send_updates(self) -> None:
        """Pass all updates of a step to the event loop in one call."""
        if self._unsent:
            updates, self._unsent = self._unsent, []
            with contextlib.suppress(RuntimeError):  # the loop has ended, so nothing waits
                updates[0][0].loop.call_soon_threadsafe(_put_updates, updates)


def _waiting_requests(scheduler: Scheduler) -> set[PendingRequest]:
    """Return the requests with rows that do not decode yet."""
    return {row.job.owner[0] for row in [*scheduler.waiting, *scheduler.starting]}


def _put_updates(updates: list[tuple[PendingRequest, RowUpdate | HttpError]]) -> None:
    for pending, update in updates:
        pending.updates.put_nowait(update)
