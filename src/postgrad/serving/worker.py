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
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.live import LiveLoop, open_live_loop
from postgrad.rollout.native.sampling import TopTokens
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


class _Task(NamedTuple):
    """A function to run in the worker's thread, and the future that gets its result."""

    function: Callable[[], Any]
    future: "Future[Any]"

    def refuse(self, error: HttpError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class DecodeWorker:
    """Steps a decode loop of the native engine in its own thread.

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
        self._decode_loop: LiveLoop | None = None
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
                    self._receive(self._open_loop())
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
            self._close_loop()
            with self._changed:
                self._changed.wait_for(self._has_work)
        return not self._ended

    def _receive(self, decode_loop: LiveLoop) -> None:
        """Take new and cancelled requests."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
            submitted, self._submitted = self._submitted, []
            must_wait = bool(self._tasks) and not self.stopping()
        decode_loop.drop({job for pending in cancelled for job in pending.jobs})
        for pending in cancelled:
            self._count_ended(pending, pending.rows_left)
        submitted = [pending for pending in submitted if pending.rows_left]
        if must_wait:  # until the tasks are done
            submitted = self._take_waiting(decode_loop) + submitted
            with self._changed:
                self._submitted = submitted + self._submitted
            return
        for pending in submitted:
            for job in pending.jobs:
                decode_loop.add(job)

    def _take_waiting(self, decode_loop: LiveLoop) -> list[PendingRequest]:
        """Remove the requests that have not begun from the decode loop; returns them in order."""
        waiting = _requests_of(decode_loop.waiting_jobs)
        with self._changed:
            requests = list(self._requests)
        taken: list[PendingRequest] = []
        for pending in requests:
            if pending in waiting and not pending.has_begun:
                taken.append(pending)
                decode_loop.drop(pending.jobs)
                for job in pending.jobs:
                    job.forget_prompt()
        return taken

    def _open_loop(self) -> LiveLoop:
        if self._decode_loop is None:
            with self._device_lock:
                self._decode_loop = open_live_loop(
                    self.engine, self.capacity, self.longest, self.cache_bytes, self._report
                )
        return self._decode_loop

    def _close_loop(self) -> None:
        """Close the loop; an error of the device is printed, and the loop is forgotten."""
        decode_loop, self._decode_loop = self._decode_loop, None
        if decode_loop is not None:
            try:
                with self._device_lock:
                    decode_loop.close()
            except Exception:
                traceback.print_exc(file=sys.stderr)

    def _has_work(self) -> bool:
        is_busy = self._decode_loop is not None and self._decode_loop.busy
        has_input = bool(self._submitted or self._cancelled or self._tasks)
        return self._ended or is_busy or has_input

    def _advance(self) -> None:
        """Do one round of decoding, or a task when no row is decoding."""
        decode_loop = self._open_loop()
        if self.stopping():
            self._refuse_waiting(decode_loop)
        if decode_loop.busy:
            with self._device_lock:
                decode_loop.step()
            self._fail_broken(decode_loop)
        elif self._tasks:
            self._run_task()

    def _refuse_waiting(self, decode_loop: LiveLoop) -> None:
        """Refuse the requests that have not begun, because the server is shutting down.

        A row that has begun may wait, too: it had to give up its pages.
        """
        for pending in _requests_of(decode_loop.waiting_jobs):
            if not pending.has_begun:
                self._fail(decode_loop, pending, HttpError(503, "the server is shutting down"))

    def _fail_broken(self, decode_loop: LiveLoop) -> None:
        """Fail the requests whose tokens were sampled from logits that are not numbers."""
        broken, self._broken = self._broken, set()
        for pending in broken:
            reason = "the model's log-probs are not numbers; its weights are broken"
            self._fail(decode_loop, pending, HttpError(500, reason))

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
        self._close_loop()  # it may hold values computed from the old weights
        if not is_wanted:
            return
        if error is None:
            task.future.set_result(result)
        else:
            task.future.set_exception(error)

    def _report(self, row: Sequence, num_new: int, finish: str) -> None:
        """Called by the decode loop for the new tokens of a row."""
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

    def _fail(self, decode_loop: LiveLoop, pending: PendingRequest, error: HttpError) -> None:
        """Drop the rows of a request and send it an error."""
        jobs: set[Job] = set(pending.jobs)
        decode_loop.drop(jobs)
        self._count_ended(pending, pending.rows_left)
        self._unsent.append((pending, error))

    def _fail_all(self, error: HttpError) -> None:
        """Send an error to all requests of the decode loop; without one, to all that waits."""
        decode_loop = self._decode_loop
        if decode_loop is None:
            with self._changed:
                cancelled, self._cancelled = set(self._cancelled), []
                failed, self._submitted = set(self._submitted) - cancelled, []
                tasks, self._tasks = self._tasks, []
            for pending in cancelled:
                self._count_ended(pending, pending.rows_left)
            for task in tasks:
                task.refuse(error)
        else:
            failed = _requests_of(decode_loop.waiting_jobs | decode_loop.decoding_jobs)
            self._close_loop()
        for pending in failed:
            self._count_ended(pending, pending.rows_left)
            self._unsent.append((pending, error))

    def _send_updates(self) -> None:
        """Pass all updates of a step to the event loop in one call."""
        if self._unsent:
            updates, self._unsent = self._unsent, []
            with contextlib.suppress(RuntimeError):  # the loop has ended, so nothing waits
                updates[0][0].loop.call_soon_threadsafe(_put_updates, updates)


def _requests_of(jobs: set[Job]) -> set[PendingRequest]:
    return {job.owner[0] for job in jobs}


def _put_updates(updates: list[tuple[PendingRequest, RowUpdate | HttpError]]) -> None:
    for pending, update in updates:
        pending.updates.put_nowait(update)
