"""A stream over the scheduler: conversations join, pause between turns, and continue."""

from collections.abc import Collection, Hashable, Sequence

import torch

from postgrad.rollout.engine import Request, Sampling, check_requests
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.native.store_slots import SlotStore
from postgrad.rollout.stops import make_stops
from postgrad.rollout.streams import Finished, Stream, WaveStream


class SlotStream:
    """The stream of a native engine over the stock model; see streams.Stream.

    Args:
        engine: has the model.
        sampling: the same for all rows.
        capacity: rows that decode at the same time, and rows that are saved between turns.
    """

    patience_s = 0.0

    def __init__(self, engine: NativeEngine, sampling: Sampling, capacity: int) -> None:
        self.engine = engine
        self.sampling = sampling
        self.stops = make_stops(engine.tokenizer, sampling)
        self.scheduler = Scheduler(SlotStore(engine, capacity), engine.weights_version)
        self.jobs: dict[Hashable, Job] = {}  # of rows that have not ended, by key

    def __enter__(self) -> "SlotStream":
        # In training mode a model with activation checkpointing ignores the cache.
        self.engine.model.eval()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.model.train()

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, request: Request, keys: Sequence[Hashable]) -> None:
        check_requests([request], self.sampling, self.engine.max_context, self.engine.model.config)
        job = self.scheduler.add(Job(request, self.sampling, self.stops, keys))
        self.jobs |= dict.fromkeys(keys, job)

    @torch.no_grad()
    def poll(self) -> list[Finished]:
        """Decode a few tokens; return the rows that ended."""
        if self.scheduler.version != self.engine.weights_version:
            self.scheduler.weights_changed(self.engine.weights_version)
        finished: list[Finished] = []
        for row in self.scheduler.step():
            finished.append((row.key, row.completion()))
            self.jobs.pop(row.key, None)
        return finished

    def cancel(self, keys: Collection[Hashable]) -> None:
        canceled = {self.jobs[key] for key in keys if key in self.jobs}
        self.scheduler.cancel(canceled)
        self.jobs = {key: job for key, job in self.jobs.items() if job not in canceled}
        for key in keys:
            self.forget(key)

    def forget(self, key: Hashable) -> None:
        self.scheduler.store.forget(key)

    def refresh_weights(self) -> dict[Hashable, int]:
        self.engine.weights_version += 1
        return {row.key: row.num_tokens for row in self.scheduler.running}

    def take_restarted(self) -> list[Hashable]:
        return []  # every row has its slot until it ends


class StreamingNativeEngine(NativeEngine):
    """The native engine with streams. With transformers' generate they are waves."""

    def open_stream(self, sampling: Sampling, num_rows: int) -> Stream:
        """Return a stream of at most `num_rows` rows at a time; see rollout/streams.py."""
        if self.stock_engine is not None:
            return WaveStream(self, sampling)
        if (decoder := self.free_decoder(sampling)) is not None:
            from postgrad.rollout.native.paged_stream import PagedStream

            return PagedStream(self, decoder, sampling, num_rows)
        if self.decoder is not None and sampling.filters:
            return WaveStream(self, sampling)
        return SlotStream(self, sampling, max(1, min(self.max_rows, num_rows)))
