"""A stream over the scheduler: conversations join, pause between turns, and continue."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from postgrad.rollout.engine import Request, Sampling, check_requests
from postgrad.rollout.native.scheduler import Scheduler, Store
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.native.sequence import Sequence as Row
from postgrad.rollout.stops import make_stops
from postgrad.rollout.streams import Finished

if TYPE_CHECKING:
    from postgrad.rollout.native.engine import NativeEngine
    from postgrad.rollout.native.store_pages import PageStore


class NativeStream:
    """The stream of a native engine; see streams.Stream.

    While one over pages is open, no other has the engine's pages, and calls of generate decode
    beside its rows.

    Args:
        engine: has the model.
        sampling: the same for all rows.
        store: decodes the rows.
        pages: the same store, if it has the engine's pages.
    """

    patience_s = 0.0

    def __init__(
        self,
        engine: "NativeEngine",
        sampling: Sampling,
        store: Store,
        pages: "PageStore | None" = None,
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        self.pages = pages
        self.stops = make_stops(engine.tokenizer, sampling)
        self.scheduler = Scheduler(store, engine.weights_version)
        self.jobs: dict[Hashable, Job] = {}  # of rows that have not ended, by key
        self.ended: list[Row] = []  # while `generate` was called

    def __enter__(self) -> "NativeStream":
        # In training mode a model with activation checkpointing ignores the cache.
        self.was_training = self.engine.model.training
        self.engine.model.eval()
        if self.pages is not None:
            self.engine.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.model.train(self.was_training)
        self.scheduler.store.close()
        if self.pages is not None:
            self.engine.stream = None

    @property
    def busy(self) -> bool:
        return bool(self.ended) or self.scheduler.busy

    def has_room(self, jobs: Collection[Job]) -> bool:
        """Return whether jobs can decode beside the stream's rows without larger buffers."""
        return self.pages is not None and self.pages.has_room(jobs)

    def add(self, request: Request, keys: Sequence[Hashable]) -> None:
        check_requests([request], self.sampling, self.engine.max_context, self.engine.model.config)
        job = self.scheduler.add(Job(request, self.sampling, self.stops, keys))
        self.jobs |= dict.fromkeys(keys, job)

    @torch.no_grad()
    def poll(self) -> list[Finished]:
        """Decode a few tokens; return the rows that ended, with a version of each token."""
        ended, self.ended = self.ended, []
        if self.scheduler.busy:
            ended += self.engine.step(self.scheduler)
        finished: list[Finished] = []
        for row in ended:
            finished.append((row.key, replace(row.completion(), versions=row.token_versions())))
            self.jobs.pop(row.key, None)
        return finished

    def cancel(self, keys: Collection[Hashable]) -> None:
        canceled = {self.jobs[key] for key in keys if key in self.jobs}
        self.scheduler.cancel(canceled)
        self.ended = [row for row in self.ended if row.job not in canceled]
        self.jobs = {key: job for key, job in self.jobs.items() if job not in canceled}
        for key in keys:
            self.forget(key)

    def forget(self, key: Hashable) -> None:
        self.scheduler.store.forget(key)

    def refresh_weights(self) -> int:
        self.engine.weights_version += 1
        return self.engine.weights_version
