"""The attention kernel that both training and decoding call, plugged into stock transformers models by name.

Grouped-query heads are never repeated in memory: on the decode step the query heads of one key head stand in the query axis.
"""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers import AttentionInterface

from postgrad.errors import ConfigError, RunError
from postgrad.model.passes.packing import Packing
from postgrad.model.passes.row_attention import Spread, spread_attention

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
    packing: Packing | Spread | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query (batch, heads, length, width), key and value (batch, key_heads, keys, width); returns (batch, length, heads, width).

    With a `packing` the batch is one row of packed tokens and the mask is not read.
    Refuses what it would otherwise leave out in silence: capped scores, sinks, and rows longer than a sliding window.
    """
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            f"{type(module).__name__} caps its attention scores or has sinks; such models are not supported yet"
        )
    if sliding_window is not None and key.shape[2] > sliding_window:
        raise RunError(
            f"a row of {key.shape[2]} tokens exceeds the model's sliding window of {sliding_window}, which is not supported yet; "
            "lower data.max_prompt_tokens and rollout.max_response_tokens"
        )
    if packing is not None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if isinstance(packing, Spread):
            return spread_attention(q, k, v, packing, scaling)[None], None
        from postgrad.model.passes.kernels.packed_attention import packed_attention

        return packed_attention(q, k, v, packing, scaling or query.shape[-1] ** -0.5)[None], None
    batch, heads, length, width = query.shape
    key_heads = key.shape[1]
    if length == 1 and heads > key_heads:
        grouped = query.reshape(batch, key_heads, heads // key_heads, width)
        out = functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        )
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    if heads > key_heads and query.device.type != "cpu" and attention_mask is not None:
        # The fused kernels of accelerators take either a mask or grouped heads, not both.
        key, value = (x.repeat_interleave(heads // key_heads, dim=1) for x in (key, value))
    causal = attention_mask is None and length > 1
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
        is_causal=causal,
        enable_gqa=key.shape[1] != heads,
    )
    return out.transpose(1, 2).contiguous(), None


def install() -> str:
    """Make the kernel known to transformers; returns the name to load models with."""
    AttentionInterface.register(NAME, attention)
    return NAME


def prompt_mask(lengths: Tensor, width: int) -> Tensor:
    """(rows, 1, width, width) causal mask over right-padded prompts; padding looks at itself only, so no row is empty."""
    order = torch.arange(width, device=lengths.device)
    causal = order[None, :] <= order[:, None]
    real = order[None, :] < lengths[:, None]
    diagonal = order[None, :] == order[:, None]
    return ((causal[None] & real[:, None, :]) | diagonal[None])[:, None]
