"""The native engine: samples from the trainer's own model, by the scheduler over slots or pages."""

import sys
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from postgrad import phases
from postgrad.config.schema import RolloutConfig
from postgrad.model.device import free_memory_bytes, has_own_memory, supports_triton
from postgrad.model.load.context import context_length
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import stop_ids
from postgrad.model.passes.support import eval_mode, support_of
from postgrad.rollout.engine import (
    Completion,
    Request,
    Sampling,
    check_requests,
    copy_weights,
    make_stops,
    max_row_tokens,
)
from postgrad.rollout.native.pages import graph_rows, kv_token_bytes, largest_cache
from postgrad.rollout.native.scheduler import Scheduler, Store
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.native.sequence import Sequence as Row
from postgrad.rollout.native.store_slots import CPU_PASS_TOKENS, SlotStore
from postgrad.rollout.streams import BatchedStream, Finished, Stream

if TYPE_CHECKING:
    from postgrad.rollout.hf import HfEngine
    from postgrad.rollout.native.decoder import Decoder
    from postgrad.rollout.native.store_pages import PageStore


class NativeEngine:
    """Samples from `loaded.model`, the parameters that the trainer updates.

    A model that fails the numeric gate (gate.py) is sampled by transformers' generate instead.
    """

    shares_weights = True

    def __init__(self, loaded: Loaded, config: RolloutConfig) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.device: torch.device = next(self.model.parameters()).device
        self.max_rows = config.max_rows or 256
        self.cache_gib = config.cache_gib
        self.keeps_cache = config.stream  # while the trainer works, too
        self.stop_ids = torch.tensor(stop_ids(loaded), device=self.device)
        self.max_context = context_length(self.model.config)
        self.logit_transform = support_of(self.model).transform
        self.decoder = self._make_decoder() if supports_triton(self.device) else None
        self.stock_engine: HfEngine | None = None
        self.stream: NativeStream | None = None  # the open one that has the decoder's pages
        self.weights_version = 0  # counts how often streams got other weights
        if reason := self._decode_problem(loaded):
            print(
                f"rollouts use transformers' generate, which is slower: {reason}", file=sys.stderr
            )
            self.stock_engine = self._make_stock_engine(loaded, config)

    def _make_stock_engine(self, loaded: Loaded, config: RolloutConfig) -> "HfEngine":
        from postgrad.rollout.hf import HfEngine

        return HfEngine(loaded, config)

    def _decode_problem(self, loaded: Loaded) -> str:
        """Return why the cache of this engine cannot decode the model; "" when it can."""
        from postgrad.rollout.native.gate import decode_problem

        if support_of(self.model).passes == "rows":
            family = self.model.config.get_text_config().model_type
            return f"only the stock forward pass of {family} gives its numbers"
        return decode_problem(loaded, self)

    def _make_decoder(self) -> "Decoder | None":
        """Return the captured decoder; None, with a line on stderr, if it cannot run the model."""
        from postgrad.rollout.native.decoder import Decoder, unsupported_reason

        if reason := unsupported_reason(self.model):
            print(
                f"rollouts do not use CUDA graphs and are several times slower: {reason}",
                file=sys.stderr,
            )
            return None
        return Decoder(self.model, self.stop_ids)

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Load weights from a trainer in another process."""
        copy_weights(self.model, weights)
        self.weights_version += 1

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        num_rows = sum(len(request.seeds) for request in requests)
        if num_rows == 0:
            return [[] for _ in requests]
        if self.stock_engine is not None:
            return self.stock_engine.generate(requests, sampling)
        check_requests(requests, sampling, self.max_context, self.model.config)
        stops = make_stops(self.tokenizer, sampling)
        jobs = [Job(request, sampling, stops) for request in requests]
        scheduler = self._scheduler_for(jobs, sampling)
        for job in reversed(jobs):
            scheduler.add(job, first=True)
        # In training mode a model with activation checkpointing ignores the cache.
        with eval_mode(self.model):
            self._finish(scheduler, jobs, num_rows)
        return [job.completions for job in jobs]

    def _scheduler_for(self, jobs: Sequence[Job], sampling: Sampling) -> Scheduler:
        """Return the scheduler of the open stream, if its pages have room, or a new one."""
        stream = self.stream
        if stream is not None and not sampling.record_kept and stream.has_room(jobs):
            return stream.scheduler
        num_rows = min(self.max_rows, sum(len(job.sequences) for job in jobs))
        if (decoder := self._free_decoder(sampling)) is not None:
            return Scheduler(self._page_store(decoder, num_rows), self.weights_version)
        longest = max(max_row_tokens(job.request, sampling) for job in jobs)
        num_slots = min(num_rows, self._slots_that_fit(longest))
        return Scheduler(SlotStore(self, num_slots, longest), self.weights_version)

    def _finish(self, scheduler: Scheduler, jobs: Sequence[Job], num_rows: int) -> None:
        """Step the scheduler until all jobs have ended; an open stream gets its ended rows."""
        stream = self.stream
        is_shared = stream is not None and scheduler is stream.scheduler
        ours = set(jobs)
        num_left = num_rows
        try:
            while num_left:
                ended = self.step(scheduler)
                of_stream = [row for row in ended if row.job not in ours]
                num_left -= len(ended) - len(of_stream)
                if stream is not None:
                    stream.ended += of_stream
                phases.count(num_rows - num_left, num_rows)
        finally:
            if not is_shared:
                scheduler.store.close()

    def step(self, scheduler: Scheduler) -> list[Row]:
        """Decode a few tokens with the present weights; return the rows that ended."""
        if scheduler.version != self.weights_version:
            scheduler.weights_changed(self.weights_version)
        return scheduler.step()

    def open_stream(self, sampling: Sampling, num_rows: int) -> Stream:
        """Return a stream of at most `num_rows` rows at a time; see rollout/streams.py."""
        num_rows = max(1, min(self.max_rows, num_rows))
        if self.stock_engine is not None:
            return BatchedStream(self, sampling)
        if (decoder := self._free_decoder(sampling)) is not None:
            pages = self._page_store(decoder, num_rows, joins=True)
            return NativeStream(self, sampling, pages, pages)
        if self.decoder is not None and sampling.filters:
            return BatchedStream(self, sampling)
        return NativeStream(self, sampling, SlotStore(self, num_rows))

    def open_server(self, capacity: int, longest: int, cache_bytes: int) -> Scheduler:
        """Return a scheduler for watched jobs, which join and leave while others decode.

        Args:
            capacity: rows that decode at the same time.
            longest: tokens of prompt and response together.
            cache_bytes: memory for keys and values in pages; slots take what their rows need.

        Raises:
            CacheMemoryError: one row does not fit.
        """
        if self.decoder is not None:
            return Scheduler(self._server_pages(self.decoder, capacity, longest, cache_bytes))
        chunk = CPU_PASS_TOKENS if self.device.type == "cpu" else 0
        return Scheduler(SlotStore(self, capacity, longest, chunk))

    def warm_up_server(self, capacity: int, longest: int, cache_bytes: int) -> None:
        """Capture the decoder's graphs, if it has any, before the first request waits for them."""
        if self.decoder is not None:
            store = self._server_pages(self.decoder, capacity, longest, cache_bytes)
            store.warm_up()
            store.close()

    def _free_decoder(self, sampling: Sampling) -> "Decoder | None":
        """Return the captured decoder if it can sample so and no stream uses its pages."""
        if self.stream is not None or sampling.record_kept:
            return None
        return self.decoder

    def _page_store(self, decoder: "Decoder", num_rows: int, joins: bool = False) -> "PageStore":
        from postgrad.rollout.native.store_pages import PageStore

        rows = graph_rows(num_rows)
        return PageStore(decoder, rows, self.cache_bytes, self.max_context, joins)

    def _server_pages(
        self, decoder: "Decoder", capacity: int, longest: int, cache_bytes: int
    ) -> "PageStore":
        from postgrad.rollout.native.store_pages import PageStore

        return PageStore(decoder, capacity, lambda: cache_bytes, longest, True, longest)

    def _slots_that_fit(self, length: int) -> int:
        """Return how many rows of this length half of the free device memory holds."""
        if not has_own_memory(self.device):
            return self.max_rows
        token_bytes = kv_token_bytes(self.model.config, self.model.dtype)
        return max(1, free_memory_bytes(self.device) // 2 // (token_bytes * length))

    def cache_bytes(self) -> int:
        """Return the device memory that keys and values may take."""
        if self.cache_gib:
            return int(self.cache_gib * 2**30)
        free = free_memory_bytes(self.device)
        if self.keeps_cache or self.decoder is None or self.decoder.driver is None:
            return largest_cache(free, detachable=False)
        return largest_cache(free + self.decoder.cache_bytes(), detachable=True)


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

    batch_wait_s = 0.0

    def __init__(
        self,
        engine: NativeEngine,
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
