"""Packed attention without kernels of its own: tokens lie flat for the rest of the model and are spread into short rows for attention.

Each segment of a packing becomes one row of queries, with the keys it sees: those of its shared segment, then its own. Rows of similar
size are attended to together. Next to one dense mask over a prompt and all its responses this computes a fraction of the pairs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

Segment = tuple[
    int, int, int, int, int
]  # start, end, shared_start, shared_end, end of the tokens that see it
LOOSE = 0.75  # rows attended to together are at least this share of the longest


@dataclass(frozen=True)
class Rows:
    """Rows of one size that are attended to together."""

    count: int
    queries: int
    keys: int
    mask: Tensor | None  # (count, 1, queries, keys) bool; None: plain causal


@dataclass(frozen=True)
class Spread:
    """Where each token of a packed pass stands among the rows. `*_at` index tokens, one a place; padding points at token 0.

    `*_of` go back: for each token its place. Padded places receive nothing, so their gradients are nothing too.
    """

    rows: list[Rows]
    query_at: Tensor  # (query places,)
    query_pad: Tensor  # (query places,) bool
    query_of: Tensor  # (tokens,)
    key_at: Tensor  # (key places,)
    key_of: Tensor  # (tokens,) its place among the keys of its own segment
    shared: Tensor  # (shared tokens,) tokens that other segments see, too
    shared_of: Tensor  # (shared tokens, most segments that see one) their places there; the number of key places where there is none

    def to(self, device: torch.device) -> "Spread":
        """Made where it is used."""
        return self


def make_spread(segments: list[Segment]) -> Spread:
    """Rows of the segments, longest first."""
    ordered = sorted(segments, key=lambda s: (s[1] - s[0], s[3] - s[2]), reverse=True)
    groups: list[list[Segment]] = []
    for segment in ordered:
        if not groups or not _fits(segment, groups[-1][0]):
            groups.append([])
        groups[-1].append(segment)
    tokens = max(end for _, end, *_ in segments)
    query_of, key_of = (
        torch.zeros(tokens, dtype=torch.int64),
        torch.zeros(tokens, dtype=torch.int64),
    )
    seen: dict[
        int, list[int]
    ] = {}  # start of a shared segment -> where it begins among the keys of each segment that sees it
    ends: dict[int, int] = {}
    rows: list[Rows] = []
    query_at: list[Tensor] = []
    query_pad: list[Tensor] = []
    key_at: list[Tensor] = []
    queries_before = keys_before = 0
    for group in groups:
        starts, stops, shared_starts, shared_stops, _ = torch.tensor(group).T[:, :, None]
        own, shared = stops - starts, shared_stops - shared_starts
        width, reach = int(own.max()), int((own + shared).max())
        q, k = torch.arange(width)[None], torch.arange(reach)[None]
        query_pad.append((q >= own).flatten())
        query_at.append(torch.where(q < own, starts + q, 0).flatten())
        key_at.append(
            torch.where(
                k < shared, shared_starts + k, torch.where(k < shared + own, starts + k - shared, 0)
            ).flatten()
        )
        for row, (start, end, shared_start, shared_end, _) in enumerate(group):
            first = keys_before + row * reach
            query_of[start:end] = queries_before + row * width + torch.arange(end - start)
            key_of[start:end] = first + shared_end - shared_start + torch.arange(end - start)
            if shared_end > shared_start:
                seen.setdefault(shared_start, []).append(first)
                ends[shared_start] = shared_end
        rows.append(Rows(len(group), width, reach, _mask(q, k, own, shared)))
        queries_before += len(group) * width
        keys_before += len(group) * reach
    most = max(map(len, seen.values()), default=0)
    shared_of = [
        torch.tensor(firsts + [keys_before] * (most - len(firsts)))[None]
        + torch.arange(ends[start] - start)[:, None]
        for start, firsts in seen.items()
    ]
    return Spread(
        rows,
        torch.cat(query_at),
        torch.cat(query_pad),
        query_of,
        torch.cat(key_at),
        key_of,
        torch.cat([torch.arange(start, ends[start]) for start in seen])
        if seen
        else torch.zeros(0, dtype=torch.int64),
        torch.cat(shared_of).clamp_(max=keys_before)
        if seen
        else torch.zeros(0, 0, dtype=torch.int64),
    )


def _fits(segment: Segment, longest: Segment) -> bool:
    own, shared = segment[1] - segment[0], segment[3] - segment[2]
    longest_own, longest_shared = longest[1] - longest[0], longest[3] - longest[2]
    close = (
        own + shared >= LOOSE * (longest_own + longest_shared)
        and own + shared <= (longest_own + longest_shared) / LOOSE
    )
    return own >= LOOSE * longest_own and close and (shared == 0) == (longest_shared == 0)


def _mask(q: Tensor, k: Tensor, own: Tensor, shared: Tensor) -> Tensor | None:
    if not bool(shared.any()) and bool((own == own[0]).all()):
        return None
    own, shared, q, k = own[:, :, None], shared[:, :, None], q[:, :, None], k[:, None]
    visible = (k - shared <= q) & (k < shared + own)  # a shared key is always earlier
    return (visible | ((q >= own) & (k == 0)))[
        :, None
    ]  # a padded query looks at something, or its softmax would be empty


def spread_attention(
    query: Tensor, key: Tensor, value: Tensor, spread: Spread, scaling: float | None
) -> Tensor:
    """query (tokens, heads, width), key and value (tokens, key_heads, width); returns (tokens, heads, width)."""
    tokens, heads, width = query.shape
    key_heads = key.shape[1]
    together = (
        heads // key_heads
    )  # the query heads of one key head stand in the query axis: keys are never repeated
    q = _Take.apply(query.reshape(tokens, -1), spread.query_at, spread.query_of, None, None)
    k, v = (
        _Take.apply(
            x.reshape(tokens, -1), spread.key_at, spread.key_of, spread.shared, spread.shared_of
        )
        for x in (key, value)
    )
    out: list[Tensor] = []
    first_query = first_key = 0
    for rows in spread.rows:
        n, m = rows.count * rows.queries, rows.count * rows.keys
        part = q[first_query : first_query + n].view(
            rows.count, rows.queries, key_heads, together, width
        )
        part = part.permute(0, 2, 1, 3, 4).reshape(
            rows.count, key_heads, rows.queries * together, width
        )
        keys, values = (
            x[first_key : first_key + m]
            .view(rows.count, rows.keys, key_heads, width)
            .transpose(1, 2)
            for x in (k, v)
        )
        mask = rows.mask
        if together > 1:
            mask = (
                torch.ones(rows.queries, rows.keys, dtype=torch.bool).tril()[None, None]
                if mask is None
                else mask
            )
            mask = mask.repeat_interleave(together, dim=2)
        done = functional.scaled_dot_product_attention(
            part, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling
        )
        done = done.view(rows.count, key_heads, rows.queries, together, width).permute(
            0, 2, 1, 3, 4
        )
        out.append(done.reshape(n, heads * width))
        first_query, first_key = first_query + n, first_key + m
    flat = out[0] if len(out) == 1 else torch.cat(out)
    return _Back.apply(flat, spread.query_of, spread.query_at, spread.query_pad).view(
        tokens, heads, width
    )


class _Take(torch.autograd.Function):
    """Tokens to their places. Backwards each token gathers from its places, in float32 where there are several."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, at: Tensor, of: Tensor, shared: Tensor | None, shared_of: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(of, shared, shared_of)
        return x.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of, shared, shared_of = ctx.saved_tensors
        out = grad.index_select(0, of)
        if shared is not None and len(shared):
            padded = torch.cat([grad, torch.zeros_like(grad[:1])])
            wide = torch.promote_types(grad.dtype, torch.float32)
            seen = (
                padded.index_select(0, shared_of.flatten())
                .view(*shared_of.shape, -1)
                .sum(1, dtype=wide)
            )
            out[shared] = (out[shared].to(wide) + seen).to(out.dtype)
        return out, None, None, None, None


class _Back(torch.autograd.Function):
    """Places to their tokens; padded places are left behind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: Tensor, at: Tensor, pad: Tensor) -> Tensor:
        ctx.save_for_backward(at, pad)
        return x.index_select(0, of)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        at, pad = ctx.saved_tensors
        return grad.index_select(0, at).masked_fill_(pad[:, None], 0.0), None, None, None
