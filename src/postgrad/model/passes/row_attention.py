"""Packed attention in plain torch: tokens are gathered into short padded rows for attention only.

Each segment of a packing becomes one row of queries with the keys it attends to: those of its
shared segment, then its own. Rows of similar size form one call of scaled_dot_product_attention.
This computes a fraction of the pairs that one dense mask over a prompt and its responses would.

A slot is a place of a padded row; some slots are padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from postgrad.model.passes.packing import Segment

MIN_FILL = 0.75  # rows of one group are at least this fraction of its longest row


@dataclass(frozen=True)
class RowGroup:
    """Padded rows of one size, computed in one attention call."""

    num_rows: int
    num_queries: int  # per row
    num_keys: int  # per row
    mask: Tensor | None  # (num_rows, 1, num_queries, num_keys) bool; None: plain causal
    shared: Tensor  # (num_rows, 1) shared keys per row: the position of its first query
    masks: dict[int, Tensor] = field(default_factory=dict)  # by sliding window, made when needed

    def windowed_mask(self, window: int) -> Tensor | None:
        """Return the mask for a sliding window of this many tokens; 0 is none."""
        if not 0 < window < self.num_keys:
            return self.mask
        if window not in self.masks:
            query = torch.arange(self.num_queries)[None, :, None]
            key = torch.arange(self.num_keys)[None, None]
            distance = self.shared[:, :, None] + query - key  # keys are stored by position
            visible = ((distance < window) & (distance >= 0))[:, None]
            if self.mask is not None:
                visible &= self.mask
            # A padding query attends to key 0: the softmax of an empty row would be NaN.
            self.masks[window] = visible | (~visible.any(-1, keepdim=True) & (key == 0))
        return self.masks[window]


@dataclass(frozen=True)
class PaddedSegments:
    """Index tables between the tokens of a packed pass and the slots of padded rows.

    `*_tokens` hold one token index per slot; padding slots hold 0. `*_slots` hold one slot per
    token. Nothing is read from padding slots, so their gradients are zero.
    """

    groups: list[RowGroup]
    query_tokens: Tensor  # (query slots,)
    query_padding: Tensor  # (query slots,) bool
    query_slots: Tensor  # (tokens,)
    key_tokens: Tensor  # (key slots,)
    key_slots: Tensor  # (tokens,) the slot among the keys of the token's own segment
    shared_tokens: Tensor  # (shared tokens,) tokens that other segments attend to as well
    # (shared tokens, most rows that attend to one of them) their slots in those rows; unused
    # entries hold the number of key slots
    shared_slots: Tensor

    def to(self, device: torch.device) -> "PaddedSegments":
        """Return self: the tables are built on the CPU, where they are used."""
        return self


def make_padded_segments(segments: Sequence[Segment]) -> PaddedSegments:
    """Return the index tables of the segments, grouped by size, longest first."""
    tables = _Tables(num_tokens=max(end for _, end, *_ in segments))
    for group in _group_by_size(segments):
        tables.add_group(group)
    return tables.build()


def _group_by_size(segments: Sequence[Segment]) -> list[list[Segment]]:
    groups: list[list[Segment]] = []
    for segment in sorted(segments, key=_lengths, reverse=True):
        if not groups or not _similar_size(segment, groups[-1][0]):
            groups.append([])
        groups[-1].append(segment)
    return groups


def _lengths(segment: Segment) -> tuple[int, int]:
    start, end, shared_start, shared_end, _ = segment
    return end - start, shared_end - shared_start


def _similar_size(segment: Segment, longest: Segment) -> bool:
    own, shared = _lengths(segment)
    longest_own, longest_shared = _lengths(longest)
    num_keys = own + shared
    longest_keys = longest_own + longest_shared
    if (shared == 0) != (longest_shared == 0):
        return False
    similar_keys = MIN_FILL * longest_keys <= num_keys <= longest_keys / MIN_FILL
    return own >= MIN_FILL * longest_own and similar_keys


class _Tables:
    """Builds PaddedSegments group by group."""

    def __init__(self, num_tokens: int) -> None:
        self.groups: list[RowGroup] = []
        self.query_tokens: list[Tensor] = []
        self.query_padding: list[Tensor] = []
        self.key_tokens: list[Tensor] = []
        self.query_slots = torch.zeros(num_tokens, dtype=torch.int64)
        self.key_slots = torch.zeros(num_tokens, dtype=torch.int64)
        # By (start, end) of a shared segment: its first key slot in each row that attends to it.
        self.shared_segments: dict[tuple[int, int], list[int]] = {}
        self.num_query_slots = 0
        self.num_key_slots = 0

    def add_group(self, group: list[Segment]) -> None:
        starts, ends, shared_starts, shared_ends, _ = torch.tensor(group).T[:, :, None]
        own = ends - starts  # (rows, 1)
        shared = shared_ends - shared_starts
        num_queries = int(own.max())
        num_keys = int((own + shared).max())
        query = torch.arange(num_queries)[None]
        key = torch.arange(num_keys)[None]
        self.query_padding.append((query >= own).flatten())
        self.query_tokens.append(torch.where(query < own, starts + query, 0).flatten())
        own_key_tokens = torch.where(key < shared + own, starts + key - shared, 0)
        key_tokens = torch.where(key < shared, shared_starts + key, own_key_tokens)
        self.key_tokens.append(key_tokens.flatten())
        rows = torch.arange(len(group))[:, None]
        first_queries = self.num_query_slots + rows * num_queries
        first_keys = self.num_key_slots + rows * num_keys
        exists = query < own
        tokens = (starts + query)[exists]
        self.query_slots[tokens] = (first_queries + query)[exists]
        self.key_slots[tokens] = (first_keys + shared + query)[exists]
        for segment, first_key in zip(group, first_keys[:, 0].tolist(), strict=True):
            _, _, shared_start, shared_end, _ = segment
            if shared_end > shared_start:
                first_slots = self.shared_segments.setdefault((shared_start, shared_end), [])
                first_slots.append(first_key)
        mask = _attention_mask(query, key, own, shared)
        self.groups.append(RowGroup(len(group), num_queries, num_keys, mask, shared))
        self.num_query_slots += len(group) * num_queries
        self.num_key_slots += len(group) * num_keys

    def build(self) -> PaddedSegments:
        shared_tokens = torch.zeros(0, dtype=torch.int64)
        shared_slots = torch.zeros(0, 0, dtype=torch.int64)
        if self.shared_segments:
            shared_tokens = torch.cat([torch.arange(*bounds) for bounds in self.shared_segments])
            shared_slots = self._shared_slots()
        return PaddedSegments(
            self.groups,
            torch.cat(self.query_tokens),
            torch.cat(self.query_padding),
            self.query_slots,
            torch.cat(self.key_tokens),
            self.key_slots,
            shared_tokens,
            shared_slots,
        )

    def _shared_slots(self) -> Tensor:
        most_rows = max(map(len, self.shared_segments.values()))
        parts: list[Tensor] = []
        for (start, end), first_slots in self.shared_segments.items():
            unused = [self.num_key_slots] * (most_rows - len(first_slots))
            offsets = torch.arange(end - start)[:, None]
            parts.append(torch.tensor(first_slots + unused)[None] + offsets)
        return torch.cat(parts).clamp_(max=self.num_key_slots)


def _attention_mask(query: Tensor, key: Tensor, own: Tensor, shared: Tensor) -> Tensor | None:
    """Return the (rows, 1, queries, keys) mask of a group; None where plain causal order is right.

    `query` (1, queries) and `key` (1, keys) count slots; `own` and `shared` (rows, 1) are lengths.
    """
    if not bool(shared.any()) and bool((own == own[0]).all()):
        return None
    own = own[:, :, None]
    shared = shared[:, :, None]
    query = query[:, :, None]
    key = key[:, None]
    visible = (key - shared <= query) & (key < shared + own)  # shared keys come first
    # A padding query attends to key 0: the softmax of an empty row would be NaN.
    padding = (query >= own) & (key == 0)
    return (visible | padding)[:, None]


def padded_segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: PaddedSegments,
    scaling: float | None,
    window: int = 0,
) -> Tensor:
    """Return (tokens, heads, width) attention outputs of packed tokens.

    query is (tokens, heads, width); key and value are (tokens, key_heads, width). `window` is the
    sliding window in tokens; 0 is none.
    """
    tokens, heads, width = query.shape
    key_heads = key.shape[1]
    q = _GatherToSlots.apply(
        query.reshape(tokens, -1), segments.query_tokens, segments.query_slots, None, None
    )
    k, v = (
        _GatherToSlots.apply(
            x.reshape(tokens, -1),
            segments.key_tokens,
            segments.key_slots,
            segments.shared_tokens,
            segments.shared_slots,
        )
        for x in (key, value)
    )
    outputs: list[Tensor] = []
    first_query = 0
    first_key = 0
    for group in segments.groups:
        num_queries = group.num_rows * group.num_queries
        num_keys = group.num_rows * group.num_keys
        outputs.append(
            _group_attention(
                q[first_query : first_query + num_queries].unflatten(-1, (heads, width)),
                k[first_key : first_key + num_keys].unflatten(-1, (key_heads, width)),
                v[first_key : first_key + num_keys].unflatten(-1, (key_heads, width)),
                group,
                scaling,
                window,
            )
        )
        first_query += num_queries
        first_key += num_keys
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    out = _GatherFromSlots.apply(
        flat, segments.query_slots, segments.query_tokens, segments.query_padding
    )
    return out.view(tokens, heads, width)


def _group_attention(
    q: Tensor, k: Tensor, v: Tensor, group: RowGroup, scaling: float | None, window: int
) -> Tensor:
    """Return (query slots, heads · width) outputs of one group; q, k, v are (slots, heads, width).

    The query heads of one key head are stacked along the query axis, so keys are never repeated.
    """
    heads, width = q.shape[1:]
    key_heads = k.shape[1]
    group_size = heads // key_heads
    rows, num_queries, num_keys = group.num_rows, group.num_queries, group.num_keys
    q = q.view(rows, num_queries, key_heads, group_size, width).permute(0, 2, 1, 3, 4)
    q = q.reshape(rows, key_heads, num_queries * group_size, width)
    k = k.view(rows, num_keys, key_heads, width).transpose(1, 2)
    v = v.view(rows, num_keys, key_heads, width).transpose(1, 2)
    mask = group.windowed_mask(window)
    if group_size > 1:
        if mask is None:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril()[None, None]
        mask = mask.repeat_interleave(group_size, dim=2)
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    out = out.view(rows, key_heads, num_queries, group_size, width).permute(0, 2, 1, 3, 4)
    return out.reshape(rows * num_queries, heads * width)


class _GatherToSlots(torch.autograd.Function):
    """Copies tokens to their slots.

    The backward pass sums each token's gradient over its slots, in float32 if it has several.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tokens: Tensor,
        slots: Tensor,
        shared_tokens: Tensor | None,
        shared_slots: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(slots, shared_tokens, shared_slots)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        slots, shared_tokens, shared_slots = ctx.saved_tensors
        out = grad.index_select(0, slots)
        if shared_tokens is not None and len(shared_tokens):
            # Unused entries of shared_slots point at the row of zeros after the last slot.
            with_zeros = torch.cat([grad, torch.zeros_like(grad[:1])])
            sum_dtype = torch.promote_types(grad.dtype, torch.float32)
            by_slot = with_zeros.index_select(0, shared_slots.flatten())
            by_row = by_slot.view(*shared_slots.shape, -1).sum(1, dtype=sum_dtype)
            out[shared_tokens] = (out[shared_tokens].to(sum_dtype) + by_row).to(out.dtype)
        return out, None, None, None, None


class _GatherFromSlots(torch.autograd.Function):
    """Copies each token's slot back to the token; padding slots are dropped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, tokens: Tensor, padding: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, padding)
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tokens, padding = ctx.saved_tensors
        out = grad.index_select(0, tokens).masked_fill_(padding[:, None], 0.0)
        return out, None, None, None
