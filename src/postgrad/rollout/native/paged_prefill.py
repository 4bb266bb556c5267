"""Prefill into pages: packed passes whose tokens also attend to keys that are in pages already."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from postgrad.model.passes.packing import BLOCK_N as PAGE
from postgrad.model.passes.packing import Segment, make_packing
from postgrad.rollout.native.cache import PageWriter

if TYPE_CHECKING:
    from postgrad.rollout.native.decoder import Decoder

# Tokens per pass; whole pages, so that a prompt in several passes meets the same blocks of keys.
PREFILL_TOKENS = 16384


class Span(NamedTuple):
    """Consecutive tokens of one row that a pass computes.

    `lines` (tokens,) are the places of their keys and values; see page_lines. `earlier` are those
    of all tokens before them. `on_states` is called with the last hidden states (tokens, width), in
    the order of the tokens: once per pass, if the span takes several.
    """

    tokens: list[int]
    lines: np.ndarray
    earlier: np.ndarray = np.zeros(0, dtype=np.int64)
    on_states: Callable[[Tensor], None] | None = None

    @property
    def num_keys(self) -> int:
        return len(self.lines) + len(self.earlier)


def page_lines(pages: Sequence[int], num_tokens: int) -> np.ndarray:
    """Return page * PAGE + position in the page for each of the tokens that fill these pages."""
    index = np.arange(num_tokens)
    return np.asarray(pages, dtype=np.int64)[index // PAGE] * PAGE + index % PAGE


def prefill(decoder: "Decoder", spans: Sequence[Span]) -> None:
    """Compute the spans' keys and values and write them to their pages.

    A pass has at most PREFILL_TOKENS tokens, so one long prompt takes several. Keys that a pass
    reads from pages count as its tokens where several spans share it.
    """
    parts = [part for span in spans for part in split_span(span, PREFILL_TOKENS)]
    for passed in split_by_total([part.num_keys for part in parts], PREFILL_TOKENS):
        _prefill_pass(decoder, parts[passed])


def split_span(span: Span, max_tokens: int) -> list[Span]:
    """Split a span into spans of at most `max_tokens`; each has those before it as earlier ones."""
    lines = np.concatenate([span.earlier, span.lines])
    parts: list[Span] = []
    for start in range(0, len(span.tokens), max_tokens):
        end = start + max_tokens
        parts.append(
            span._replace(
                tokens=span.tokens[start:end],
                lines=span.lines[start:end],
                earlier=lines[: len(span.earlier) + start],
            )
        )
    return parts


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
        shared_end = shared_start + len(span.earlier)
        segments.append((start, end, shared_start, shared_end, end))
        start = end
        shared_start = shared_end
    packing = make_packing(segments)
    earlier_positions = [torch.arange(len(span.earlier), dtype=torch.int32) for span in spans]
    positions = torch.cat([packing.positions, *earlier_positions])
    device = decoder.device
    unused_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)  # packing decides
    cache = PageWriter(
        decoder.keys,
        decoder.values,
        torch.from_numpy(np.concatenate([span.lines for span in spans])).to(device),
        torch.from_numpy(np.concatenate([span.earlier for span in spans])).to(device),
    )
    outputs = decoder.model.base_model(
        input_ids=torch.tensor([tokens], device=device),
        position_ids=packing.positions.to(device, torch.int64)[None],
        attention_mask=unused_mask,
        past_key_values=cache,
        packing=replace(packing, positions=positions).to(device),
        use_cache=True,
    )
    for span, (start, end, *_) in zip(spans, segments, strict=True):
        if span.on_states is not None:
            span.on_states(outputs.last_hidden_state[0, start:end])


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
