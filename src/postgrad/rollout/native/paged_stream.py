"""A stream over the paged decode loop: requests join while others decode.

Each turn of a conversation is a new request. Its prompt, the conversation so far, is computed again
in one packed pass; decoding of the other rows goes on in between.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from postgrad.rollout.engine import Request, Sampling, check_context, max_row_tokens, token_limit
from postgrad.rollout.native.paged import PagedDecodeLoop, Row, num_pages
from postgrad.rollout.stops import StopStrings
from postgrad.rollout.streams import Finished

if TYPE_CHECKING:
    from postgrad.rollout.native.decoder import Decoder
    from postgrad.rollout.native.engine import NativeEngine


class PagedStream:
    """The stream of a native engine on a CUDA device; see streams.Stream.

    The buffers are reserved for the first requests. A request that does not fit into them waits
    until no row decodes, and then begins with larger ones.

    Args:
        engine: has the model.
        decoder: the engine's.
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
        self.stops = StopStrings(engine.tokenizer, sampling.stop) if sampling.stop else None
        self.waiting: deque[tuple[Request, list[Hashable]]] = deque()
        self.loop: GrowingLoop | None = None

    def __enter__(self) -> "PagedStream":
        # In training mode a model with activation checkpointing ignores the cache.
        self.engine.model.eval()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.model.train()
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
        if self.loop is None or not self.loop.busy:
            self.loop = self._new_loop() if self.waiting else None
        loop = self.loop
        if loop is None:
            return []
        while self.waiting and loop.fits(self.waiting[0][0]):
            loop.join(*self.waiting.popleft())
        assert loop.busy, "a new loop has room for all requests that wait"
        return loop.poll()

    def forget(self, key: Hashable) -> None:
        """Do nothing: nothing is kept."""

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
        )


class GrowingLoop(PagedDecodeLoop):
    """A decode loop whose rows join one request after the other.

    The requests that it is made with are those that its buffers must fit; they join like others.
    """

    def __init__(self, *arguments: object, stream_rows: int) -> None:
        super().__init__(*arguments, stream_rows=stream_rows)  # type: ignore[arg-type]
        self.requests.clear()
        self.limits.clear()
        self.prompts.clear()
        self.prompt_of.clear()
        self.all_rows.clear()
        self.waiting.clear()
        self.free_slots = list(range(self.decoder.sizes.slots))
        self.keys: dict[int, list[Hashable]] = {}  # by the number of the request

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

    def join(self, request: Request, keys: list[Hashable]) -> None:
        """Add a request that fits."""
        number = len(self.requests)
        self.requests.append(request)
        self.limits.append(token_limit(request, self.sampling))
        self.prompt_of.append(self.prompts.setdefault(tuple(request.prompt), number))
        self.keys[number] = keys
        rows = [Row(number, index, self.free_slots.pop()) for index in range(len(keys))]
        self.draw_uniforms(rows)
        self.waiting += rows

    def poll(self) -> list[Finished]:
        """Decode a few tokens; returns the rows that ended."""
        ended = self.advance()
        if not ended:
            return []
        finished: list[Finished] = []
        for row, completion in zip(ended, self.collect(ended), strict=True):
            finished.append((self.keys[row.request][row.index], completion))
            self.lengths_at_stop.pop(row.slot, None)
            self.free_slots.append(row.slot)
        return finished
