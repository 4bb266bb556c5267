"""The decode loop of a server over pages: jobs join and leave while others decode.

The decode steps are those of training rollouts: captured graphs over paged keys and values. The
host reads the new tokens after every few steps and reports them. A row that had to give up its
pages keeps its tokens and continues after them.
"""

from collections.abc import Collection, Hashable
from typing import TYPE_CHECKING

import numpy as np
import torch

from postgrad.model.passes.packing import BLOCK_N as PAGE
from postgrad.rollout.native.live import Report
from postgrad.rollout.native.paged import PagedDecodeLoop
from postgrad.rollout.native.paged_prefill import MAX_CAPTURED_TOKENS, Span, prefill, split_span
from postgrad.rollout.native.paged_rows import PagedRow
from postgrad.rollout.native.paged_slots import LARGEST_UNIFORM, write_sampling
from postgrad.rollout.native.pages import fit_pages, graph_rows, num_pages
from postgrad.rollout.native.sampling import pair_tokens
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.native.tables import (
    ALIVE,
    NUM_OWN,
    STEPS_PER_SYNC,
    BufferSizes,
)
from postgrad.rollout.stops import make_stops

if TYPE_CHECKING:
    from postgrad.rollout.native.decoder import Decoder
    from postgrad.rollout.native.engine import NativeEngine

# Rows up to which the host reads the new tokens after so many steps. Fewer steps give streams
# smaller pieces; more steps cost less time of the host per token.
STEPS_BY_ROWS = ((16, 4), (64, 8))
NO_SLOT = -1  # of a row that waits


class PagedLiveLoop(PagedDecodeLoop):
    """The loop of a server over pages; see live.LiveLoop.

    A row has a slot of the decoder while it decodes. The slots hold the random numbers and results
    of one round of steps only, so their memory does not depend on the context.

    Args:
        engine: has the model; nothing else may use it while the loop is open.
        decoder: the engine's.
        capacity: rows that decode at the same time.
        longest: tokens of prompt and response together.
        cache_bytes: memory for keys and values.
        report: called with the new tokens of each row.

    Raises:
        RunError: one row does not fit in the cache.
    """

    def __init__(
        self,
        engine: "NativeEngine",
        decoder: "Decoder",
        capacity: int,
        longest: int,
        cache_bytes: int,
        report: Report,
    ) -> None:
        self.engine = engine
        self.report = report
        super().__init__(decoder, [], capacity, cache_bytes, longest, stream_rows=capacity)
        self.capacity = capacity
        self.stop_ids = frozenset(engine.stop_ids.tolist())
        self.free_slots = list(range(decoder.sizes.slots))
        self.entered: list[PagedRow] = []  # since the last steps

    def _buffer_sizes(self, cache_bytes: int, max_context: int) -> BufferSizes:
        """Return the buffers for rows of `max_context` tokens. Raises RunError."""
        row_pages = num_pages(max_context) + 1  # prompt and response begin on pages of their own
        rows = self.capacity
        return BufferSizes(
            rows=self.buffer_rows(),
            row_pages=row_pages,
            slots=rows,
            length=STEPS_PER_SYNC,
            positions=max_context,
            pages=fit_pages(
                self.decoder, rows * row_pages + 1, row_pages, cache_bytes, max_context
            ),
        )

    # ---- jobs

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    @property
    def decoding_jobs(self) -> set[Job]:
        return {row.job for row in self.active}

    @property
    def waiting_jobs(self) -> set[Job]:
        return {row.job for row in self.waiting}

    def add(self, job: Job) -> Job:
        """Queue a job; returns it."""
        job.stops = make_stops(self.engine.tokenizer, job.sampling)
        for index in range(len(job.request.seeds)):
            self.waiting.append(self.make_row(job, index, NO_SLOT))
        return job

    def drop(self, jobs: Collection[Job]) -> None:
        """Remove jobs with all their rows, decoding or not."""
        if jobs:
            for row in self.take_rows(lambda row: row.job in jobs):
                self._free_slot(row)

    def step(self) -> None:
        """Let waiting rows join, decode a few tokens per row and report them."""
        if self.busy:
            self.advance()

    def close(self) -> None:
        """Give the memory of a large cache back; its graphs are kept for the next loop."""
        self.decoder.detach_cache()

    def warm_up(self) -> None:
        """Capture the graphs of all row counts and compile packed passes.

        So no request waits for them. Kernels differ for numbers of tokens that 16 divides.
        """
        if self.decoder.captures:
            rows = graph_rows(1)
            while rows <= graph_rows(self.capacity):
                self.decoder.capture(rows)
                rows = graph_rows(rows + 1)
            self.decoder.capture_prefill()
            self._compile_passes()

    def _compile_passes(self) -> None:
        """Run packed passes of made-up tokens, whose pages are free."""
        sizes = self.decoder.sizes
        num_tokens = min(MAX_CAPTURED_TOKENS, sizes.positions, sizes.pages * PAGE) // 16 * 16
        pages = list(range(num_pages(num_tokens)))
        for count in (num_tokens, num_tokens - 1):
            span = Span([0] * count, pages)
            prefill(self.decoder, split_span(span, num_tokens // 2 or 1))

    # ---- rows

    def prompt_key(self, job: Job) -> Hashable:
        """Return the prompt's tokens. A prompt that is scored is shared within its job only."""
        if job.scores_prompt:
            return job
        return super().prompt_key(job)

    def prompt_span(self, row: PagedRow, pages: list[int]) -> Span:
        span = super().prompt_span(row, pages)
        job = row.job
        if not job.scores_prompt or job.prompt_logprobs:
            return span
        compute_logits = self.decoder.compute_logits
        return span._replace(on_states=lambda states: job.score_prompt(states, compute_logits))

    def enter(self, row: PagedRow) -> None:
        row.slot = self.free_slots.pop()
        self.entered.append(row)
        super().enter(row)

    def preempt_last(self) -> None:
        row = self.active[-1]
        super().preempt_last()
        self._free_slot(row)

    def on_end(self, row: PagedRow) -> None:
        super().on_end(row)
        self._free_slot(row)

    def _free_slot(self, row: PagedRow) -> None:
        if row.slot != NO_SLOT:
            self.free_slots.append(row.slot)
            row.slot = NO_SLOT

    # ---- steps

    def max_steps(self) -> int:
        for num_rows, steps in STEPS_BY_ROWS:
            if len(self.active) <= num_rows:
                return steps
        return STEPS_PER_SYNC

    def keeps_tops(self) -> bool:
        return any(row.job.num_top for row in self.active)

    def before_steps(self, steps: int) -> None:
        """Write the sampling parameters of new rows, and the random numbers of the next steps."""
        write_sampling(self.decoder, [row for row in self.entered if row.slot != NO_SLOT])
        self.entered.clear()
        rows = [row for row in self.active if row.job.sampling.temperature > 0.0]
        if not rows:
            return
        uniforms = np.empty((len(rows), steps), dtype=np.float32)
        for line, row in enumerate(rows):
            uniforms[line] = row.random.numbers(steps)
        numbers = torch.from_numpy(np.minimum(uniforms, LARGEST_UNIFORM))
        slots, places = self._places(rows, steps, self.decoder.sizes.length)
        self.decoder.uniforms[slots, places] = numbers.to(self.decoder.device)

    def _places(
        self, rows: list[PagedRow], steps: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots (rows, 1) and the places (rows, steps) of the rows' next tokens."""
        slots = np.array([[row.slot] for row in rows])
        first = np.array([[len(row.tokens)] for row in rows])
        places = (first + np.arange(steps)) % length
        device = self.decoder.device
        return torch.from_numpy(slots).to(device), torch.from_numpy(places).to(device)

    def after_steps(self, steps: int) -> None:
        """Read the new tokens, end rows at their stop strings and stop ids, and report."""
        slots, places = self._places(self.active, steps, self.decoder.sizes.length)
        tokens = self.decoder.tokens[slots, places].tolist()
        logprobs = self.decoder.logprobs[slots, places].tolist()
        if self.keeps_tops():
            self._read_tops(steps)
        for column, row in enumerate(self.active):
            num_new = int(self.state[NUM_OWN, column]) - len(row.tokens)
            row.tokens += tokens[column][:num_new]
            row.logprobs += logprobs[column][:num_new]
            finish, num_removed = self._end_of(row, num_new, bool(self.state[ALIVE, column]))
            if finish:
                self.state[ALIVE, column] = 0
                row.finish = finish
            self.report(row, num_new - num_removed, finish)

    def _end_of(self, row: PagedRow, num_new: int, is_alive: bool) -> tuple[str, int]:
        """Cut a row after a stop string or id among its new tokens.

        Returns why the row has ended ("" if it continues), and how many tokens were removed.
        """
        stops = row.job.stops
        length = len(row.tokens)
        end = stops.find_end(row.tokens, length - num_new) if stops is not None else 0
        if end:
            del row.tokens[end:]
            del row.logprobs[end:]
            del row.top_tokens[end:]
            return "stop", length - end
        if is_alive:
            return "", 0
        return "stop" if row.tokens[-1] in self.stop_ids else "length", 0

    def _read_tops(self, steps: int) -> None:
        """Add the most likely tokens of the last steps to the rows that want them."""
        columns: list[int] = []
        for column, row in enumerate(self.active):
            if row.job.num_top:
                columns.append(column)
        rows = [self.active[column] for column in columns]
        _, places = self._places(rows, steps, STEPS_PER_SYNC)
        index = torch.tensor(columns, device=self.decoder.device)[:, None]
        tokens = self.decoder.top_tokens[index, places].tolist()
        logprobs = self.decoder.top_logprobs[index, places].tolist()
        vocabulary = len(self.decoder.head.weight)
        for line, (column, row) in enumerate(zip(columns, rows, strict=True)):
            count = min(row.job.num_top, vocabulary)
            num_new = int(self.state[NUM_OWN, column]) - len(row.tokens)
            for step in range(num_new):
                row.top_tokens.append(
                    pair_tokens(tokens[line][step][:count], logprobs[line][step][:count])
                )
