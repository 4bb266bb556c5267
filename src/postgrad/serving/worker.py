"""One thread a model decodes for everybody: requests that arrive join the rows that are decoding, after their next token."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from postgrad.rollout.native.engine import Job, NativeEngine, Row
from postgrad.rollout.native.live import LiveDecodeLoop, LiveJob, TopTokens
from postgrad.web import HttpError, settle

IDLE_S = 5.0  # without work the cache's memory is given back


@dataclass(frozen=True)
class Event:
    """What has become of one row since the last event; `finish` is stop or length when it has ended."""

    prompt: int
    index: int
    tokens: list[int]
    logprobs: list[float]
    tops: list[TopTokens]
    finish: str = ""


@dataclass(eq=False)
class Ticket:
    """One request's rows. Its events come through `events`, a HttpError when it cannot be served any more."""

    jobs: list[LiveJob]
    by_token: bool  # whether every token is told, or only ended rows
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: "asyncio.Queue[Event | HttpError]" = field(default_factory=asyncio.Queue)
    rows_left: int = 0

    def __post_init__(self) -> None:
        self.rows_left = sum(len(job.request.seeds) for job in self.jobs)
        for number, job in enumerate(self.jobs):
            job.owner = self, number


class Worker:
    """Steps a run of the native engine in a thread of its own.

    Args:
        engine: who samples; nobody else may use it meanwhile.
        capacity: rows decoded at once.
        longest: tokens of prompt and response together.
        queue: rows that may wait beside those that decode.
        stopping: true once the server goes down: rows that decode go on, those that wait are sent away.
    """

    def __init__(
        self,
        engine: NativeEngine,
        capacity: int,
        longest: int,
        queue: int,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engine, self.capacity, self.longest, self.queue, self.stopping = (
            engine,
            capacity,
            longest,
            queue,
            stopping,
        )
        self.rows = 0  # of all tickets that have not ended
        self._changed = threading.Condition()
        self._inbox: list[Ticket] = []
        self._gone: list[Ticket] = []
        self._orders: list[
            tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]
        ] = []
        self._ended = False
        self._news: list[tuple[Ticket, Event | HttpError]] = []
        self._run: LiveDecodeLoop | None = None
        self._thread = threading.Thread(target=self._work, name="decode", daemon=True)
        self._thread.start()

    # ---- from the event loop

    def submit(self, ticket: Ticket) -> None:
        """Let a request wait for its turn. Raises HttpError: too large ever, no place now, or going down."""
        most = self.capacity + self.queue
        if ticket.rows_left > most:
            raise HttpError(
                400,
                f"the request asks for {ticket.rows_left} completions, and the server holds {most}; ask for fewer",
            )
        with self._changed:
            if self._ended or self.stopping():
                raise HttpError(503, "the server is shutting down")
            if self.rows + ticket.rows_left > most:
                raise HttpError(429, f"all {most} places are taken; try again later")
            self.rows += ticket.rows_left
            self._inbox.append(ticket)
            self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for these rows any more; nothing happens when they have ended."""
        with self._changed:
            if ticket.rows_left:
                self._gone.append(ticket)
                self._changed.notify()

    async def order(self, work: Callable[[], Any]) -> Any:
        """Do this in the worker's thread when no row is decoding; requests that come meanwhile wait."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._changed:
            if self._ended or self.stopping():
                raise HttpError(503, "the server is shutting down")
            self._orders.append((work, loop, future))
            self._changed.notify()
        return await future

    def end(self, wait_s: float = 10.0) -> bool:
        """Stop the thread after its present step; whether it has."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # ---- in the thread

    def _work(self) -> None:
        self.engine.model.eval()
        with torch.no_grad():
            while self._listen():
                try:
                    self._advance()
                except Exception as error:  # what was running is lost, the server is not
                    traceback.print_exc(file=sys.stderr)
                    self._fail_all(
                        HttpError(500, f"the engine failed: {type(error).__name__}: {error}")
                    )
                self._deliver()

    def _listen(self) -> bool:
        """Take what came from the event loop; waits while there is nothing to do. False at the end."""
        with self._changed:
            while not (
                self._ended
                or self._inbox
                or self._gone
                or self._orders
                or (self._run is not None and self._run.busy)
            ):
                if not self._changed.wait(IDLE_S):
                    self._run = None
            gone, self._gone = self._gone, []
            arrived, self._inbox = self._inbox, []
            orders = bool(self._orders)
        if self._run is None:
            self._run = LiveDecodeLoop(self.engine, self.capacity, self.longest, self._tell)
        self._run.drop({job for ticket in gone for job in ticket.jobs})
        for ticket in gone:
            self._leave(ticket, ticket.rows_left)
        arrived = [ticket for ticket in arrived if ticket.rows_left]
        if orders and arrived:
            with self._changed:
                self._inbox = arrived + self._inbox
        elif not orders:
            for ticket in arrived:
                for job in ticket.jobs:
                    self._run.add(job)
        return not self._ended

    def _advance(self) -> None:
        run = self._run
        assert run is not None
        if self.stopping():
            self._send_away(run)
        if run.active:
            run.step()
        elif run.busy:
            run.fill()
        elif self._orders:
            self._obey()

    def _send_away(self, run: LiveDecodeLoop) -> None:
        """Going down: whoever has not begun to decode is told so."""
        begun = {row.job for row in run.active}
        waiting = {
            job.owner[0]
            for job in (*run.to_prefill, *(entry.job for entry in run.prefilled))
            if isinstance(job, LiveJob)
        }
        for ticket in waiting:
            if not begun.intersection(ticket.jobs):
                self._lose(run, ticket, HttpError(503, "the server is shutting down"))

    def _obey(self) -> None:
        with self._changed:
            work, loop, future = self._orders.pop(0)
        try:
            result, error = work(), None
        except Exception as raised:
            result, error = None, raised
        self._run = None  # it may have kept something of the old weights
        _call(loop, settle, future, result, error)

    def _tell(self, row: Row, finish: str) -> None:
        job = row.job
        assert isinstance(job, LiveJob)
        ticket, number = job.owner
        tops = job.top_tokens.get(row.index, [])
        if ticket.by_token:
            event = Event(number, row.index, row.tokens[-1:], row.logprobs[-1:], tops[-1:], finish)
        elif finish:
            event = Event(number, row.index, row.tokens, row.logprobs, tops, finish)
        else:
            return
        self._news.append((ticket, event))
        if finish:
            self._leave(ticket, 1)

    def _leave(self, ticket: Ticket, rows: int) -> None:
        with self._changed:
            self.rows -= rows
            ticket.rows_left -= rows

    def _lose(self, run: LiveDecodeLoop, ticket: Ticket, error: HttpError) -> None:
        jobs: set[Job] = set(ticket.jobs)
        run.drop(jobs)
        self._leave(ticket, ticket.rows_left)
        self._news.append((ticket, error))

    def _fail_all(self, error: HttpError) -> None:
        run, self._run = self._run, None
        if run is not None:
            jobs = [
                *run.to_prefill,
                *(entry.job for entry in run.prefilled),
                *(row.job for row in run.active),
            ]
            for ticket in {job.owner[0] for job in jobs if isinstance(job, LiveJob)}:
                self._lose(run, ticket, error)

    def _deliver(self) -> None:
        """Hand over what the step brought, in one call."""
        if self._news:
            news, self._news = self._news, []
            _call(news[0][0].loop, _put, news)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # the loop has ended, and with it whoever waited
        return


def _put(news: list[tuple[Ticket, Event | HttpError]]) -> None:
    for ticket, event in news:
        ticket.events.put_nowait(event)
