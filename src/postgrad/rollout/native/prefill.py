"""Prefill into pages: packed passes whose tokens also attend to keys that are in pages already.

Servers and conversations prefill few tokens at a time, while other rows wait. There the time to
launch a pass kernel by kernel counts, and captured decode steps prefill instead: each token of a
prompt is a row of the step, and writes its key and value before any row attends.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from postgrad.model.passes.packing import BLOCK_N as PAGE
from postgrad.model.passes.packing import RowSpan, Segment, make_packing
from postgrad.model.passes.support import vision_of
from postgrad.rollout.native.pages import num_pages
from postgrad.rollout.native.tables import (
    ALIVE,
    FIELDS,
    NUM_OWN,
    NUM_SHARED,
    PREFILL_ROWS,
    SHARED_PAGES,
    TOKEN,
)

if TYPE_CHECKING:
    from postgrad.model.vision import RowPictures
    from postgrad.rollout.native.decoder import Decoder

# Tokens per pass; whole pages, so that a prompt in several passes meets the same blocks of keys.
PREFILL_TOKENS = 16384
# A packed pass takes about 45 ms to launch; a captured step of an 8B model reads its weights in 4.
MAX_CAPTURED_TOKENS = 12 * PREFILL_ROWS
MAX_CAPTURED_KEYS = MAX_CAPTURED_TOKENS**2  # every row reads the keys of its tokens again


class PageWriter:
    """The cache object of a prefill pass on a CUDA device: writes keys and values to their pages.

    Args:
        keys, values: (layers, pages, tokens per page, heads, head_dim).
        lines: (tokens,) for each token of the pass, page * tokens per page + position in the page.
        earlier: (earlier tokens,) the same for tokens of earlier passes, which are attended to.
    """

    def __init__(self, keys: Tensor, values: Tensor, lines: Tensor, earlier: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.lines = lines
        self.earlier = earlier

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Return new keys and values, then earlier ones: (1, heads, new + earlier, head_dim)."""
        return self._write(self.keys[layer], key), self._write(self.values[layer], value)

    def _write(self, pages: Tensor, new: Tensor) -> Tensor:
        tokens = pages.flatten(0, 1)  # (pages * tokens per page, heads, head_dim)
        tokens.index_copy_(0, self.lines, new[0].transpose(0, 1))
        if not len(self.earlier):
            return new
        return torch.cat([new, tokens[self.earlier].transpose(0, 1)[None]], 2)

    def get_seq_length(self, *_: Any) -> int:
        return 0


class Span(NamedTuple):
    """Consecutive tokens of one row that a pass computes.

    `pages` are the row's: `num_shared_pages` with the `num_shared` tokens of its prompt, then its
    own, which have `num_own` tokens before these. `pictures` are those of the row. `on_states` is
    called with the last hidden states (tokens, width), in the order of the tokens: once per pass,
    if the span takes several.
    """

    tokens: list[int]
    pages: list[int]
    num_shared_pages: int = 0
    num_shared: int = 0
    num_own: int = 0
    on_states: Callable[[Tensor], None] | None = None
    pictures: "RowPictures | None" = None

    @property
    def lines(self) -> np.ndarray:
        """The places of the tokens' keys and values; see page_lines."""
        own_pages = self.pages[self.num_shared_pages :]
        return page_lines(own_pages, self.num_own + len(self.tokens))[self.num_own :]

    @property
    def earlier(self) -> np.ndarray:
        """The places of all tokens before them."""
        shared_pages = self.pages[: self.num_shared_pages]
        own_pages = self.pages[self.num_shared_pages :]
        shared = page_lines(shared_pages, self.num_shared)
        return np.concatenate([shared, page_lines(own_pages, self.num_own)])

    @property
    def is_plain(self) -> bool:
        """Whether its tokens are text whose hidden states nobody needs."""
        return self.on_states is None and self.pictures is None

    @property
    def num_earlier(self) -> int:
        return self.num_shared + self.num_own

    @property
    def num_keys(self) -> int:
        return self.num_earlier + len(self.tokens)


def page_lines(pages: Sequence[int], num_tokens: int) -> np.ndarray:
    """Return page * PAGE + position in the page for each of the tokens that fill these pages."""
    index = np.arange(num_tokens)
    return np.asarray(pages, dtype=np.int64)[index // PAGE] * PAGE + index % PAGE


def prefill(decoder: "Decoder", spans: Sequence[Span], captured: bool = False) -> None:
    """Compute the spans' keys and values and write them to their pages.

    A pass has at most PREFILL_TOKENS tokens, so one long prompt takes several. Keys that a pass
    reads from pages count as its tokens where several spans share it. With `captured`, decode steps
    compute spans of a few tokens of text whose hidden states nobody needs.
    """
    by_rows = [span for span in spans if captured and span.is_plain]
    num_tokens = sum(len(span.tokens) for span in by_rows)
    num_read = sum(len(span.tokens) * span.num_keys for span in by_rows)
    if num_tokens > MAX_CAPTURED_TOKENS or num_read > MAX_CAPTURED_KEYS:
        by_rows = []
    by_passes = [span for span in spans if not (by_rows and span.is_plain)]
    parts = [part for span in by_passes for part in split_span(span, PREFILL_TOKENS)]
    for passed in split_by_total([part.num_keys for part in parts], PREFILL_TOKENS):
        _prefill_pass(decoder, parts[passed])
    if by_rows:  # after the passes, whose prompts they may continue
        prefill_by_rows(decoder, by_rows)


def warm_up_prefill(decoder: "Decoder") -> None:
    """Compile packed passes by made-up tokens in pages that must be free.

    Kernels differ for numbers of tokens that 16 divides.
    """
    sizes = decoder.sizes
    num_tokens = min(MAX_CAPTURED_TOKENS, sizes.positions, sizes.pages * PAGE) // 16 * 16
    pages = list(range(num_pages(num_tokens)))
    for count in (num_tokens, num_tokens - 1):
        span = Span([0] * count, pages)
        prefill(decoder, split_span(span, num_tokens // 2 or 1))


def split_span(span: Span, max_tokens: int) -> list[Span]:
    """Split a span into spans of at most `max_tokens`; each has those before it as earlier ones."""
    parts: list[Span] = []
    for start in range(0, len(span.tokens), max_tokens):
        tokens = span.tokens[start : start + max_tokens]
        parts.append(span._replace(tokens=tokens, num_own=span.num_own + start))
    return parts


def prefill_by_rows(decoder: "Decoder", spans: Sequence[Span]) -> None:
    """Compute spans by decode steps in which every token is a row of its own.

    Tokens that others attend to come before them, or in the same step.
    """
    lengths = [len(span.tokens) for span in spans]
    rows = np.zeros((FIELDS, sum(lengths)), dtype=np.int32)
    rows[TOKEN] = [token for span in spans for token in span.tokens]
    rows[NUM_OWN] = [span.num_own + i for span in spans for i in range(len(span.tokens))]
    rows[NUM_SHARED] = np.repeat([span.num_shared for span in spans], lengths)
    rows[SHARED_PAGES] = np.repeat([span.num_shared_pages for span in spans], lengths)
    rows[ALIVE] = 1
    table = np.zeros((len(spans), max(len(span.pages) for span in spans)), dtype=np.int32)
    for line, span in enumerate(spans):
        table[line, : len(span.pages)] = span.pages
    lines = np.repeat(np.arange(len(spans)), lengths)
    for start in range(0, len(lines), PREFILL_ROWS):
        part = slice(start, min(start + PREFILL_ROWS, len(lines)))
        num_rows = part.stop - start
        pages = torch.from_numpy(table[lines[part]])
        decoder.state[ALIVE] = 0
        decoder.state[:, :num_rows] = torch.from_numpy(rows[:, part]).to(decoder.device)
        decoder.table[:num_rows, : pages.shape[1]] = pages.to(decoder.device)
        decoder.run_prefill()


def _prefill_pass(decoder: "Decoder", spans: Sequence[Span]) -> None:
    """Compute spans in one packed pass.

    The keys of the earlier tokens are read from their pages and follow those of the pass. Each
    span is a segment, and its earlier tokens are its shared segment.
    """
    tokens = [token for span in spans for token in span.tokens]
    segments: list[Segment] = []
    start = 0
    shared_start = len(tokens)
    for span in spans:
        end = start + len(span.tokens)
        shared_end = shared_start + span.num_earlier
        segments.append((start, end, shared_start, shared_end, end))
        start = end
        shared_start = shared_end
    packing = make_packing(segments)
    earlier_positions = [torch.arange(span.num_earlier, dtype=torch.int32) for span in spans]
    positions = torch.cat([packing.positions, *earlier_positions])
    device = decoder.device
    unused_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)  # packing decides
    cache = PageWriter(
        decoder.keys,
        decoder.values,
        torch.from_numpy(np.concatenate([span.lines for span in spans])).to(device),
        torch.from_numpy(np.concatenate([span.earlier for span in spans])).to(device),
    )
    outputs = decoder.model.get_decoder()(
        **_language_inputs(decoder.model, spans, segments, tokens, packing.positions.to(device)),
        attention_mask=unused_mask,
        past_key_values=cache,
        packing=replace(packing, positions=positions).to(device),
        use_cache=True,
    )
    for span, (start, end, *_) in zip(spans, segments, strict=True):
        if span.on_states is not None:
            span.on_states(outputs.last_hidden_state[0, start:end])


def _language_inputs(
    model: Any,
    spans: Sequence[Span],
    segments: Sequence[Segment],
    tokens: list[int],
    positions: Tensor,
) -> dict[str, Tensor]:
    """Return the tokens of a pass and their positions as the language model reads them."""
    ids = torch.tensor([tokens], device=positions.device)
    inputs = {"input_ids": ids, "position_ids": positions.long()[None]}
    pictures = [span.pictures for span in spans]
    if not any(pictures):
        return inputs
    rows = [
        RowSpan(start, end, number, span.num_earlier)
        for number, (span, (start, end, *_)) in enumerate(zip(spans, segments, strict=True))
    ]
    vision = vision_of(model)
    placed = vision.place_spans(model, rows, pictures, len(tokens)).to(ids.device)
    inputs.pop("input_ids")
    return inputs | vision.language_inputs(model, ids, placed)


def split_by_total(lengths: list[int], max_total: int) -> list[slice]:
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
