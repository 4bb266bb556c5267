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

from postgrad.rollout.engine import (
    Completion,
    Request,
    Sampling,
    check_context,
    max_row_tokens,
    token_limit,
)
from postgrad.rollout.native.decoder import ALIVE, NUM_OWN
from postgrad.rollout.native.paged import PagedDecodeLoop, Row
from postgrad.rollout.native.pages import num_pages
from postgrad.rollout.stops import make_stops
from postgrad.rollout.streams import Finished

if TYPE_CHECKING:
    from postgrad.rollout.native.decoder import Decoder
    from postgrad.rollout.native.engine import NativeEngine


GROWTH = 2  # of the buffers when requests do not fit
NO_REQUEST = Request([], [])


class PagedStream:
    """The stream of a native engine on a CUDA device; see streams.Stream.

    The buffers are reserved for the first requests. A request that does not fit into them waits
    until no row decodes, and then begins with larger ones; no row is kept over that. They have
    room for rows of twice the length, so it happens rarely.

    Args:
        engine: has the model.
        decoder: the engine's. While the stream is open, no other call uses it.
        sampling: the same for all rows; without top-p, top-k and min-p.
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
        self.waiting: deque[tuple[Request, list[Hashable]]] = deque()
        self.loop: GrowingLoop | None = None

    def __enter__(self) -> "PagedStream":
        # In training mode a model with activation checkpointing ignores the cache.
        self.engine.model.eval()
        self.decoder.in_use = True
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.model.train()
        self.decoder.in_use = False
        self.loop = None
        self.decoder.detach_cache()

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or (self.loop is not None and self.loop.busy)

    def add(self, request: Request, keys: Sequence[Hashable]) -> None:
        check_context([request], self.sampling, self.engine.max_context)
        if request.seeds:
            self.waiting.append((request, list(keys)))

    @torch.no_grad()
    def poll(self) -> list[Finished]:
        """Let waiting requests join and decode a few tokens; returns the rows that ended."""
        if not self.busy:
            return []
        loop = self.loop
        if loop is None or (not loop.busy and not loop.fits(self.waiting[0][0])):
            loop = self.loop = self._new_loop()
        loop.use_version(self.engine.weights_version)
        while self.waiting and loop.fits(self.waiting[0][0]):
            loop.join(*self.waiting.popleft())
        assert loop.busy, "a new loop has room for all requests that wait"
        return loop.poll()

    def forget(self, key: Hashable) -> None:
        if self.loop is not None:
            self.loop.forget(key)

    def refresh_weights(self) -> dict[Hashable, int]:
        # The decoder reads the parameters themselves; there is no copy to refresh.
        self.engine.weights_version += 1
        return {} if self.loop is None else self.loop.num_tokens()

    def take_restarted(self) -> list[Hashable]:
        if self.loop is None:
            return []
        restarted = self.loop.restarted
        self.loop.restarted = []
        return restarted

    def cancel(self, keys: Collection[Hashable]) -> None:
        removed = set(keys)
        self.waiting = deque(entry for entry in self.waiting if removed.isdisjoint(entry[1]))
        if self.loop is not None:
            self.loop.cancel(removed)

    def _new_loop(self) -> "GrowingLoop":
        """Return a loop with room for all waiting requests. Raises RunError."""
        requests = [request for request, _ in self.waiting]
        num_rows = max(self.num_rows, sum(len(request.seeds) for request in requests))
        return GrowingLoop(
            self.decoder,
            requests,
            self.sampling,
            self.engine.max_rows,
            self.engine.cache_bytes(),
            self.engine.max_context,
            self.stops,
            stream_rows=num_rows,
            growth=1 if self.loop is None else GROWTH,
        )


@dataclass
class KeptRow:
    """A row that ended and the tokens whose keys and values are in its pages and its prompt's."""

    tokens: list[int]
    row: Row
    version: int  # of the weights that computed them


class GrowingLoop(PagedDecodeLoop):
    """A decode loop whose rows join one request after the other and are kept when they end.

    The requests that it is made with are those that its buffers must fit; they join like others.
    """

    def __init__(self, *arguments: object, stream_rows: int, growth: int) -> None:
        super().__init__(*arguments, stream_rows=stream_rows, growth=growth)  # type: ignore[arg-type]
        self.requests.clear()
        self.limits.clear()
        self.prompts.clear()
        self.all_rows.clear()
        self.waiting.clear()
        self.free_slots = list(range(self.decoder.sizes.slots))
        self.weights_version = 0
        # By the number of the request:
        self.keys: list[list[Hashable]] = []
        self.versions: list[int] = []
        self.unswept: set[int] = set()  # requests that `sweep` has not dropped
        self.kept: dict[Hashable, KeptRow] = {}  # least recently used first
        self.restarted: list[Hashable] = []  # rows that were preempted

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def fits(self, request: Request) -> bool:
        """Whether the buffers have room for one more request."""
        sizes = self.decoder.sizes
        limit = token_limit(request, self.sampling)
        pages = num_pages(len(request.prompt) - 1) + num_pages(limit)
        return (
            len(request.seeds) <= len(self.free_slots)
            and limit <= sizes.length
            and pages <= sizes.row_pages
            and pages < sizes.pages
            and max_row_tokens(request, self.sampling) <= sizes.positions
        )

    def use_version(self, version: int) -> None:
        """Note the version of the weights; what is kept of another one is dropped."""
        if version != self.weights_version:
            self.weights_version = version
            for key in list(self.kept):
                self.forget(key)

    def join(self, request: Request, keys: list[Hashable]) -> None:
        """Add a request that fits."""
        number = len(self.requests)
        self.requests.append(request)
        self.limits.append(token_limit(request, self.sampling))
        self.keys.append(keys)
        self.versions.append(self.weights_version)
        self.unswept.add(number)
        prompt = self.prompts.setdefault(tuple(request.prompt), number)
        rows: list[Row] = []
        for index, key in enumerate(keys):
            rows.append(Row(number, index, self.free_slots.pop(), prompt))
            if key in self.kept:  # it is needed soon: give up others first
                self.kept[key] = self.kept.pop(key)
        self.draw_uniforms(rows)
        self.waiting += rows

    def poll(self) -> list[Finished]:
        """Decode a few tokens; returns the rows that ended."""
        ended = self.advance()
        if not ended:
            return []
        finished: list[Finished] = []
        for row, completion in zip(ended, self.collect(ended), strict=True):
            key = self.key_of(row)
            self.keep(key, row, completion)
            finished.append((key, completion))
            self.lengths_at_stop.pop(row.slot, None)
            self.free_slots.append(row.slot)
        if len(self.unswept) > 4 * self.decoder.sizes.slots:
            self.sweep()
        return finished

    def sweep(self) -> None:
        """Drop the requests and prompts that no row needs, so that a long stream does not grow."""
        rows = [*self.waiting, *self.active, *(kept.row for kept in self.kept.values())]
        needed = {number for row in rows for number in (row.request, row.prompt)}
        needed |= {self.prompts[tuple(self.requests[row.request].prompt)] for row in rows}
        needed |= set(self.prompt_pages)
        for number in self.unswept - needed:
            self.requests[number] = NO_REQUEST
            self.keys[number] = []
        self.unswept &= needed
        self.prompts = {tokens: n for tokens, n in self.prompts.items() if n in needed}

    def key_of(self, row: Row) -> Hashable:
        return self.keys[row.request][row.index]

    def num_tokens(self) -> dict[Hashable, int]:
        """Return the number of sampled tokens of each active row."""
        counts = self.state[NUM_OWN, : len(self.active)].tolist()
        return {self.key_of(row): count for row, count in zip(self.active, counts, strict=True)}

    def preempt_last(self) -> None:
        self.restarted.append(self.key_of(self.active[-1]))
        super().preempt_last()

    def cancel(self, keys: Collection[Hashable]) -> None:
        """Remove the rows of these keys, waiting or active, and free their pages and slots."""
        removed = [row for row in self.waiting if self.key_of(row) in keys]
        self.waiting = deque(row for row in self.waiting if self.key_of(row) not in keys)
        for row in removed:
            if row.num_kept:  # it has the pages of an earlier turn
                self.release_pages(row)
        for column, row in enumerate(self.active):
            if self.key_of(row) in keys:
                self.state[ALIVE, column] = 0
        ended = self.remove_ended()
        for row in ended:
            self.release_pages(row)
        for row in [*removed, *ended]:
            self.lengths_at_stop.pop(row.slot, None)
            self.free_slots.append(row.slot)
        for number in list(self.prompt_pages):
            self.release_prompt(number)

    def on_end(self, row: Row) -> None:
        """Do nothing: `keep` decides when the row's tokens are known."""

    def keep(self, key: Hashable, row: Row, completion: Completion) -> None:
        """Keep the pages of a row that ended, without those that hold none of its tokens.

        The key and value of its last token were not computed.
        """
        self.forget(key)
        tokens = [*self.requests[row.request].prompt, *completion.tokens][:-1]
        num_own = len(tokens) + 1 - len(self.requests[row.prompt].prompt)
        self.free_pages += row.pages[num_pages(num_own) :]
        del row.pages[num_pages(num_own) :]
        self.kept[key] = KeptRow(tokens, row, self.versions[row.request])

    def forget(self, key: Hashable) -> None:
        """Free the pages that are kept for a key, if there are any."""
        if key in self.kept:
            self.release_pages(self.kept.pop(key).row)

    def can_start(self, row: Row) -> bool:
        self.continue_kept(row)
        if super().can_start(row):
            return True
        if not row.num_kept:
            return False
        self.release_pages(row)
        return super().can_start(row)

    def continue_kept(self, row: Row) -> None:
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
        row.num_kept = len(kept.tokens) + 1 - len(self.requests[row.prompt].prompt)
        self.release_prompt(own_prompt)

    def continues(self, row: Row, kept: KeptRow) -> bool:
        """Return whether a row can use the pages of a kept row."""
        prompt = self.requests[row.request].prompt
        num_shared = len(self.requests[kept.row.prompt].prompt) - 1
        num_own = len(prompt) - 1 - num_shared + self.limits[row.request]
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
