"""Continuous batching on a CUDA device: prompts share their pages, rows live on the device, the host looks every few steps."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postgrad.errors import RunError
from postgrad.model.passes.packing import BLOCK_N as PAGE
from postgrad.model.passes.packing import make_packing
from postgrad.rollout.engine import Completion, Request, Sampling, limit_of
from postgrad.rollout.native.decoder import FIELDS, BufferSizes, Decoder
from postgrad.rollout.native.sampling import RowRandom
from postgrad.rollout.stops import StopStrings

LOOK_EVERY = 16  # decode steps between two looks of the host
PREFILL_TOKENS = 16384
TOKEN, OWN, SHARED, BLOCKS, SLOT, LIMIT, ALIVE = range(FIELDS)


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


@dataclass
class _Prompt:
    """A prompt whose keys and values lie in pages that its rows share."""

    pages: list[int]
    rows_left: int


@dataclass
class _Row:
    """One trajectory: where it comes from, and the pages of its own tokens."""

    request: int
    index: int
    slot: int
    pages: list[int] = field(default_factory=list)
    seen: int = 0  # tokens in which stop strings were looked for


class _IntoPages:
    """The cache object of a prefill pass: stock blocks hand it keys and values, it writes them to their pages."""

    def __init__(self, decoder: Decoder, lines: Tensor) -> None:
        self.decoder, self.lines = decoder, lines

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        for pages, new in ((self.decoder.keys, key), (self.decoder.values, value)):
            pages[layer].flatten(0, 1).index_copy_(0, self.lines, new[0].transpose(0, 1))
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        return 0


class PagedRun:
    """One call of generate."""

    def __init__(
        self, decoder: Decoder, requests: Sequence[Request], sampling: Sampling, max_rows: int, cache_bytes: int, max_context: int,
        stops: StopStrings | None = None,
    ) -> None:  # fmt: skip
        self.decoder, self.requests, self.sampling, self.stops = decoder, requests, sampling, stops
        self.cuts: dict[int, int] = {}  # by slot: tokens of a row that a stop string ended
        self.limits = [limit_of(r, sampling) for r in requests]
        seen: dict[tuple[int, ...], int] = {}
        self.first = [
            seen.setdefault(tuple(r.prompt), i) for i, r in enumerate(requests)
        ]  # the request whose prompt this one shares
        rows = [(r, i) for r, request in enumerate(requests) for i in range(len(request.seeds))]
        self.waiting = deque(_Row(r, i, slot) for slot, (r, i) in enumerate(rows))
        self.all_rows = list(self.waiting)
        self.capacity = _bucket(min(max_rows, len(rows)))
        self.limit = max(self.limits)
        longest = max(len(r.prompt) for r in requests)
        own, shared = pages_for(self.limit), pages_for(longest - 1)
        wanted = self.capacity * own + sum(pages_for(len(prompt) - 1) for prompt in seen) + 1
        fits = max(1, cache_bytes // decoder.page_bytes())
        if fits < own + shared + 1:
            need = (own + shared + 1) * decoder.page_bytes() / 2**30
            raise RunError(
                f"one trajectory of {longest + self.limit} tokens needs {need:.1f} GiB of cache; raise rollout.cache_gib"
            )
        # Steps differ a little: a cache somewhat smaller than the worst case serves, so the buffers, and the graphs that point to
        # them, live on.
        have = decoder.room.pages
        pages = have if wanted * 4 <= have * 5 else min(wanted, fits)
        blocks, slots = -(-(own + shared) // 8) * 8, 1 << (len(rows) - 1).bit_length()
        positions = min(max_context, -(-(longest + self.limit) // 256) * 256)
        decoder.reserve(
            BufferSizes(
                self.capacity, blocks, slots, self.limit, positions, max(pages, own + shared + 1)
            )
        )
        self.free = list(range(decoder.room.pages - 1, -1, -1))
        self.prompts: dict[int, _Prompt] = {}
        self.active: list[_Row] = []
        self.state = np.zeros((FIELDS, decoder.room.rows), dtype=np.int32)
        self.table = np.zeros((decoder.room.rows, decoder.room.blocks), dtype=np.int32)

    def finish(self) -> list[list[Completion]]:
        """Run until every trajectory has ended."""
        self.draw_uniforms()
        while self.waiting or self.active:
            self.admit()
            steps = self.provide()
            decoder, rows = self.decoder, len(self.active)
            decoder.state.copy_(torch.from_numpy(self.state))
            decoder.table.copy_(torch.from_numpy(self.table))
            decoder.run(min(_bucket(rows), self.capacity), steps, self.sampling.temperature)
            self.state = decoder.state.cpu().numpy()
            self.look()
            self.leave()
        return self.collect()

    def draw_uniforms(self) -> None:
        """All randomness of all rows, from their own seeds; the same numbers as on the CPU."""
        if self.sampling.temperature == 0.0:
            return
        table = np.zeros((len(self.all_rows), self.decoder.room.length), dtype=np.float32)
        for row in self.all_rows:
            limit = self.limits[row.request]
            # A float32 of a number just below 1 may be 1, which no cumulated share exceeds.
            drawn = (
                RowRandom(self.requests[row.request].seeds[row.index])
                .numbers(limit)
                .astype(np.float32)
            )
            table[row.slot, :limit] = np.minimum(drawn, np.float32(1.0 - 2**-24))
        self.decoder.uniforms[: len(table)] = torch.from_numpy(table).to(self.decoder.device)

    def admit(self) -> None:
        """Let waiting rows in while there are places and pages; prompts that are new are computed together."""
        new: list[int] = []
        reserve = len(self.active)  # every active row may soon want a page
        while self.waiting and len(self.active) < self.capacity:
            row = self.waiting[0]
            first = self.first[row.request]
            wanted = 1 + (
                0 if first in self.prompts else pages_for(len(self.requests[first].prompt) - 1)
            )
            if len(self.free) < wanted + (reserve if self.active else 0):
                break
            self.waiting.popleft()
            if first not in self.prompts:
                self.prompts[first] = _Prompt([self.free.pop() for _ in range(wanted - 1)], 0)
                new.append(first)
            self.enter(row)
            reserve += 1
        for cut in _cuts([len(self.requests[r].prompt) - 1 for r in new], PREFILL_TOKENS):
            self.prefill(new[cut])

    def enter(self, row: _Row) -> None:
        """A row begins with the last token of its prompt: its first step computes it and picks the first response token."""
        prompt, shared, at = (
            self.requests[row.request].prompt,
            self.prompts[self.first[row.request]],
            len(self.active),
        )
        shared.rows_left += 1
        row.pages = []
        self.active.append(row)
        self.state[:, at] = (
            prompt[-1],
            0,
            len(prompt) - 1,
            len(shared.pages),
            row.slot,
            self.limits[row.request],
            1,
        )
        self.table[at, : len(shared.pages)] = shared.pages

    def prefill(self, requests: list[int]) -> None:
        """Keys and values of the prompts without their last token, in one packed pass of the stock model."""
        tokens, positions, lines, segments = [], [], [], []
        for r in requests:
            prompt = self.requests[r].prompt[:-1]
            if not prompt:
                continue
            start = len(tokens)
            tokens += prompt
            positions += range(len(prompt))
            lines += [
                self.prompts[r].pages[i // PAGE] * PAGE + i % PAGE for i in range(len(prompt))
            ]
            segments.append((start, len(tokens), 0, 0, len(tokens)))
        if not tokens:
            return
        device = self.decoder.device
        self.decoder.model.base_model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=torch.ones(
                1, 1, 1, 1, dtype=torch.bool, device=device
            ),  # unread: the packing says who sees whom
            past_key_values=_IntoPages(self.decoder, torch.tensor(lines, device=device)),
            packing=make_packing(segments).to(device),
            use_cache=True,
        )

    def provide(self) -> int:
        """Pages for the next steps of every active row; rows that find none go back to wait. Returns the number of steps."""
        steps = 1
        while True:
            left = max(
                int(
                    (
                        self.state[LIMIT, : len(self.active)] - self.state[OWN, : len(self.active)]
                    ).max()
                ),
                1,
            )
            steps = min(LOOK_EVERY, left)
            own = self.state[OWN, : len(self.active)]
            goal = np.minimum(own + steps, self.state[LIMIT, : len(self.active)])
            missing = [
                int(-(-g // PAGE)) - len(row.pages)
                for g, row in zip(goal, self.active, strict=True)
            ]
            if sum(m for m in missing if m > 0) <= len(self.free):
                break
            self.put_back()
        for at, (row, count) in enumerate(zip(self.active, missing, strict=True)):
            for _ in range(count):
                row.pages.append(self.free.pop())
                self.table[at, self.state[BLOCKS, at] + len(row.pages) - 1] = row.pages[-1]
        return steps

    def put_back(self) -> None:
        """The youngest row starts again later: its own seed gives it the same tokens then."""
        row = self.active.pop()
        self.state[ALIVE, len(self.active)] = 0
        self.forget(row)
        self.waiting.appendleft(row)

    def forget(self, row: _Row) -> None:
        """Free a row's pages, and its prompt's when no other active row reads them."""
        self.free += row.pages
        row.pages, row.seen = [], 0
        first = self.first[row.request]
        prompt = self.prompts[first]
        prompt.rows_left -= 1
        waits = bool(self.waiting) and self.first[self.waiting[0].request] == first
        if prompt.rows_left == 0 and not waits:
            self.free += prompt.pages
            del self.prompts[first]

    def look(self) -> None:
        """Rows in which a stop string was completed since the last look end with the token that did it."""
        if self.stops is None:
            return
        slots = torch.tensor([row.slot for row in self.active], device=self.decoder.device)
        tokens = self.decoder.tokens[slots].cpu().numpy()
        for at, row in enumerate(self.active):
            own = int(self.state[OWN, at])
            if cut := self.stops.end(tokens[at, :own].tolist(), row.seen):
                self.cuts[row.slot], self.state[ALIVE, at] = cut, 0
            row.seen = own

    def leave(self) -> None:
        """Rows that ended make room; the others close the gaps."""
        alive = self.state[ALIVE, : len(self.active)] != 0
        stay = np.nonzero(alive)[0]
        if len(stay) == len(self.active):
            return
        for at in np.nonzero(~alive)[0]:
            self.forget(self.active[at])
        self.state[:, : len(stay)], self.table[: len(stay)] = self.state[:, stay], self.table[stay]
        self.state[ALIVE, len(stay) :] = 0
        self.active = [self.active[at] for at in stay]

    def collect(self) -> list[list[Completion]]:
        """What was written, as completions in the order of the requests."""
        count = len(self.all_rows)
        tokens, logprobs = (
            self.decoder.tokens[:count].cpu().numpy(),
            self.decoder.logprobs[:count].cpu().numpy(),
        )
        stops = self.decoder.stops.cpu().numpy()
        ended = np.isin(tokens, stops)
        out: list[list[Completion]] = [[] for _ in self.requests]
        for row in self.all_rows:
            limit = self.limits[row.request]
            found = np.nonzero(ended[row.slot, :limit])[0]
            length = int(found[0]) + 1 if len(found) else limit
            finish = "stop" if len(found) else "length"
            if row.slot in self.cuts:
                length, finish = self.cuts[row.slot], "stop"
            out[row.request].append(
                Completion(
                    tokens[row.slot, :length].tolist(), logprobs[row.slot, :length].tolist(), finish
                )
            )
        return out


def _bucket(rows: int) -> int:
    """Row counts that graphs are made for: powers of two from 8 to 256, then multiples of 256."""
    return max(8, 1 << (rows - 1).bit_length()) if rows <= 256 else -(-rows // 256) * 256


def _cuts(lengths: list[int], most: int) -> list[slice]:
    """Slices of consecutive items whose lengths stay within `most` together."""
    out: list[slice] = []
    first = total = 0
    for i, length in enumerate(lengths):
        if total and total + length > most:
            out.append(slice(first, i))
            first, total = i, 0
        total += length
    return [*out, slice(first, len(lengths))] if lengths else out
