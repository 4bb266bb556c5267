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
from postgrad.rollout.engine import Completion, Request, Sampling, token_limit
from postgrad.rollout.native.decoder import (
    ALIVE,
    FIELDS,
    LIMIT,
    NUM_EARLIER,
    NUM_OWN,
    SHARED_PAGES,
    BufferSizes,
    Decoder,
)
from postgrad.rollout.native.paged_prefill import Span, page_lines, prefill
from postgrad.rollout.native.pages import graph_rows, num_pages
from postgrad.rollout.native.sampling import RowRandom
from postgrad.rollout.stops import StopStrings

STEPS_PER_SYNC = 16


@dataclass
class _PromptPages:
    """The pages of a prompt without its last token, and the number of rows that use them."""

    pages: list[int]
    num_rows: int


@dataclass
class Row:
    """One trajectory and the pages of its own tokens.

    `prompt` is the number of the request whose prompt is in shared pages: the first one with the
    same prompt, or that of the first turn, if the row continues an earlier one. Then the tokens
    since that prompt are in the row's own pages, and `num_kept` of them are computed already.
    """

    request: int
    index: int  # which of the request's seeds
    slot: int
    prompt: int
    pages: list[int] = field(default_factory=list)
    num_kept: int = 0
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
        growth: how much longer than these the rows of later requests may be.

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
        growth: int = 1,
    ) -> None:
        self.decoder = decoder
        self.requests = list(requests)
        self.stream_rows = stream_rows
        self.growth = growth
        self.sampling = sampling
        self.stops = stops
        self.lengths_at_stop: dict[int, int] = {}  # by slot: tokens of a row with a stop string
        self.limits = [token_limit(request, sampling) for request in requests]
        self.prompts: dict[tuple[int, ...], int] = {}  # the first request with each prompt
        self.all_rows: list[Row] = []
        for number, request in enumerate(requests):
            prompt = self.prompts.setdefault(tuple(request.prompt), number)
            for index in range(len(request.seeds)):
                self.all_rows.append(Row(number, index, len(self.all_rows), prompt))
        self.waiting: deque[Row] = deque(self.all_rows)
        self.capacity = graph_rows(min(max_rows, max(len(self.all_rows), stream_rows)))
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
            row_pages=_round_up(row_pages * self.growth, 8),
            slots=1 << (max(len(self.all_rows), self.stream_rows) - 1).bit_length(),
            length=limit,
            positions=min(max_context, _round_up(longest_row * self.growth, 256)),
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
        rows = min(graph_rows(len(self.active)), self.capacity)
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
        """Let waiting rows start while rows and pages are free; prefill their new tokens."""
        spans: list[Span] = []
        while self.waiting and len(self.active) < self.capacity:
            row = self.waiting[0]
            if not self.can_start(row):
                break
            self.waiting.popleft()
            num_prompt_pages, num_own_pages = self.pages_to_start(row)
            if row.prompt not in self.prompt_pages:
                prompt = self.requests[row.prompt].prompt[:-1]
                pages = self.take_pages(num_prompt_pages)
                self.prompt_pages[row.prompt] = _PromptPages(pages, 0)
                spans.append(Span(prompt, page_lines(pages, len(prompt))))
            row.pages += self.take_pages(num_own_pages)
            self.enter(row)
            if self.num_earlier(row) > row.num_kept:
                spans.append(self.own_span(row))
        prefill(self.decoder, spans)

    def can_start(self, row: Row) -> bool:
        """Return whether there are pages for a row. Every active row may soon need one, too."""
        return self.ensure_free_pages(sum(self.pages_to_start(row)) + 1 + len(self.active))

    def pages_to_start(self, row: Row) -> tuple[int, int]:
        """Return the number of pages that its prompt and the row itself need before it decodes."""
        num_own = num_pages(self.num_earlier(row)) - len(row.pages)
        if row.prompt in self.prompt_pages:
            return 0, num_own
        return num_pages(len(self.requests[row.prompt].prompt) - 1), num_own

    def ensure_free_pages(self, count: int) -> bool:
        """Return whether this many pages are free."""
        return len(self.free_pages) >= count

    def take_pages(self, count: int) -> list[int]:
        return [self.free_pages.pop() for _ in range(count)]

    def num_earlier(self, row: Row) -> int:
        """Return the number of the row's own tokens before the last token of its prompt."""
        return len(self.requests[row.request].prompt) - len(self.requests[row.prompt].prompt)

    def own_span(self, row: Row) -> Span:
        """Return the row's own tokens before the last token of its prompt that are not computed."""
        shared = self.prompt_pages[row.prompt].pages
        num_shared = len(self.requests[row.prompt].prompt) - 1
        own = page_lines(row.pages, self.num_earlier(row))
        earlier = np.concatenate([page_lines(shared, num_shared), own[: row.num_kept]])
        tokens = self.requests[row.request].prompt[len(earlier) : -1]
        return Span(tokens, own[row.num_kept :], earlier)

    def enter(self, row: Row) -> None:
        """Make a row active.

        It starts with the last token of its prompt: the first decode step computes that token's
        key and value and samples the first response token.
        """
        prompt = self.requests[row.request].prompt
        shared = self.prompt_pages[row.prompt]
        if not row.num_kept:  # a row that continues another takes its place
            shared.num_rows += 1
        column = len(self.active)
        self.active.append(row)
        self.state[:, column] = (
            prompt[-1],  # TOKEN
            0,  # NUM_OWN
            len(self.requests[row.prompt].prompt) - 1,  # NUM_SHARED
            len(shared.pages),  # SHARED_PAGES
            row.slot,  # SLOT
            self.limits[row.request],  # LIMIT
            1,  # ALIVE
            self.num_earlier(row),  # NUM_EARLIER
        )
        pages = shared.pages + row.pages
        self.table[column, : len(pages)] = pages

    def allocate_pages(self) -> int:
        """Give every active row the pages for its next steps; returns the number of steps.

        When pages run out, the last rows go back to the queue.
        """
        while True:
            num_active = len(self.active)
            own = self.state[NUM_OWN, :num_active]
            earlier = self.state[NUM_EARLIER, :num_active]
            limits = self.state[LIMIT, :num_active]
            steps = min(STEPS_PER_SYNC, max(int((limits - own).max()), 1))
            ends = earlier + np.minimum(own + steps, limits)
            missing = [
                num_pages(int(end)) - len(row.pages)
                for end, row in zip(ends, self.active, strict=True)
            ]
            if self.ensure_free_pages(sum(count for count in missing if count > 0)):
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
        """Free a row's pages, and its prompt's pages when no row needs them soon.

        If the row starts again, it continues no other.
        """
        self.free_pages += row.pages
        row.pages = []
        row.num_kept = 0
        row.num_checked = 0
        prompt = row.prompt
        row.prompt = self.prompts[tuple(self.requests[row.request].prompt)]
        self.prompt_pages[prompt].num_rows -= 1
        self.release_prompt(prompt)

    def release_prompt(self, number: int) -> None:
        """Free the pages of a prompt, unless a row uses them or the next row will."""
        prompt = self.prompt_pages.get(number)
        is_next = bool(self.waiting) and self.waiting[0].prompt == number
        if prompt is not None and prompt.num_rows == 0 and not is_next:
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
            self.on_end(row)
        self.state[:, : len(kept)] = self.state[:, kept]
        self.table[: len(kept)] = self.table[kept]
        self.state[ALIVE, len(kept) :] = 0
        self.active = [self.active[column] for column in kept]
        return ended

    def on_end(self, row: Row) -> None:
        """Called for a row that ended."""
        self.release_pages(row)

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
