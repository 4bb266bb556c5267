"""Continuous batching on a CUDA device.

The rows of a prompt share the pages of its keys and values. The state of the rows is on the
device; the host reads it every STEPS_PER_SYNC decode steps.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from postgrad.errors import RunError
from postgrad.model.passes.packing import BLOCK_N as PAGE
from postgrad.model.passes.packing import make_packing
from postgrad.rollout.engine import Completion, Request, Sampling, token_limit
from postgrad.rollout.native.cache import PageWriter
from postgrad.rollout.native.decoder import (
    ALIVE,
    FIELDS,
    LIMIT,
    NUM_OWN,
    SHARED_PAGES,
    BufferSizes,
    Decoder,
)
from postgrad.rollout.native.sampling import RowRandom
from postgrad.rollout.stops import StopStrings

STEPS_PER_SYNC = 16
PREFILL_TOKENS = 16384  # prompt tokens per prefill pass


def num_pages(num_tokens: int) -> int:
    """Return the number of pages that hold this many tokens."""
    return -(-num_tokens // PAGE)


@dataclass
class _PromptPages:
    """The pages of a prompt without its last token, and the number of active rows that use them."""

    pages: list[int]
    num_rows: int


@dataclass
class Row:
    """One trajectory and the pages of its own tokens."""

    request: int
    index: int  # which of the request's seeds
    slot: int
    pages: list[int] = field(default_factory=list)
    num_checked: int = 0  # tokens in which stop strings were searched


class PagedDecodeLoop:
    """Decodes all rows of one call of generate.

    Args:
        decoder: has the model and the buffers.
        requests: prompts with seeds; equal prompts share their pages.
        sampling: without top-p, top-k and min-p.
        max_rows: rows that decode at the same time.
        cache_bytes: memory for keys and values.
        max_context: the model's context in tokens.
        stops: finds stop strings, if there are any.
        stream_rows: rows at a time if more requests are added later; 0: there are no others.

    Raises:
        RunError: one row does not fit in the cache.
    """

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        sampling: Sampling,
        max_rows: int,
        cache_bytes: int,
        max_context: int,
        stops: StopStrings | None = None,
        stream_rows: int = 0,
    ) -> None:
        self.decoder = decoder
        self.requests = list(requests)
        self.stream_rows = stream_rows
        self.sampling = sampling
        self.stops = stops
        self.lengths_at_stop: dict[int, int] = {}  # by slot: tokens of a row with a stop string
        self.limits = [token_limit(request, sampling) for request in requests]
        # For each request, the first request with the same prompt.
        self.prompts: dict[tuple[int, ...], int] = {}
        self.prompt_of = [
            self.prompts.setdefault(tuple(request.prompt), i) for i, request in enumerate(requests)
        ]
        self.all_rows: list[Row] = []
        for number, request in enumerate(requests):
            for index in range(len(request.seeds)):
                self.all_rows.append(Row(number, index, slot=len(self.all_rows)))
        self.waiting: deque[Row] = deque(self.all_rows)
        self.capacity = _bucket(min(max_rows, max(len(self.all_rows), stream_rows)))
        prompt_pages = sum(num_pages(len(prompt) - 1) for prompt in self.prompts)
        decoder.reserve(self._buffer_sizes(prompt_pages, cache_bytes, max_context))
        sizes = decoder.sizes
        self.free_pages = list(range(sizes.pages - 1, -1, -1))
        self.prompt_pages: dict[int, _PromptPages] = {}
        self.active: list[Row] = []
        self.state = np.zeros((FIELDS, sizes.rows), dtype=np.int32)
        self.table = np.zeros((sizes.rows, sizes.row_pages), dtype=np.int32)

    def _buffer_sizes(self, prompt_pages: int, cache_bytes: int, max_context: int) -> BufferSizes:
        """Return the buffers for these requests. Raises RunError."""
        limit = max(self.limits)
        longest_prompt = max(len(request.prompt) for request in self.requests)
        longest_row = longest_prompt + limit
        own_pages = num_pages(limit)
        row_pages = own_pages + num_pages(longest_prompt - 1)
        if self.stream_rows:  # a later prompt is an earlier one with a part of its response
            row_pages += 1
            own_pages = row_pages
        page_bytes = self.decoder.page_bytes()
        max_pages = max(1, cache_bytes // page_bytes)
        if max_pages < row_pages + 1:
            needed_gib = (row_pages + 1) * page_bytes / 2**30
            raise RunError(
                f"one trajectory of {longest_row} tokens needs {needed_gib:.1f} GiB of cache; "
                "raise rollout.cache_gib"
            )
        # Needs differ from step to step. A cache that is a little smaller than the worst case is
        # kept, and with it the graphs that use its buffers.
        wanted = self.capacity * own_pages + prompt_pages + 1
        present = self.decoder.sizes.pages
        if present > max_pages:  # the trainer holds more memory than at the last call
            self.decoder.drop_pages()
            present = 0
        pages = present if wanted * 4 <= present * 5 else min(wanted, max_pages)
        return BufferSizes(
            rows=self.capacity,
            row_pages=_round_up(row_pages, 8),
            slots=1 << (max(len(self.all_rows), self.stream_rows) - 1).bit_length(),
            length=limit,
            positions=min(max_context, _round_up(longest_row, 256)),
            pages=max(pages, row_pages + 1),
        )

    def finish(self) -> list[list[Completion]]:
        """Decode until every row has ended; returns the completions of each request."""
        self.draw_uniforms(self.all_rows)
        while self.waiting or self.active:
            self.advance()
        groups: list[list[Completion]] = [[] for _ in self.requests]
        for row, completion in zip(self.all_rows, self.collect(self.all_rows), strict=True):
            groups[row.request].append(completion)
        return groups

    def advance(self) -> list[Row]:
        """Decode up to STEPS_PER_SYNC tokens per row; returns the rows that ended."""
        decoder = self.decoder
        self.admit()
        steps = self.allocate_pages()
        decoder.state.copy_(torch.from_numpy(self.state))
        decoder.table.copy_(torch.from_numpy(self.table))
        rows = min(_bucket(len(self.active)), self.capacity)
        decoder.run(rows, steps, self.sampling.temperature)
        self.state = decoder.state.cpu().numpy()
        self.apply_stop_strings()
        return self.remove_ended()

    def draw_uniforms(self, rows: Sequence[Row]) -> None:
        """Draw the random numbers of rows from their seeds, the same numbers as on the CPU."""
        if self.sampling.temperature == 0.0 or not rows:
            return
        uniforms = np.zeros((len(rows), self.decoder.sizes.length), dtype=np.float32)
        # A number just below 1 may round to 1 in float32, which no cumulative sum exceeds.
        largest = np.float32(1.0 - 2**-24)
        for line, row in enumerate(rows):
            limit = self.limits[row.request]
            seed = self.requests[row.request].seeds[row.index]
            numbers = RowRandom(seed).numbers(limit).astype(np.float32)
            uniforms[line, :limit] = np.minimum(numbers, largest)
        slots = torch.tensor([row.slot for row in rows], device=self.decoder.device)
        self.decoder.uniforms[slots] = torch.from_numpy(uniforms).to(self.decoder.device)

    def admit(self) -> None:
        """Let waiting rows start while rows and pages are free; prefill their new prompts."""
        new: list[int] = []
        reserved = len(self.active)  # every active row may soon need a page
        while self.waiting and len(self.active) < self.capacity:
            row = self.waiting[0]
            prompt = self.prompt_of[row.request]
            needed = 0
            if prompt not in self.prompt_pages:
                needed = num_pages(len(self.requests[prompt].prompt) - 1)
            if len(self.free_pages) < needed + 1 + (reserved if self.active else 0):
                break
            self.waiting.popleft()
            if prompt not in self.prompt_pages:
                pages = [self.free_pages.pop() for _ in range(needed)]
                self.prompt_pages[prompt] = _PromptPages(pages, 0)
                new.append(prompt)
            self.enter(row)
            reserved += 1
        lengths = [len(self.requests[number].prompt) - 1 for number in new]
        for part in _split_by_total(lengths, PREFILL_TOKENS):
            self.prefill(new[part])

    def enter(self, row: Row) -> None:
        """Make a row active.

        It starts with the last token of its prompt: the first decode step computes that token's
        key and value and samples the first response token.
        """
        prompt = self.requests[row.request].prompt
        shared = self.prompt_pages[self.prompt_of[row.request]]
        shared.num_rows += 1
        column = len(self.active)
        row.pages = []
        self.active.append(row)
        self.state[:, column] = (
            prompt[-1],  # TOKEN
            0,  # NUM_OWN
            len(prompt) - 1,  # NUM_SHARED
            len(shared.pages),  # SHARED_PAGES
            row.slot,  # SLOT
            self.limits[row.request],  # LIMIT
            1,  # ALIVE
        )
        self.table[column, : len(shared.pages)] = shared.pages

    def prefill(self, requests: list[int]) -> None:
        """Compute the prompts' keys and values, without their last tokens, in one packed pass."""
        tokens: list[int] = []
        positions: list[int] = []
        lines: list[int] = []
        segments: list[tuple[int, int, int, int, int]] = []
        for number in requests:
            prompt = self.requests[number].prompt[:-1]
            if not prompt:
                continue
            start = len(tokens)
            pages = self.prompt_pages[number].pages
            tokens += prompt
            positions += range(len(prompt))
            lines += [pages[i // PAGE] * PAGE + i % PAGE for i in range(len(prompt))]
            segments.append((start, len(tokens), 0, 0, len(tokens)))
        if not tokens:
            return
        device = self.decoder.device
        unused_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)  # packing decides
        self.decoder.model.base_model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=unused_mask,
            past_key_values=PageWriter(
                self.decoder.keys, self.decoder.values, torch.tensor(lines, device=device)
            ),
            packing=make_packing(segments).to(device),
            use_cache=True,
        )

    def allocate_pages(self) -> int:
        """Give every active row the pages for its next steps; returns the number of steps.

        When pages run out, the last rows go back to the queue.
        """
        while True:
            num_active = len(self.active)
            own = self.state[NUM_OWN, :num_active]
            limits = self.state[LIMIT, :num_active]
            steps = min(STEPS_PER_SYNC, max(int((limits - own).max()), 1))
            ends = np.minimum(own + steps, limits)
            missing = [
                num_pages(int(end)) - len(row.pages)
                for end, row in zip(ends, self.active, strict=True)
            ]
            if sum(count for count in missing if count > 0) <= len(self.free_pages):
                break
            self.preempt_last()
        for column, (row, count) in enumerate(zip(self.active, missing, strict=True)):
            for _ in range(count):
                page = self.free_pages.pop()
                self.table[column, self.state[SHARED_PAGES, column] + len(row.pages)] = page
                row.pages.append(page)
        return steps

    def preempt_last(self) -> None:
        """Put the last active row back into the queue; its seed gives the same tokens again."""
        row = self.active.pop()
        self.state[ALIVE, len(self.active)] = 0
        self.release_pages(row)
        self.waiting.appendleft(row)

    def release_pages(self, row: Row) -> None:
        """Free a row's pages, and its prompt's pages when no row needs them soon."""
        self.free_pages += row.pages
        row.pages = []
        row.num_checked = 0
        number = self.prompt_of[row.request]
        prompt = self.prompt_pages[number]
        prompt.num_rows -= 1
        is_next = bool(self.waiting) and self.prompt_of[self.waiting[0].request] == number
        if prompt.num_rows == 0 and not is_next:
            self.free_pages += prompt.pages
            del self.prompt_pages[number]

    def apply_stop_strings(self) -> None:
        """End the rows in which a stop string was completed since the last call."""
        if self.stops is None:
            return
        slots = torch.tensor([row.slot for row in self.active], device=self.decoder.device)
        tokens = self.decoder.tokens[slots].cpu().numpy()
        for column, row in enumerate(self.active):
            num_tokens = int(self.state[NUM_OWN, column])
            end = self.stops.find_end(tokens[column, :num_tokens].tolist(), row.num_checked)
            if end:
                self.lengths_at_stop[row.slot] = end
                self.state[ALIVE, column] = 0
            row.num_checked = num_tokens

    def remove_ended(self) -> list[Row]:
        """Remove the rows that ended and close the gaps; returns them."""
        alive = self.state[ALIVE, : len(self.active)] != 0
        kept = np.nonzero(alive)[0]
        ended = [self.active[column] for column in np.nonzero(~alive)[0]]
        if not ended:
            return []
        for row in ended:
            self.release_pages(row)
        self.state[:, : len(kept)] = self.state[:, kept]
        self.table[: len(kept)] = self.table[kept]
        self.state[ALIVE, len(kept) :] = 0
        self.active = [self.active[column] for column in kept]
        return ended

    def collect(self, rows: Sequence[Row]) -> list[Completion]:
        """Return the sampled tokens and log-probs of rows that ended."""
        slots = torch.tensor([row.slot for row in rows], device=self.decoder.device)
        tokens = self.decoder.tokens[slots].cpu().numpy()
        logprobs = self.decoder.logprobs[slots].cpu().numpy()
        is_stop = np.isin(tokens, self.decoder.stop_ids.cpu().numpy())
        completions: list[Completion] = []
        for line, row in enumerate(rows):
            limit = self.limits[row.request]
            stop_positions = np.nonzero(is_stop[line, :limit])[0]
            length = limit
            finish = "length"
            if row.slot in self.lengths_at_stop:
                length = self.lengths_at_stop[row.slot]
                finish = "stop"
            elif len(stop_positions):
                length = int(stop_positions[0]) + 1
                finish = "stop"
            row_tokens = tokens[line, :length].tolist()
            row_logprobs = logprobs[line, :length].tolist()
            completions.append(Completion(row_tokens, row_logprobs, finish))
        return completions


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _bucket(rows: int) -> int:
    """Round up to the row counts of graphs: powers of two from 8 to 256, multiples of 256 above."""
    if rows <= 256:
        return max(8, 1 << (rows - 1).bit_length())
    return _round_up(rows, 256)


def _split_by_total(lengths: list[int], max_total: int) -> list[slice]:
    """Split consecutive items into slices whose lengths sum to at most `max_total`.

    An item that is longer gets its own slice.
    """
    slices: list[slice] = []
    first = 0
    total = 0
    for i, length in enumerate(lengths):
        if total and total + length > max_total:
            slices.append(slice(first, i))
            first = i
            total = 0
        total += length
    if lengths:
        slices.append(slice(first, len(lengths)))
    return slices
