"""The native engine: samples from the trainer's own model.

On a GPU with a decoder, paged.py decodes; elsewhere the scheduler does, over slots.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from postgrad import phases
from postgrad.config.schema import RolloutConfig
from postgrad.model.device import free_memory_bytes, has_own_memory, supports_triton
from postgrad.model.load.context import context_length
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import stop_ids
from postgrad.model.passes.support import support_of
from postgrad.rollout.engine import (
    Completion,
    Request,
    Sampling,
    check_requests,
    copy_weights,
    max_row_tokens,
)
from postgrad.rollout.native.pages import largest_cache
from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.native.store_slots import SlotStore
from postgrad.rollout.stops import make_stops

if TYPE_CHECKING:
    from postgrad.rollout.hf import HfEngine
    from postgrad.rollout.native.decoder import Decoder


class PagesInUse(Protocol):
    """A stream that has rows in the decoder's pages (paged_stream.py)."""

    def can_generate(self, requests: Sequence[Request], sampling: Sampling) -> bool: ...

    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> list[list[Completion]]: ...


class NativeEngine:
    """Samples from `loaded.model`, the parameters that the trainer updates.

    A model that fails the numeric gate (gate.py) is sampled by transformers' generate instead.
    """

    shares_weights = True

    def __init__(self, loaded: Loaded, config: RolloutConfig) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.device = next(self.model.parameters()).device
        self.max_rows = config.max_rows or 256
        self.cache_gib = config.cache_gib
        self.keeps_cache = config.stream  # while the trainer works, too
        self.stop_ids = torch.tensor(stop_ids(loaded), device=self.device)
        self.max_context = context_length(self.model.config)
        self.logit_transform = support_of(self.model).transform
        self.decoder = self._make_decoder() if supports_triton(self.device) else None
        self.stock_engine: HfEngine | None = None
        self.paged_stream: PagesInUse | None = None
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
        # In training mode a model with activation checkpointing ignores the cache.
        self.model.eval()
        try:
            stream = self.paged_stream
            if stream is not None and stream.can_generate(requests, sampling):
                return stream.generate(requests, sampling)
            if (decoder := self.free_decoder(sampling)) is not None:
                return self._generate_paged(decoder, requests, sampling)
            longest = max(max_row_tokens(request, sampling) for request in requests)
            num_slots = min(self.max_rows, num_rows, self.slots_that_fit(longest))
            scheduler = Scheduler(SlotStore(self, num_slots, longest))
            stops = make_stops(self.tokenizer, sampling)
            jobs = [scheduler.add(Job(request, sampling, stops)) for request in requests]
            num_ended = 0
            while scheduler.busy:
                num_ended += len(scheduler.step())
                phases.count(num_ended, num_rows)
        finally:
            self.model.train()
        return [job.completions for job in jobs]

    def _generate_paged(
        self, decoder: "Decoder", requests: Sequence[Request], sampling: Sampling
    ) -> list[list[Completion]]:
        from postgrad.rollout.native.paged import PagedDecodeLoop

        stops = make_stops(self.tokenizer, sampling)
        jobs = [Job(request, sampling, stops=stops) for request in requests]
        loop = PagedDecodeLoop(decoder, jobs, self.max_rows, self.cache_bytes(), self.max_context)
        try:
            return loop.finish()
        finally:
            decoder.detach_cache()

    def free_decoder(self, sampling: Sampling) -> "Decoder | None":
        """Return the captured decoder if it can sample so and no stream uses its pages."""
        if self.decoder is None or self.paged_stream is not None or sampling.record_kept:
            return None
        return self.decoder

    def slots_that_fit(self, length: int) -> int:
        """Return how many rows of this length half of the free device memory holds."""
        if not has_own_memory(self.device):
            return self.max_rows
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        token_bytes = 2 * config.num_hidden_layers * heads * width * self.model.dtype.itemsize
        return max(1, free_memory_bytes(self.device) // 2 // (token_bytes * length))

    def cache_bytes(self) -> int:
        """Return the device memory that keys and values may take."""
        if self.cache_gib:
            return int(self.cache_gib * 2**30)
        free = free_memory_bytes(self.device)
        if self.keeps_cache or self.decoder is None or self.decoder.driver is None:
            return largest_cache(free, detachable=False)
        return largest_cache(free + self.decoder.cache_bytes(), detachable=True)
