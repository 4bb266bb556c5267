"""The store over pages, for CUDA: captured steps decode sequences whose prompts share pages.

The state of the decoding sequences is on the device; the host reads it every few steps. Sampled
tokens stay there until somebody looks: the sequence has ended, is watched or has stop strings.
"""

from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from postgrad.rollout.engine import Sampling
from postgrad.rollout.native.pages import PagePool, Room, fit_pages, graph_rows, num_pages
from postgrad.rollout.native.prefill import Span, prefill, warm_up_prefill
from postgrad.rollout.native.sampling import DRAW, SeededRandom, pair_tokens
from postgrad.rollout.native.sequence import Job, Sequence
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

if TYPE_CHECKING:
    from postgrad.rollout.native.decoder import Decoder

# Lines of the host's table (HOST_FIELDS, rows), beside the state table: what 1,024 rows need at
# each step is computed for all at once.
NUM_PAGES = 0  # of the row's own pages
NUM_DRAWN = 1  # random numbers that are on the device, counted from the first token
IS_READ = 2  # its tokens are read after each step
HAS_FILTERS = 3
HAS_TOPS = 4
HOST_FIELDS = 5

GROWTH = 2  # of the buffers when later requests do not fit
# Watched rows up to which the host reads the new tokens after so many steps. Fewer steps give
# clients smaller pieces; more steps cost less time of the host per token.
STEPS_BY_ROWS = ((16, 4), (64, 8))
LARGEST_TOP_K = 1 << 24  # that float32 represents; no vocabulary is larger
# A number just below 1 may round to 1 in float32, which no cumulative sum exceeds.
LARGEST_UNIFORM = np.float32(1.0 - 2**-24)


class PageStore:
    """The store of an engine over a captured decoder; see scheduler.Store.

    The buffers are reserved for the sequences that wait first. One that does not fit into them
    waits until no other decodes, and then begins with buffers for rows of twice the length; nothing
    is saved over that.

    Args:
        decoder: has the model and the buffers; nothing else may use it meanwhile.
        capacity: sequences that decode at the same time.
        cache_bytes: returns the memory for keys and values.
        max_context: the model's context in tokens.
        joins: later requests join while others decode, and may continue ended turns.
        longest: tokens of prompt and response together, if that is known, which is reserved at
            once. All sequences must be watched then. 0: as above.

    Raises:
        CacheMemoryError: one row does not fit in the cache.
    """

    def __init__(
        self,
        decoder: "Decoder",
        capacity: int,
        cache_bytes: Callable[[], int],
        max_context: int,
        joins: bool = False,
        longest: int = 0,
    ) -> None:
        self.decoder = decoder
        self.capacity = capacity
        self.cache_bytes = cache_bytes
        self.max_context = longest or max_context
        self.joins = joins
        self.longest = longest
        self.random = SeededRandom()
        self.stop_ids = frozenset(decoder.stop_ids.tolist())
        self.pool = PagePool(0)
        self.rooms: dict[Sequence, Room] = {}  # in the order of the state table's columns
        self.free_slots = list(range(capacity))
        self.spans: list[Span] = []  # what the next prefill computes
        if longest:
            self._reserve_buffers(longest, 1, [])

    # ---- buffers

    def has_room(self, jobs: Collection[Job]) -> bool:
        """Return whether jobs need no larger buffers than there are, if there are any."""
        return not self.pool.num_pages or all(map(self._fits, jobs))

    def _fits(self, job: Job) -> bool:
        """Return whether the buffers have room for a job when no other is there."""
        sizes = self.decoder.sizes
        num_prompt = len(job.request.prompt)
        row_pages = num_pages(num_prompt - 1) + num_pages(job.limit)
        return (
            (bool(self.longest) or job.limit <= sizes.length)
            and row_pages <= sizes.row_pages
            and row_pages < self.pool.num_pages
            and num_prompt + job.limit <= sizes.positions
        )

    def _reserve_for(self, waiting: Collection[Sequence]) -> None:
        """Reserve buffers for all waiting sequences. Raises CacheMemoryError."""
        jobs = {sequence.job for sequence in waiting}
        prompts = {_prompt_key(job): len(job.request.prompt) for job in jobs}
        lengths = list(prompts.values())
        self._reserve_buffers(max(job.limit for job in jobs), max(lengths), lengths)

    def _reserve_buffers(self, limit: int, longest_prompt: int, prompts: Collection[int]) -> None:
        """Reserve the decoder's buffers; all pages are free then. Raises CacheMemoryError.

        Args:
            limit: the largest number of tokens of a response.
            longest_prompt: its tokens.
            prompts: the tokens of each prompt that should be in pages at the same time.
        """
        growth = GROWTH if self.pool.num_pages else 1
        own_pages = num_pages(limit)
        row_pages = own_pages + num_pages(longest_prompt - 1)
        if self.joins:  # a later prompt is an earlier one with a part of its response
            row_pages += 1
            own_pages = row_pages
        rows = graph_rows(self.capacity)
        wanted = rows * own_pages + sum(num_pages(length - 1) for length in prompts) + 1
        longest_row = longest_prompt + limit
        length = _round_up(limit, DRAW)
        sizes = BufferSizes(
            rows=max(rows, PREFILL_ROWS if self.prefills_by_rows else 0),
            row_pages=_round_up(row_pages * growth, 8),
            slots=self.capacity,
            length=min(length, 2 * DRAW) if self.longest else length,
            positions=min(self.max_context, _round_up(longest_row * growth, 256)),
            pages=fit_pages(self.decoder, wanted, row_pages, self.cache_bytes(), longest_row),
        )
        self.decoder.reserve(sizes)
        sizes = self.decoder.sizes  # they may be larger
        self.pool = PagePool(sizes.pages)
        self.state = np.zeros((FIELDS, sizes.rows), dtype=np.int32)
        self.table = np.zeros((sizes.rows, sizes.row_pages), dtype=np.int32)
        self.host = np.zeros((HOST_FIELDS, sizes.rows), dtype=np.int32)

    @property
    def prefills_by_rows(self) -> bool:
        """Whether decode steps prefill the few tokens of requests that join others."""
        return self.decoder.captures and self.joins

    @torch.no_grad()
    def warm_up(self) -> None:
        """Capture the graphs of all row counts and compile packed passes.

        So no request waits for them.
        """
        decoder = self.decoder
        if not decoder.captures:
            return
        rows = graph_rows(1)
        while rows <= graph_rows(self.capacity):
            decoder.capture(rows)
            rows = graph_rows(rows + 1)
        decoder.capture_prefill()
        warm_up_prefill(decoder)

    def close(self) -> None:
        self.decoder.detach_cache()  # its graphs are kept for the next store

    # ---- room

    def start(self, waiting: Collection[Sequence]) -> bool:
        sequence = next(iter(waiting))
        if not self.pool.num_pages or (self.joins and not self._fits(sequence.job)):
            if self.rooms:
                return False
            self._reserve_for(waiting)
        if len(self.rooms) == self.capacity:
            return False
        sequence.job.find_pictures(self.decoder.model)
        room = self._continue_turn(sequence) or self._begin(sequence)
        if room is None:
            return False
        if sequence.num_missing:
            self.spans.append(_own_span(sequence, room))
            sequence.num_computed += sequence.num_missing
        self._add_column(sequence, room)
        return True

    def _continue_turn(self, sequence: Sequence) -> Room | None:
        """Return the pages of the turn that a sequence continues, with those it needs more.

        None if there is no such turn, or too few pages. The saved turn of its key is gone then.
        """
        turn = self.pool.take_turn(sequence.key)
        if turn is None:
            return None
        num_own = sequence.num_before - turn.room.prompt.num_shared + sequence.job.limit
        row_pages = len(turn.room.prompt.pages) + num_pages(num_own)
        fits = turn.starts(sequence.text) and row_pages <= self.decoder.sizes.row_pages
        if fits and self._take_pages(sequence, turn.room):
            sequence.num_computed = len(turn.tokens)
            return turn.room
        self.pool.release(turn.room)
        return None

    def _begin(self, sequence: Sequence) -> Room | None:
        """Return pages for a sequence that shares its job's prompt; None if there are too few."""
        job = sequence.job
        room = Room(self.pool.share(_prompt_key(job), job.request.prompt))
        if not self._take_pages(sequence, room):
            self.pool.release(room)
            return None
        sequence.num_computed = room.prompt.num_shared
        return room

    def _take_pages(self, sequence: Sequence, room: Room) -> bool:
        """Give a sequence the pages that it needs before it decodes; False if there are too few.

        Every row may soon need one more. The prompt is computed by the next prefill, if it is new.
        """
        prompt = room.prompt
        num_prompt = 0 if prompt.in_pages else num_pages(prompt.num_shared)
        num_own = num_pages(sequence.num_before - prompt.num_shared) - len(room.pages)
        if not self.pool.make_free(num_prompt + num_own + 1 + len(self.rooms)):
            return False
        if not prompt.in_pages:
            prompt.in_pages = True
            prompt.pages = self.pool.take(num_prompt)
            self.spans.append(self._prompt_span(sequence.job, prompt.pages))
        room.pages += self.pool.take(num_own)
        return True

    def _prompt_span(self, job: Job, pages: list[int]) -> Span:
        span = Span(job.request.prompt[:-1], pages, pictures=job.pictures)
        if not job.scores_prompt or job.prompt_logprobs:
            return span
        compute_logits = self.decoder.compute_logits
        return span._replace(on_states=lambda states: job.score_prompt(states, compute_logits))

    def _add_column(self, sequence: Sequence, room: Room) -> None:
        """Add a row to the tables.

        It starts with the last token of its text: the first decode step computes that token's key
        and value and samples the next one.
        """
        prompt = room.prompt
        job = sequence.job
        column = len(self.rooms)
        self.rooms[sequence] = room
        sequence.slot = self.free_slots.pop()
        self.state[:, column] = (
            sequence.last_token,  # TOKEN
            sequence.num_tokens,  # NUM_OWN
            prompt.num_shared,  # NUM_SHARED
            len(prompt.pages),  # SHARED_PAGES
            sequence.slot,  # SLOT
            job.limit,  # LIMIT
            1,  # ALIVE
            len(job.request.prompt) - len(prompt.tokens),  # NUM_EARLIER
            job.pictures.offset if job.pictures else 0,  # ROTARY_OFFSET
        )
        self.host[:, column] = (
            len(room.pages),  # NUM_PAGES
            sequence.num_tokens,  # NUM_DRAWN
            job.is_watched or job.stops is not None,  # IS_READ
            job.sampling.filters,  # HAS_FILTERS
            job.num_top > 0,  # HAS_TOPS
        )
        pages = prompt.pages + room.pages
        self.table[column, : len(pages)] = pages

    def reserve(self, running: Collection[Sequence]) -> int:
        num_rows = len(self.rooms)
        state = self.state[:, :num_rows]
        own, limits = state[NUM_OWN], state[LIMIT]
        steps = min(self._max_steps(), max(int((limits - own).max()), 1))
        ends = state[NUM_EARLIER] + np.minimum(own + steps, limits)
        missing = num_pages(ends) - self.host[NUM_PAGES, :num_rows]
        columns = np.nonzero(missing > 0)[0]
        if not self.pool.make_free(int(missing[columns].sum())):
            return 0
        rooms = list(self.rooms.values())
        counts = missing[columns]
        firsts = state[SHARED_PAGES, columns] + self.host[NUM_PAGES, columns]
        places = zip(columns.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        for column, first, count in places:
            pages = self.pool.take(count)
            self.table[column, first : first + count] = pages
            rooms[column].pages += pages
        self.host[NUM_PAGES, columns] += counts
        return steps

    def _max_steps(self) -> int:
        """Return the largest number of steps until the host reads the state."""
        if self.longest:
            for num_rows, steps in STEPS_BY_ROWS:
                if len(self.rooms) <= num_rows:
                    return steps
        return STEPS_PER_SYNC

    def release(self, leaving: Collection[Sequence]) -> None:
        if not leaving:
            return
        gone = set(leaving)
        left = [column for column, row in enumerate(self.rooms) if row not in gone]
        self.state[:, : len(left)] = self.state[:, left]
        self.table[: len(left)] = self.table[left]
        self.host[:, : len(left)] = self.host[:, left]
        self.state[ALIVE, len(left) :] = 0
        for sequence in leaving:
            room = self.rooms.pop(sequence)
            self.free_slots.append(sequence.slot)
            sequence.slot = -1
            sequence.num_computed = 0
            # Keys of several weights are not continued.
            if sequence.finish and sequence.key is not None and len(sequence.versions) == 1:
                self.pool.save_turn(sequence.key, sequence.text[:-1], room)
            else:
                self.pool.release(room)

    def forget(self, owner: Hashable) -> None:
        self.pool.forget(owner)

    def reload_weights(self) -> None:
        self.pool.forget_all()  # the decoder reads the parameters themselves

    # ---- steps

    def prefill(self, starting: Collection[Sequence]) -> None:
        if not starting:
            return
        self._write_sampling(starting)
        spans, self.spans = self.spans, []
        prefill(self.decoder, spans, self.prefills_by_rows)

    def decode(self, running: Collection[Sequence], steps: int) -> None:
        decoder = self.decoder
        rows = list(self.rooms)
        self._draw(rows, steps)
        decoder.state.copy_(torch.from_numpy(self.state))
        decoder.table.copy_(torch.from_numpy(self.table))
        host = self.host[:, : len(rows)]
        has_tops = bool(host[HAS_TOPS].any())
        decoder.run(graph_rows(len(rows)), steps, bool(host[HAS_FILTERS].any()), has_tops)
        self.state = decoder.state.to("cpu", copy=True).numpy()
        state = self.state[:, : len(rows)]
        for row, num_tokens in zip(rows, state[NUM_OWN].tolist(), strict=True):
            row.num_tokens = num_tokens
        if has_tops:
            self._read_tops(np.nonzero(host[HAS_TOPS])[0].tolist(), rows)
        is_read = (state[ALIVE] == 0) | (host[IS_READ] > 0)
        self._read([rows[column] for column in np.nonzero(is_read)[0].tolist()])

    def _draw(self, rows: list[Sequence], steps: int) -> None:
        """Write the random numbers of the next steps, and some more, from the rows' seeds.

        They are drawn in large parts, because each part takes the host some time.
        """
        drawn = self.host[NUM_DRAWN, : len(rows)]
        needed = self.state[[NUM_OWN, LIMIT], : len(rows)] + [[steps], [0]]
        columns = np.nonzero(drawn < needed.min(0))[0]
        if not len(columns):
            return
        firsts = drawn[columns].tolist()
        rows = [rows[column] for column in columns.tolist()]
        numbers = np.empty((len(rows), DRAW), dtype=np.float32)
        for line, row, first in zip(numbers, rows, firsts, strict=True):
            line[:] = self.random.draw(row.seed, first, DRAW)
        drawn[columns] += DRAW
        numbers = torch.from_numpy(np.minimum(numbers, LARGEST_UNIFORM))
        places = self._places(rows, firsts, DRAW, self.decoder.sizes.length)
        self.decoder.uniforms[places] = numbers.to(self.decoder.device)

    def _write_sampling(self, rows: Collection[Sequence]) -> None:
        """Write the sampling parameters of rows."""
        settings = torch.tensor([_sampling_fields(row.job.sampling) for row in rows])
        slots = torch.tensor([row.slot for row in rows], device=self.decoder.device)
        self.decoder.sampling[slots] = settings.to(self.decoder.device)

    def _read(self, rows: list[Sequence]) -> None:
        """Give rows the tokens and log-probs that they have on the device only."""
        if not rows:
            return
        decoder = self.decoder
        firsts = [len(row.tokens) for row in rows]
        counts = [row.num_tokens - first for row, first in zip(rows, firsts, strict=True)]
        index = self._places(rows, firsts, max(counts), decoder.sizes.length)
        tokens = decoder.tokens[index].cpu().numpy()
        logprobs = decoder.logprobs[index].cpu().numpy()
        for line, (row, count) in enumerate(zip(rows, counts, strict=True)):
            row.append(
                tokens[line, :count].tolist(), logprobs[line, :count].tolist(), self.stop_ids
            )

    def _read_tops(self, columns: list[int], rows: list[Sequence]) -> None:
        """Add the most likely tokens of the last steps to the rows of these columns."""
        decoder = self.decoder
        rows = [rows[column] for column in columns]
        firsts = [len(row.tokens) for row in rows]
        _, places = self._places(rows, firsts, STEPS_PER_SYNC, STEPS_PER_SYNC)
        index = torch.tensor(columns, device=decoder.device)[:, None], places
        tokens = decoder.top_tokens[index].tolist()
        logprobs = decoder.top_logprobs[index].tolist()
        vocabulary = len(decoder.head.weight)
        for line, row in enumerate(rows):
            count = min(row.job.num_top, vocabulary)
            for step in range(row.num_tokens - len(row.tokens)):
                row.top_tokens.append(
                    pair_tokens(tokens[line][step][:count], logprobs[line][step][:count])
                )

    def _places(
        self, rows: list[Sequence], firsts: list[int], count: int, length: int
    ) -> tuple[Tensor, Tensor]:
        """Return the slots (rows, 1) and places (rows, count) of the rows' tokens from the first.

        Token n is at place n % length.
        """
        pairs = torch.tensor([[row.slot for row in rows], firsts], device=self.decoder.device)
        slots, first = pairs[:, :, None]
        return slots, (first + torch.arange(count, device=self.decoder.device)) % length


def _prompt_key(job: Job) -> Hashable:
    """Return what jobs have in common that share the pages of their prompt."""
    return job if job.scores_prompt else (tuple(job.request.prompt), job.request.images)


def _own_span(sequence: Sequence, room: Room) -> Span:
    """Return a sequence's tokens before the last one that are neither shared nor computed."""
    prompt = room.prompt
    tokens = sequence.text[sequence.num_computed : -1]
    num_own = sequence.num_computed - prompt.num_shared
    pages = prompt.pages + room.pages
    pictures = sequence.job.pictures
    return Span(tokens, pages, len(prompt.pages), prompt.num_shared, num_own, pictures=pictures)


def _sampling_fields(sampling: Sampling) -> list[float]:
    """Return one line of the decoder's sampling table."""
    inverse_temperature = 1.0 / sampling.temperature if sampling.temperature else 0.0
    top_k = min(sampling.top_k, LARGEST_TOP_K)
    return [inverse_temperature, float(top_k), sampling.top_p, sampling.min_p]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
