"""A stream over the paged decode loop: requests join while others decode.

Each turn of a conversation is a new request. The pages of a row that ended are kept. The next turn
continues in them: only its new tokens are computed, in one packed pass with those of other rows.
When pages run out, the kept rows that were not used for longest are given up.
"""

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from postgrad.rollout.engine import Completion, Request, Sampling, check_requests
from postgrad.rollout.native.paged import PagedDecodeLoop
from postgrad.rollout.native.paged_rows import PagedRow
from postgrad.rollout.native.paged_slots import draw_uniforms, read_completions, write_sampling
from postgrad.rollout.native.pages import num_pages
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.native.tables import NUM_OWN
from postgrad.rollout.stops import make_stops
from postgrad.rollout.streams import Finished

if TYPE_CHECKING:
    from postgrad.rollout.native.decoder import Decoder
    from postgrad.rollout.native.engine import NativeEngine


GROWTH = 2  # of the buffers when requests do not fit


class PagedStream:
    """The stream of a native engine on a CUDA device; see streams.Stream.

    The buffers are reserved for the first requests. A request that does not fit into them waits
    until no row decodes, and then begins with larger ones; no row is kept over that. They have
    room for rows of twice the length, so it happens rarely.

    Args:
        engine: has the model.
        decoder: the engine's. While the stream is open, no other call uses it.
        sampling: the same for all rows; without record_kept.
        num_rows: rows at a time.
    """

    patience_s = 0.0

    def __init__(
        self, engine: "NativeEngine", decoder: "Decoder", sampling: Sampling, num_rows: int
    ) -> None:
        self.engine = engine
        self.decoder = decoder
        self.sampling = sampling
        self.num_rows = num_rows
        self.stops = make_stops(engine.tokenizer, sampling)
        self.waiting: deque[Job] = deque()
        self.finished: list[Finished] = []  # rows that ended during `generate`
        self.restarted: list[Hashable] = []  # rows that were preempted in loops before this one
        self.loop: GrowingLoop | None = None

    def __enter__(self) -> "PagedStream":
        # In training mode a model with activation checkpointing ignores the cache.
        self.engine.model.eval()
        self.engine.paged_stream = self
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.model.train()
        self.engine.paged_stream = None
        self.loop = None
        self.decoder.detach_cache()

    @property
    def busy(self) -> bool:
        return bool(self.finished) or self._decodes

    @property
    def _decodes(self) -> bool:
        return bool(self.waiting) or (self.loop is not None and self.loop.busy)

    def add(self, request: Request, keys: Sequence[Hashable]) -> None:
        check_requests([request], self.sampling, self.engine.max_context, self.engine.model.config)
        if request.seeds:
            job = Job(request, self.sampling, stops=self.stops, keys=list(keys))
            self.waiting.append(job)

    @torch.no_grad()
    def poll(self) -> list[Finished]:
        """Let waiting requests join and decode a few tokens; returns the rows that ended."""
        finished = self.finished
        self.finished = []
        return finished + self._decode() if self._decodes else finished

    def _decode(self) -> list[Finished]:
        loop = self.loop
        if loop is None or (not loop.busy and not loop.fits(self.waiting[0])):
            loop = self.loop = self._new_loop()
        loop.use_version(self.engine.weights_version)
        while self.waiting and loop.fits(self.waiting[0]):
            loop.join(self.waiting.popleft())
        assert loop.busy, "a new loop has room for all requests that wait"
        return loop.poll()

    def can_generate(self, requests: Sequence[Request], sampling: Sampling) -> bool:
        """Whether `generate` can take these requests without larger buffers."""
        if sampling.record_kept:
            return False
        jobs = [Job(request, sampling) for request in requests]
        return self.loop is None or all(self.loop.has_room(job) for job in jobs)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return the completions of requests with other sampling parameters.

        They decode beside the stream's own rows; the next poll returns those that ended meanwhile.
        """
        stops = make_stops(self.engine.tokenizer, sampling)
        jobs: list[Job] = []
        places: set[Hashable] = set()
        for request in requests:
            keys: list[Hashable] = [object() for _ in request.seeds]
            jobs.append(Job(request, sampling, stops=stops, keys=keys))
            places |= set(keys)
        self.waiting.extendleft(job for job in reversed(jobs) if job.sequences)
        while places:
            for key, completion in self._decode():
                if key not in places:
                    self.finished.append((key, completion))
                    continue
                places.remove(key)
                self.forget(key)
        return [job.completions for job in jobs]

    def forget(self, key: Hashable) -> None:
        if self.loop is not None:
            self.loop.forget(key)

    def refresh_weights(self) -> dict[Hashable, int]:
        # The decoder reads the parameters themselves; there is no copy to refresh.
        self.engine.weights_version += 1
        ended = {key: len(completion.tokens) for key, completion in self.finished}
        return ended if self.loop is None else self.loop.num_tokens() | ended

    def take_restarted(self) -> list[Hashable]:
        if self.loop is not None:
            self.restarted += self.loop.restarted
            self.loop.restarted = []
        restarted = self.restarted
        self.restarted = []
        return restarted

    def cancel(self, keys: Collection[Hashable]) -> None:
        removed = set(keys)
        self.waiting = deque(job for job in self.waiting if removed.isdisjoint(job.keys))
        if self.loop is not None:
            self.loop.cancel(removed)

    def _new_loop(self) -> "GrowingLoop":
        """Return a loop with room for all waiting requests. Raises RunError."""
        if self.loop is not None:
            self.restarted += self.loop.restarted
        num_rows = max(self.num_rows, sum(len(job.request.seeds) for job in self.waiting))
        return GrowingLoop(
            self.decoder,
            self.waiting,
            self.engine.max_rows,
            self.engine.cache_bytes(),
            self.engine.max_context,
            stream_rows=num_rows,
            growth=1 if self.loop is None else GROWTH,
        )


@dataclass
class KeptRow:
    """A row that ended and the tokens whose keys and values are in its pages and its prompt's."""

    tokens: list[int]
    row: PagedRow
    version: int  # of the weights that computed them


class GrowingLoop(PagedDecodeLoop):
    """A decode loop whose rows join one job after the other and are kept when they end.

    The jobs that it is made with are those that its buffers must fit; they join like others.
    """

    def __init__(self, *arguments: object, stream_rows: int, growth: int) -> None:
        super().__init__(*arguments, stream_rows=stream_rows, growth=growth)  # type: ignore[arg-type]
        self.jobs.clear()
        self.free_slots = list(range(self.decoder.sizes.slots))
        self.weights_version = 0
        self.kept: dict[Hashable, KeptRow] = {}  # least recently used first
        self.restarted: list[Hashable] = []  # rows that were preempted

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def fits(self, job: Job) -> bool:
        """Whether one more job can join now."""
        return len(job.sequences) <= len(self.free_slots) and self.has_room(job)

    def has_room(self, job: Job) -> bool:
        """Whether the buffers have room for the job when no other is there."""
        sizes = self.decoder.sizes
        prompt = job.request.prompt
        pages = num_pages(len(prompt) - 1) + num_pages(job.limit)
        return (
            len(job.request.seeds) <= sizes.slots
            and job.limit <= sizes.length
            and pages <= sizes.row_pages
            and pages < sizes.pages
            and len(prompt) + job.limit <= sizes.positions
        )

    def use_version(self, version: int) -> None:
        """Note the version of the weights; what is kept of another one is dropped.

        Active rows keep the keys and values of their prompts; rows that wait compute them again.
        """
        if version == self.weights_version:
            return
        self.weights_version = version
        for key in list(self.kept):
            self.forget(key)
        for row in self.waiting:
            row.prompt = self.share_prompt(row.job)
        for prompt in list(self.prompts_in_pages):
            self.release_prompt(prompt)

    def prompt_key(self, job: Job) -> Hashable:
        """Return the prompt's tokens and the weights that compute it."""
        return self.weights_version, super().prompt_key(job)

    def join(self, job: Job) -> None:
        """Add a job that fits."""
        job.version = self.weights_version
        rows: list[PagedRow] = []
        for index, key in enumerate(row.key for row in job.sequences):
            rows.append(self.make_row(job, index, self.free_slots.pop()))
            if key in self.kept:  # it is needed soon: give up others first
                self.kept[key] = self.kept.pop(key)
        write_sampling(self.decoder, rows)
        draw_uniforms(self.decoder, rows)
        self.waiting += rows

    def poll(self) -> list[Finished]:
        """Decode a few tokens; returns the rows that ended."""
        ended = self.advance()
        if not ended:
            return []
        finished: list[Finished] = []
        completions = read_completions(self.decoder, ended, self.lengths_at_stop)
        for row, completion in zip(ended, completions, strict=True):
            key = self.key_of(row)
            self.keep(key, row, completion)
            finished.append((key, completion))
            self.lengths_at_stop.pop(row.slot, None)
            self.free_slots.append(row.slot)
        return finished

    def key_of(self, row: PagedRow) -> Hashable:
        return row.key

    def num_tokens(self) -> dict[Hashable, int]:
        """Return the number of sampled tokens of each active row."""
        counts = self.state[NUM_OWN, : len(self.active)].tolist()
        return {self.key_of(row): count for row, count in zip(self.active, counts, strict=True)}

    def preempt_last(self) -> None:
        self.restarted.append(self.key_of(self.active[-1]))
        super().preempt_last()

    def cancel(self, keys: Collection[Hashable]) -> None:
        """Remove the rows of these keys, waiting or active, and free their pages and slots."""
        for row in self.take_rows(lambda row: self.key_of(row) in keys):
            self.lengths_at_stop.pop(row.slot, None)
            self.free_slots.append(row.slot)

    def on_end(self, row: PagedRow) -> None:
        """Do nothing: `keep` decides when the row's tokens are known."""

    def keep(self, key: Hashable, row: PagedRow, completion: Completion) -> None:
        """Keep the pages of a row that ended, without those that hold none of its tokens.

        The key and value of its last token were not computed.
        """
        self.forget(key)
        tokens = [*row.job.request.prompt, *completion.tokens][:-1]
        num_own = len(tokens) - row.prompt.num_shared
        self.free_pages += row.pages[num_pages(num_own) :]
        del row.pages[num_pages(num_own) :]
        self.kept[key] = KeptRow(tokens, row, row.job.version)

    def forget(self, key: Hashable) -> None:
        """Free the pages that are kept for a key, if there are any."""
        if key in self.kept:
            self.release_pages(self.kept.pop(key).row)

    def can_start(self, row: PagedRow) -> bool:
        self.continue_kept(row)
        if super().can_start(row):
            return True
        if not row.num_kept:
            return False
        self.release_pages(row)
        return super().can_start(row)

    def continue_kept(self, row: PagedRow) -> None:
        """Give a waiting row the pages that are kept for its key, if its prompt continues them."""
        key = self.key_of(row)
        kept = self.kept.get(key)
        if kept is None:
            return
        if not self.continues(row, kept):
            self.forget(key)
            return
        del self.kept[key]
        own_prompt = row.prompt
        row.prompt = kept.row.prompt
        row.pages = kept.row.pages
        row.num_kept = len(kept.tokens) - row.prompt.num_shared
        self.release_prompt(own_prompt)

    def continues(self, row: PagedRow, kept: KeptRow) -> bool:
        """Return whether a row can use the pages of a kept row."""
        prompt = row.job.request.prompt
        num_shared = kept.row.prompt.num_shared
        num_own = len(prompt) - 1 - num_shared + row.job.limit
        return (
            kept.version == self.weights_version
            and num_pages(num_shared) + num_pages(num_own) <= self.decoder.sizes.row_pages
            and len(prompt) > len(kept.tokens)
            and prompt[: len(kept.tokens)] == kept.tokens
        )

    def ensure_free_pages(self, count: int) -> bool:
        """Return whether this many pages are free; gives up kept rows if there are fewer."""
        while len(self.free_pages) < count and self.kept:
            self.forget(next(iter(self.kept)))
        return len(self.free_pages) >= count
