"""The attention function that training and decoding share, registered with transformers by name.

Keys of grouped-query heads are not repeated in memory. In a decode step the query heads of one key
head are stacked along the query axis.
"""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers import AttentionInterface

from postgrad.errors import RunError, Unsupported
from postgrad.model.passes.packing import Packing
from postgrad.model.passes.row_attention import PaddedSegments, padded_segment_attention
from postgrad.model.passes.sequence import AnyPacking, DividedTokens

NAME = "postgrad"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    packing: AnyPacking | None = None,
    token_positions: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return (batch, length, heads, width) attention outputs.

    query is (batch, heads, length, width); key and value are (batch, key_heads, keys, width). With
    a `packing` the batch is one row of packed tokens, and the mask is ignored. With DividedTokens
    it holds this rank's tokens only. `token_positions`
    (batch, length) are the positions of the queries; a sliding window needs them where a row is
    longer than the window. `softcap` caps the scores; `s_aux` (heads,) are attention sinks.

    Raises: ConfigError or RunError for what it would otherwise compute wrongly in silence.
    """
    if isinstance(packing, DividedTokens):
        options = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        return _attend_divided(module, query, key, value, packing, sliding_window, **options)
    if packing is not None:
        _refuse_in_packed(module, softcap, s_aux)
    elif sliding_window is not None and key.shape[2] > sliding_window:
        if token_positions is None:
            raise RunError(
                f"{type(module).__name__} got a row of {key.shape[2]} tokens and no positions for "
                f"its sliding window of {sliding_window}"
            )
        attention_mask = in_window(attention_mask, token_positions, key.shape[2], sliding_window)
    if softcap is not None or s_aux is not None:
        out = explicit_attention(query, key, value, attention_mask, scaling, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    if packing is not None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return _attend_packed(q, k, v, packing, scaling, sliding_window or 0)[None], None
    batch, heads, length, width = query.shape
    key_heads = key.shape[1]
    if length == 1 and heads > key_heads and not _has_heads(attention_mask):
        stacked = query.reshape(batch, key_heads, heads // key_heads, width)
        out = functional.scaled_dot_product_attention(
            stacked, key, value, attn_mask=attention_mask, scale=scaling
        )
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    if heads > key_heads and query.device.type != "cpu" and attention_mask is not None:
        # The fused kernels of accelerators accept a mask or grouped heads, not both.
        key = key.repeat_interleave(heads // key_heads, dim=1)
        value = value.repeat_interleave(heads // key_heads, dim=1)
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
        is_causal=attention_mask is None and length > 1,
        enable_gqa=key.shape[1] != heads,
    )
    return out.transpose(1, 2).contiguous(), None


def _has_heads(mask: Tensor | None) -> bool:
    """Return whether a mask differs between heads."""
    return mask is not None and mask.shape[1] > 1


def _attend_divided(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: DividedTokens,
    sliding_window: int | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the outputs of this rank's tokens: some heads over all tokens, then exchanged back."""
    q, k, v = (tokens.heads_for_tokens(x) for x in (query, key, value))
    out = attention(
        module, q, k, v, None, sliding_window=sliding_window, packing=tokens.packing, **options
    )[0]
    return tokens.tokens_for_heads(out), None


def _refuse_in_packed(module: nn.Module, softcap: float | None, s_aux: Tensor | None) -> None:
    if softcap is not None or s_aux is not None:
        raise Unsupported(
            f"{type(module).__name__} has soft-capped attention scores or attention sinks; packed "
            "attention supports neither",
            at="model.path",
        )


def in_window(mask: Tensor | None, positions: Tensor, num_keys: int, window: int) -> Tensor:
    """Return the boolean mask restricted to keys less than `window` positions before the query.

    With more keys than queries (a decode step, or a part of a long prompt) keys are stored by
    position; otherwise they are the queries' tokens. Without a mask order is causal.
    """
    key_positions = positions
    if positions.shape[1] != num_keys:
        key_positions = torch.arange(num_keys, device=positions.device)[None]
    distance = positions[:, None, :, None] - key_positions[:, None, None, :]
    visible = distance < window
    return visible & (distance >= 0) if mask is None else mask & visible


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return (batch, heads, length, width) with the scores written out, for caps and sinks.

    A sink is one more score per head that takes part in the softmax and carries no value.
    """
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        length, num_keys = scores.shape[-2:]
        order = torch.ones(length, num_keys, dtype=torch.bool, device=scores.device)
        mask = order.tril(num_keys - length)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value


def _attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing | PaddedSegments,
    scaling: float | None,
    window: int,
) -> Tensor:
    if isinstance(packing, PaddedSegments):
        return padded_segment_attention(q, k, v, packing, scaling, window)
    from postgrad.model.kernels.packed_attention import packed_attention

    return packed_attention(q, k, v, packing, scaling or q.shape[-1] ** -0.5, window)


def register_attention() -> str:
    """Register the function with transformers; return the name to load models with."""
    AttentionInterface.register(NAME, attention)
    return NAME


def prompt_mask(lengths: Tensor, width: int, first: int = 0) -> Tensor:
    """Return a causal mask (rows, 1, width - first, width) over right-padded prompts.

    Its queries are the tokens from `first` on. A padding token attends to itself, so no row of the
    mask is empty.
    """
    keys = torch.arange(width, device=lengths.device)
    queries = keys[first:]
    causal = keys[None, :] <= queries[:, None]
    is_token = keys[None, :] < lengths[:, None]
    diagonal = keys[None, :] == queries[:, None]
    return ((causal[None] & is_token[:, None, :]) | diagonal[None])[:, None]


def with_blocks(mask: Tensor | None, blocks: Tensor, of_keys: Tensor | None = None) -> Tensor:
    """Return a mask (rows, 1, queries, keys) in which the tokens of a picture see each other.

    `mask` None is causal. `blocks` (rows, queries) and `of_keys` (rows, keys) are numbers of
    pictures, 0 for text; by default the keys are those of the queries' tokens.
    """
    length = blocks.shape[1]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=blocks.device).tril()[None, None]
    keys = blocks if of_keys is None else of_keys
    same = (keys[:, None, :] == blocks[:, :, None]) & (keys[:, None, :] > 0)
    return mask | same[:, None]
