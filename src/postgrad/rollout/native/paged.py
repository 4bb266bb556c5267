"""Continuous batching on a CUDA device.

The rows of a prompt share the pages of its keys and values. The state of the rows is on the
device; the host reads it every STEPS_PER_SYNC decode steps.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from weakref import WeakValueDictionary

import numpy as np
import torch

from postgrad import phases
from postgrad.rollout.engine import Completion
from postgrad.rollout.native.decoder import Decoder
from postgrad.rollout.native.paged_prefill import Span, prefill
from postgrad.rollout.native.paged_rows import PagedRow, SharedPrompt
from postgrad.rollout.native.paged_slots import draw_uniforms, read_completions, write_sampling
from postgrad.rollout.native.pages import fit_pages, graph_rows, num_pages
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.native.tables import (
    ALIVE,
    FIELDS,
    LIMIT,
    NUM_EARLIER,
    NUM_OWN,
    PREFILL_ROWS,
    SHARED_PAGES,
    STEPS_PER_SYNC,
    BufferSizes,
)


class PagedDecodeLoop:
    """Decodes the rows of all jobs; each job has its own sampling parameters.

    Args:
        decoder: has the model and the buffers.
        jobs: prompts with seeds; equal prompts share their pages.
        max_rows: rows that decode at the same time.
        cache_bytes: memory for keys and values.
        max_context: the model's context in tokens.
        stream_rows: rows at a time if more jobs are added later; 0: there are no others.
        growth: how much longer than these the rows of later jobs may be.

    Raises:
        RunError: one row does not fit in the cache.
    """

    def __init__(
        self,
        decoder: Decoder,
        jobs: Sequence[Job],
        max_rows: int,
        cache_bytes: int,
        max_context: int,
        stream_rows: int = 0,
        growth: int = 1,
    ) -> None:
        self.decoder = decoder
        self.jobs = list(jobs)
        self.stream_rows = stream_rows
        self.growth = growth
        self.lengths_at_stop: dict[int, int] = {}  # by slot: tokens of a row with a stop string
        # All prompts that rows need, by prompt_key; those in pages are in the list, too.
        self.prompts: WeakValueDictionary[Hashable, SharedPrompt] = WeakValueDictionary()
        self.prompts_in_pages: list[SharedPrompt] = []
        self.waiting: deque[PagedRow] = deque()
        self.active: list[PagedRow] = []
        num_rows = sum(len(job.request.seeds) for job in jobs)
        self.capacity = graph_rows(min(max_rows, max(num_rows, stream_rows)))
        self.reserve(self._buffer_sizes(cache_bytes, max_context))

    def reserve(self, sizes: BufferSizes) -> None:
        """Reserve the decoder's buffers; all pages are free."""
        self.decoder.reserve(sizes)
        sizes = self.decoder.sizes
        self.free_pages = list(range(sizes.pages - 1, -1, -1))
        self.state = np.zeros((FIELDS, sizes.rows), dtype=np.int32)
        self.table = np.zeros((sizes.rows, sizes.row_pages), dtype=np.int32)

    def _buffer_sizes(self, cache_bytes: int, max_context: int) -> BufferSizes:
        """Return the buffers for the jobs. Raises RunError."""
        limit = max(job.limit for job in self.jobs)
        prompts = {tuple(job.request.prompt) for job in self.jobs}
        longest_prompt = max(len(prompt) for prompt in prompts)
        longest_row = longest_prompt + limit
        own_pages = num_pages(limit)
        row_pages = own_pages + num_pages(longest_prompt - 1)
        if self.stream_rows:  # a later prompt is an earlier one with a part of its response
            row_pages += 1
            own_pages = row_pages
        prompt_pages = sum(num_pages(len(prompt) - 1) for prompt in prompts)
        wanted = self.capacity * own_pages + prompt_pages + 1
        num_rows = sum(len(job.request.seeds) for job in self.jobs)
        return BufferSizes(
            rows=self.buffer_rows(),
            row_pages=_round_up(row_pages * self.growth, 8),
            slots=1 << (max(num_rows, self.stream_rows) - 1).bit_length(),
            length=limit,
            positions=min(max_context, _round_up(longest_row * self.growth, 256)),
            pages=fit_pages(self.decoder, wanted, row_pages, cache_bytes, longest_row),
        )

    def finish(self) -> list[list[Completion]]:
        """Decode until every row has ended; returns the completions of each job."""
        rows: list[PagedRow] = []
        for job in self.jobs:
            for index in range(len(job.request.seeds)):
                rows.append(self.make_row(job, index, slot=len(rows)))
        write_sampling(self.decoder, rows)
        draw_uniforms(self.decoder, rows)
        self.waiting += rows
        while self.waiting or self.active:
            self.advance()
            phases.count(len(rows) - len(self.waiting) - len(self.active), len(rows))
        read_completions(self.decoder, rows, self.lengths_at_stop)
        return [job.completions for job in self.jobs]

    def make_row(self, job: Job, index: int, slot: int) -> PagedRow:
        """Return a row of a job that has not started."""
        key = job.sequences[index].key
        row = PagedRow(job, index, key, slot=slot, prompt=self.share_prompt(job))
        job.sequences[index] = row
        return row

    def share_prompt(self, job: Job) -> SharedPrompt:
        """Return the prompt of a job; jobs with equal keys get the same one."""
        key = self.prompt_key(job)
        prompt = self.prompts.get(key)
        if prompt is None:
            prompt = SharedPrompt(job.request.prompt)
            self.prompts[key] = prompt
        return prompt

    def prompt_key(self, job: Job) -> Hashable:
        """Return what tells prompts apart: their tokens."""
        return tuple(job.request.prompt)

    def advance(self) -> list[PagedRow]:
        """Decode up to STEPS_PER_SYNC tokens per row; returns the rows that ended."""
        decoder = self.decoder
        self.admit()
        steps = self.allocate_pages()
        self.before_steps(steps)
        decoder.state.copy_(torch.from_numpy(self.state))
        decoder.table.copy_(torch.from_numpy(self.table))
        filters = any(row.job.sampling.filters for row in self.active)
        decoder.run(graph_rows(len(self.active)), steps, filters, self.keeps_tops())
        self.state = decoder.state.to("cpu", copy=True).numpy()
        self.after_steps(steps)
        return self.remove_ended()

    def before_steps(self, steps: int) -> None:
        """Called before the active rows decode this many tokens."""

    def after_steps(self, steps: int) -> None:
        """Called when the active rows have decoded up to this many tokens."""
        self.apply_stop_strings()

    def keeps_tops(self) -> bool:
        """Return whether the next steps keep the most likely tokens."""
        return False

    def buffer_rows(self) -> int:
        """Return the rows of the decoder's tables."""
        return max(self.capacity, PREFILL_ROWS if self.prefills_by_rows() else 0)

    def prefills_by_rows(self) -> bool:
        """Return whether decode steps prefill the few tokens of jobs that join others."""
        return self.decoder.captures and self.stream_rows > 0

    def max_steps(self) -> int:
        """Return the largest number of steps until the host reads the state."""
        return STEPS_PER_SYNC

    def admit(self) -> None:
        """Let waiting rows start while rows and pages are free; prefill their new tokens."""
        spans: list[Span] = []
        while self.waiting and len(self.active) < self.capacity:
            row = self.waiting[0]
            if not self.can_start(row):
                break
            self.waiting.popleft()
            num_prompt_pages, num_own_pages = self.pages_to_start(row)
            if not row.prompt.in_pages:
                spans.append(self.prompt_span(row, self.take_pages(num_prompt_pages)))
            row.pages += self.take_pages(num_own_pages)
            self.enter(row)
            if row.num_own > row.num_kept:
                spans.append(self.own_span(row))
        prefill(self.decoder, spans, self.prefills_by_rows())

    def can_start(self, row: PagedRow) -> bool:
        """Return whether there are pages for a row. Every active row may soon need one, too."""
        return self.ensure_free_pages(sum(self.pages_to_start(row)) + 1 + len(self.active))

    def pages_to_start(self, row: PagedRow) -> tuple[int, int]:
        """Return the number of pages that its prompt and the row itself need before it decodes."""
        num_own = num_pages(row.num_own) - len(row.pages)
        return 0 if row.prompt.in_pages else num_pages(row.prompt.num_shared), num_own

    def ensure_free_pages(self, count: int) -> bool:
        """Return whether this many pages are free."""
        return len(self.free_pages) >= count

    def take_pages(self, count: int) -> list[int]:
        return [self.free_pages.pop() for _ in range(count)]

    def prompt_span(self, row: PagedRow, pages: list[int]) -> Span:
        """Give a row's prompt its pages; returns the tokens to compute."""
        prompt = row.prompt
        prompt.pages = pages
        prompt.in_pages = True
        self.prompts_in_pages.append(prompt)
        return Span(prompt.tokens[:-1], pages)

    def own_span(self, row: PagedRow) -> Span:
        """Return the row's own tokens before the last one that are not computed."""
        prompt = row.prompt
        tokens = row.text[prompt.num_shared + row.num_kept : -1]
        pages = prompt.pages + row.pages
        return Span(tokens, pages, len(prompt.pages), prompt.num_shared, row.num_kept)

    def enter(self, row: PagedRow) -> None:
        """Make a row active.

        It starts with the last token of its prompt: the first decode step computes that token's
        key and value and samples the first response token. A row with sampled tokens starts with
        the last of them.
        """
        prompt = row.prompt
        if not row.num_kept:  # a row that continues another takes its place
            prompt.num_rows += 1
        column = len(self.active)
        self.active.append(row)
        self.state[:, column] = (
            row.last_token,  # TOKEN
            len(row.tokens),  # NUM_OWN
            prompt.num_shared,  # NUM_SHARED
            len(prompt.pages),  # SHARED_PAGES
            row.slot,  # SLOT
            row.job.limit,  # LIMIT
            1,  # ALIVE
            row.num_earlier,  # NUM_EARLIER
        )
        pages = prompt.pages + row.pages
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
            steps = min(self.max_steps(), max(int((limits - own).max()), 1))
            ends = earlier + np.minimum(own + steps, limits)
            missing = [
                num_pages(int(end)) - len(row.pages)
                for end, row in zip(ends, self.active, strict=True)
            ]
            if self.ensure_free_pages(sum(count for count in missing if count > 0)):
                break
            if not self.free_unused_prompts():
                self.preempt_last()
        for column, (row, count) in enumerate(zip(self.active, missing, strict=True)):
            for _ in range(count):
                page = self.free_pages.pop()
                self.table[column, self.state[SHARED_PAGES, column] + len(row.pages)] = page
                row.pages.append(page)
        return steps

    def free_unused_prompts(self) -> bool:
        """Free prompts that only waiting rows need; return whether there were any."""
        unused = [prompt for prompt in self.prompts_in_pages if prompt.num_rows == 0]
        for prompt in unused:
            self.free_prompt(prompt)
        return bool(unused)

    def preempt_last(self) -> None:
        """Put the last active row back into the queue; its seed gives the same tokens again."""
        row = self.active.pop()
        self.state[ALIVE, len(self.active)] = 0
        self.release_pages(row)
        self.waiting.appendleft(row)

    def release_pages(self, row: PagedRow) -> None:
        """Free a row's pages, and its prompt's pages when no row needs them soon.

        If the row starts again, it continues no other.
        """
        self.free_pages += row.pages
        row.pages = []
        row.num_kept = 0
        row.num_checked = 0
        prompt = row.prompt
        row.prompt = self.share_prompt(row.job)
        prompt.num_rows -= 1
        self.release_prompt(prompt)

    def release_prompt(self, prompt: SharedPrompt) -> None:
        """Free the pages of a prompt, unless a row uses them or the next row will."""
        is_next = bool(self.waiting) and self.waiting[0].prompt is prompt
        if prompt.in_pages and prompt.num_rows == 0 and not is_next:
            self.free_prompt(prompt)

    def free_prompt(self, prompt: SharedPrompt) -> None:
        """Free the pages of a prompt that no active row uses."""
        self.free_pages += prompt.pages
        prompt.pages = []
        prompt.in_pages = False
        self.prompts_in_pages.remove(prompt)

    def take_rows(self, is_taken: Callable[[PagedRow], bool]) -> list[PagedRow]:
        """Remove rows, waiting or active, and free their pages; returns them."""
        waiting = [row for row in self.waiting if is_taken(row)]
        self.waiting = deque(row for row in self.waiting if not is_taken(row))
        active = [row for row in self.active if is_taken(row)]
        for column, row in enumerate(self.active):
            if is_taken(row):
                self.state[ALIVE, column] = 0
        self.close_gaps()
        for row in [*(row for row in waiting if row.num_kept), *active]:
            self.release_pages(row)  # a waiting row may have the pages of an earlier turn
        for prompt in list(self.prompts_in_pages):
            self.release_prompt(prompt)
        return [*waiting, *active]

    def apply_stop_strings(self) -> None:
        """End the rows in which a stop string was completed since the last call."""
        columns = [i for i, row in enumerate(self.active) if row.job.stops is not None]
        if not columns:
            return
        slots = [self.active[column].slot for column in columns]
        tokens = self.decoder.tokens[torch.tensor(slots, device=self.decoder.device)].cpu().numpy()
        for line, column in enumerate(columns):
            row = self.active[column]
            num_tokens = int(self.state[NUM_OWN, column])
            assert row.job.stops is not None
            end = row.job.stops.find_end(tokens[line, :num_tokens].tolist(), row.num_checked)
            if end:
                self.lengths_at_stop[row.slot] = end
                self.state[ALIVE, column] = 0
            row.num_checked = num_tokens

    def remove_ended(self) -> list[PagedRow]:
        """Remove the rows that ended and close the gaps; returns them."""
        alive = self.state[ALIVE, : len(self.active)] != 0
        ended = [row for row, is_alive in zip(self.active, alive, strict=True) if not is_alive]
        for row in ended:
            self.on_end(row)
        self.close_gaps()
        return ended

    def close_gaps(self) -> None:
        """Remove the rows that are not alive; the others move together."""
        kept = np.nonzero(self.state[ALIVE, : len(self.active)])[0]
        if len(kept) == len(self.active):
            return
        self.state[:, : len(kept)] = self.state[:, kept]
        self.table[: len(kept)] = self.table[kept]
        self.state[ALIVE, len(kept) :] = 0
        self.active = [self.active[column] for column in kept]

    def on_end(self, row: PagedRow) -> None:
        """Called for a row that ended."""
        self.release_pages(row)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
