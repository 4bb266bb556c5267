"""The scheduler as a server sees it, over slots or over pages: jobs join while others decode."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

import torch

from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.sequence import Job, Sequence
from postgrad.rollout.native.store_slots import CPU_PASS_TOKENS, SlotStore
from postgrad.rollout.stops import make_stops

if TYPE_CHECKING:
    from postgrad.rollout.native.engine import NativeEngine

# Called with a row, the number of its new tokens, and why it has ended: stop, length, or "" when
# it continues.
Report = Callable[[Sequence, int, str], None]


class LiveLoop(Protocol):
    """The scheduler of a server: jobs join and leave while others decode."""

    def add(self, job: Job) -> Job:
        """Queue a job; returns it."""
        ...

    def drop(self, jobs: Collection[Job]) -> None:
        """Remove jobs with all their rows, decoding or not."""
        ...

    def step(self) -> None:
        """Let waiting rows join, decode a few tokens, and report the new tokens of each row."""
        ...

    def warm_up(self) -> None:
        """Capture graphs, if there are any, so that no request waits for it."""
        ...

    def close(self) -> None:
        """Give the memory of keys and values back; the loop is not used any more."""
        ...

    @property
    def busy(self) -> bool:
        """Whether there are rows that have not ended."""
        ...

    @property
    def decoding_jobs(self) -> set[Job]:
        """The jobs that have decoding rows."""
        ...

    @property
    def waiting_jobs(self) -> set[Job]:
        """The jobs that have waiting rows."""
        ...


def open_live_loop(
    engine: "NativeEngine", capacity: int, longest: int, cache_bytes: int, report: Report
) -> LiveLoop:
    """Return a loop over pages if the engine has a captured decoder, else one over slots.

    Args:
        engine: has the model.
        capacity: rows that decode at the same time.
        longest: tokens of prompt and response together.
        cache_bytes: memory for keys and values; slots take what their rows need.
        report: called with the new tokens of each row.
    """
    if engine.decoder is None:
        return SlotLoop(engine, capacity, longest, report)
    from postgrad.rollout.native.paged_live import PagedLiveLoop

    return PagedLiveLoop(engine, engine.decoder, capacity, longest, cache_bytes, report)


@torch.no_grad()
def warm_up(engine: "NativeEngine", capacity: int, longest: int, cache_bytes: int) -> None:
    """Capture the decoder's graphs, if it has any, before the first request waits for them."""
    if engine.decoder is None:
        return
    loop = open_live_loop(engine, capacity, longest, cache_bytes, lambda *_: None)
    loop.warm_up()
    loop.close()


class SlotLoop:
    """The scheduler over slots with reports; see LiveLoop. A step decodes one token per row."""

    def __init__(self, engine: "NativeEngine", capacity: int, longest: int, report: Report) -> None:
        self.tokenizer = engine.tokenizer
        self.report = report
        chunk = CPU_PASS_TOKENS if engine.device.type == "cpu" else 0
        self.scheduler = Scheduler(SlotStore(engine, capacity, longest, chunk))

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @property
    def decoding_jobs(self) -> set[Job]:
        return {row.job for row in self.scheduler.running}

    @property
    def waiting_jobs(self) -> set[Job]:
        return {row.job for row in [*self.scheduler.waiting, *self.scheduler.starting]}

    def add(self, job: Job) -> Job:
        job.stops = make_stops(self.tokenizer, job.sampling)
        return self.scheduler.add(job)

    def drop(self, jobs: Collection[Job]) -> None:
        self.scheduler.cancel(jobs)

    def step(self) -> None:
        ended = self.scheduler.step()
        for row in [*self.scheduler.running, *ended]:
            num_new = row.num_tokens - row.num_read
            row.num_read = row.num_tokens
            self.report(row, num_new, row.finish)

    def warm_up(self) -> None:
        """Do nothing: there are no graphs."""

    def close(self) -> None:
        """Do nothing: the slots are freed with the loop."""
