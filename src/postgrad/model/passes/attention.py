"""The attention function that training and decoding share, registered with transformers by name.

Keys of grouped-query heads are not repeated in memory. In a decode step the query heads of one key
head are stacked along the query axis.
"""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers import AttentionInterface

from postgrad.errors import ConfigError, RunError
from postgrad.model.passes.packing import Packing
from postgrad.model.passes.row_attention import PaddedSegments, padded_segment_attention

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
    packing: Packing | PaddedSegments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return (batch, length, heads, width) attention outputs.

    query is (batch, heads, length, width); key and value are (batch, key_heads, keys, width). With
    a `packing` the batch is one row of packed tokens, and the mask is ignored.

    Raises: ConfigError for capped scores and attention sinks, RunError for rows longer than a
    sliding window. Without these checks the result would silently be wrong.
    """
    _refuse_unsupported(module, key.shape[2], softcap, s_aux, sliding_window)
    if packing is not None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return _attend_packed(q, k, v, packing, scaling)[None], None
    batch, heads, length, width = query.shape
    key_heads = key.shape[1]
    if length == 1 and heads > key_heads:
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


def _refuse_unsupported(
    module: nn.Module,
    row_length: int,
    softcap: float | None,
    s_aux: Tensor | None,
    sliding_window: int | None,
) -> None:
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            f"model.path: {type(module).__name__} uses soft-capped attention scores or attention "
            "sinks, which are not supported; choose another model"
        )
    if sliding_window is not None and row_length > sliding_window:
        raise RunError(
            f"a row of {row_length} tokens is longer than the model's sliding window of "
            f"{sliding_window}, which is not supported; lower data.max_prompt_tokens or "
            "rollout.max_response_tokens"
        )


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing | PaddedSegments, scaling: float | None
) -> Tensor:
    if isinstance(packing, PaddedSegments):
        return padded_segment_attention(q, k, v, packing, scaling)
    from postgrad.model.passes.kernels.packed_attention import packed_attention

    return packed_attention(q, k, v, packing, scaling or q.shape[-1] ** -0.5)


def register_attention() -> str:
    """Register the function with transformers; return the name to load models with."""
    AttentionInterface.register(NAME, attention)
    return NAME


def prompt_mask(lengths: Tensor, width: int) -> Tensor:
    """Return a (rows, 1, width, width) causal mask over right-padded prompts.

    A padding token attends to itself, so no row of the mask is empty.
    """
    index = torch.arange(width, device=lengths.device)
    causal = index[None, :] <= index[:, None]
    is_token = index[None, :] < lengths[:, None]
    diagonal = index[None, :] == index[:, None]
    return ((causal[None] & is_token[:, None, :]) | diagonal[None])[:, None]
