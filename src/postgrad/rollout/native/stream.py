"""A stream over the decode loop: conversations join, pause between turns, and continue.

When a row ends, its keys and values leave its slot and are kept. When it continues, they are
copied into a free slot, and only the new tokens are computed.
"""

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postgrad.model.passes.attention import prompt_mask
from postgrad.model.passes.support import has_window
from postgrad.rollout.engine import Request, Sampling, check_requests, max_row_tokens
from postgrad.rollout.native.cache import SlotCache
from postgrad.rollout.native.decode_loop import DecodeLoop, tokens_per_pass
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.jobs import Job, Row, StreamJob
from postgrad.rollout.native.sampling import RowRandom
from postgrad.rollout.streams import Finished, Stream, WaveStream


@dataclass
class KeptRow:
    """The tokens of a row that ended, and their keys and values per layer: (tokens, head, dim)."""

    tokens: list[int]
    layers: list[Tensor]
    version: int  # of the weights that computed them


class ContinuedCache:
    """The cache object of a pass that continues rows: earlier tokens are in the slots.

    Rows `first` to `first + len(lengths)` of the slots have `lengths` earlier tokens each.
    """

    def __init__(self, slots: SlotCache, first: int, lengths: Tensor) -> None:
        self.slots = slots
        self.rows = slice(first, first + len(lengths))
        self.width = int(lengths.max())
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Return earlier and new keys and values (rows, heads, width + new, head_dim)."""
        self.keys.append(key)
        self.values.append(value)
        earlier_key = self.slots.keys[layer][self.rows, : self.width].transpose(1, 2)
        earlier_value = self.slots.values[layer][self.rows, : self.width].transpose(1, 2)
        return torch.cat([earlier_key, key], 2), torch.cat([earlier_value, value], 2)

    def get_seq_length(self, *_: Any) -> int:
        return self.width

    def mask(self, lengths: Tensor, num_new: Tensor) -> Tensor:
        """Return (rows, 1, new, width + new): the row's own earlier tokens, then a causal mask."""
        new = prompt_mask(num_new, int(num_new.max()))
        columns = torch.arange(self.width, device=lengths.device)
        earlier = (columns[None] < lengths[:, None])[:, None, None]
        return torch.cat([earlier.expand(-1, -1, new.shape[2], -1), new], 3)


class ConversationStream(DecodeLoop):
    """The stream of a native engine over the stock model; see streams.Stream.

    Args:
        engine: has the model.
        sampling: the same for all rows.
        capacity: rows that decode at the same time, and rows that are kept between turns.
    """

    patience_s = 0.0

    def __init__(self, engine: NativeEngine, sampling: Sampling, capacity: int) -> None:
        super().__init__(engine, capacity, 0)
        self.sampling = sampling
        self.kept: dict[Hashable, KeptRow] = {}
        self.to_continue: deque[StreamJob] = deque()
        self.finished: list[Finished] = []
        self.keeps_rows = not has_window(engine.model)

    def __enter__(self) -> "ConversationStream":
        # In training mode a model with activation checkpointing ignores the cache.
        self.engine.model.eval()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.model.train()

    @property
    def busy(self) -> bool:
        waiting = self.to_continue or self.to_prefill or self.prefilled
        return bool(self.active or self.finished or waiting)

    def add(self, request: Request, keys: Sequence[Hashable]) -> None:  # type: ignore[override]
        check_requests([request], self.sampling, self.engine.max_context, self.engine.model.config)
        self._grow(max_row_tokens(request, self.sampling))
        version = self.engine.weights_version
        job = StreamJob(request, self.sampling, keys=list(keys), version=version)
        super().add(job)
        if self._continues(job):
            self.to_continue.append(self.to_prefill.pop())  # type: ignore[arg-type]

    def _continues(self, job: StreamJob) -> bool:
        """Whether one pass can compute this prompt after the start that is kept of it."""
        kept = self.kept.get(job.keys[0])
        if kept is None or len(job.keys) > 1 or kept.version != self.engine.weights_version:
            return False
        prompt = job.request.prompt
        num_new = len(prompt) - len(kept.tokens)
        is_one_pass = 0 < num_new <= tokens_per_pass(len(prompt))
        return is_one_pass and prompt[: len(kept.tokens)] == kept.tokens

    @torch.no_grad()
    def poll(self) -> list[Finished]:
        self.fill()
        if self.active:
            self.step()
        finished = self.finished
        self.finished = []
        return finished

    def forget(self, key: Hashable) -> None:
        self.kept.pop(key, None)

    def refresh_weights(self) -> dict[Hashable, int]:
        self.engine.weights_version += 1
        # Logits of prompts whose rows wait for a slot are of the older weights.
        self.to_prefill.extendleft(prompt.job for prompt in reversed(self.prefilled))
        self.prefilled.clear()
        self.load_head()
        num_tokens: dict[Hashable, int] = {}
        for row in self.active:
            assert isinstance(row.job, StreamJob)
            num_tokens[row.job.keys[row.index]] = len(row.tokens)
        return num_tokens

    def take_restarted(self) -> list[Hashable]:
        return []  # every active row has its slot until it ends

    def cancel(self, keys: Collection[Hashable]) -> None:
        removed = set(keys)
        canceled: set[Job] = set()
        for job in {*self.waiting_jobs, *self.decoding_jobs, *self.to_continue}:
            assert isinstance(job, StreamJob)
            if not removed.isdisjoint(job.keys):
                canceled.add(job)
        self.drop(canceled)
        self.to_continue = deque(job for job in self.to_continue if job not in canceled)
        for key in keys:
            self.forget(key)

    def on_token(self, row: Row, finish: str) -> None:
        if finish:
            assert isinstance(row.job, StreamJob)
            self.finished.append((row.job.keys[row.index], row.completion(finish)))

    def remove(self, slots: list[int]) -> None:
        if self.keeps_rows:
            for slot in slots:
                self._keep(slot)
        super().remove(slots)

    def _keep(self, slot: int) -> None:
        """Copy the keys and values of an ended row out of its slot; the oldest kept row goes."""
        row = self.active[slot]
        assert isinstance(row.job, StreamJob)
        length = int(self.lengths[slot])
        tokens = [*row.job.request.prompt, *row.tokens][:length]
        layers = [layer[slot, :length].clone() for layer in (*self.cache.keys, *self.cache.values)]
        self.kept[row.job.keys[row.index]] = KeptRow(tokens, layers, row.job.version)
        while len(self.kept) > self.capacity:
            self.kept.pop(next(iter(self.kept)))

    def fill(self) -> None:
        """Let rows that continue take free slots, then new rows."""
        while self.to_continue and len(self.active) < self.capacity:
            self._continue_rows(self._take_jobs_to_continue())
        super().fill()

    def _take_jobs_to_continue(self) -> list[StreamJob]:
        jobs: list[StreamJob] = []
        num_free = self.capacity - len(self.active)
        width = 0
        longest = 0
        while self.to_continue and len(jobs) < num_free:
            job = self.to_continue[0]
            if not self._continues(job):  # it made room for others, or the weights have changed
                self.to_prefill.append(self.to_continue.popleft())
                continue
            kept = self.kept[job.keys[0]]
            width = max(width, len(job.request.prompt) - len(kept.tokens))
            longest = max(longest, len(job.request.prompt))
            if jobs and width * (len(jobs) + 1) > tokens_per_pass(longest):
                break
            jobs.append(self.to_continue.popleft())
        return jobs

    def _continue_rows(self, jobs: list[StreamJob]) -> None:
        """Compute the new tokens of these rows in one pass and sample their next tokens."""
        if not jobs:
            return
        first = len(self.active)
        kept_rows = [self.kept.pop(job.keys[0]) for job in jobs]
        for slot, kept in enumerate(kept_rows, first):
            layers = (*self.cache.keys, *self.cache.values)
            for layer, values in zip(layers, kept.layers, strict=True):
                layer[slot, : len(values)] = values
        device = self.engine.device
        lengths = torch.tensor([len(kept.tokens) for kept in kept_rows])
        totals = torch.tensor([len(job.request.prompt) for job in jobs])
        num_new = totals - lengths
        ids = torch.zeros(len(jobs), int(num_new.max()), dtype=torch.int64)
        for row, job in enumerate(jobs):
            ids[row, : num_new[row]] = torch.tensor(job.request.prompt[int(lengths[row]) :])
        positions = lengths[:, None] + torch.arange(ids.shape[1])[None]
        cache = ContinuedCache(self.cache, first, lengths)
        hidden = self.engine.model.base_model(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=cache.mask(lengths, num_new).to(device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        self._write_new_tokens(cache, first, lengths, num_new)
        for slot, job in enumerate(jobs, first):
            self.active.append(Row(job, 0, RowRandom(job.request.seeds[0])))
            self.lengths[slot] = len(job.request.prompt)
            self.num_sampled[slot] = 0
        last = hidden[torch.arange(len(jobs), device=device), (num_new - 1).to(device)]
        self.record(self.sample(self.compute_logits(last), first))

    def _write_new_tokens(
        self, cache: ContinuedCache, first: int, lengths: Tensor, num_new: Tensor
    ) -> None:
        for source, target in ((cache.keys, self.cache.keys), (cache.values, self.cache.values)):
            for new, layer in zip(source, target, strict=True):
                for row, (start, count) in enumerate(
                    zip(lengths.tolist(), num_new.tolist(), strict=True)
                ):
                    tokens = new[row, :, :count].transpose(0, 1)
                    layer[first + row, start : start + count] = tokens

    def _grow(self, longest: int) -> None:
        """Make the slots long enough for rows of this many tokens."""
        if longest <= self.cache.max_length:
            return
        old = self.cache
        self.cache = SlotCache(self.capacity, longest)
        num_active = len(self.active)
        for source, target in ((old.keys, self.cache.keys), (old.values, self.cache.values)):
            for layer in source:
                wider = self.cache.new_layer(layer)
                wider[:num_active, : old.max_length] = layer[:num_active]
                target.append(wider)


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
        return ConversationStream(self, sampling, max(1, min(self.max_rows, num_rows)))
