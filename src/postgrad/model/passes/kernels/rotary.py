"""Rotary position embeddings of query and key heads, forward and backward.

The decode kernels call `apply_rotary` too, so training and decoding compute the same bits.
"""

# Triton launches its kernels with arguments that a type checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from postgrad.model.passes.kernels import NO_FP_FUSION


@triton.jit
def apply_rotary(low, high, cos_low, cos_high, sin_low, sin_high):
    """Rotate the two halves of a head to their position, rounded as the stock modules round."""
    dtype = low.dtype
    a = low.to(tl.float32)
    b = high.to(tl.float32)
    new_low = (a * cos_low).to(dtype).to(tl.float32) + (-b * sin_low).to(dtype).to(tl.float32)
    new_high = (b * cos_high).to(dtype).to(tl.float32) + (a * sin_high).to(dtype).to(tl.float32)
    return new_low.to(dtype), new_high.to(dtype)


@triton.jit
def _rotary_heads(
    in_ptr, out_ptr, token, stride, heads, half, in_half, cos_low, cos_high, sin_low, sin_high,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    mask = (heads < NUM_HEADS)[:, None] & in_half[None, :]
    offsets = heads[:, None] * D + half[None, :]
    low = tl.load(in_ptr + token * stride + offsets, mask=mask, other=0.0)
    high = tl.load(in_ptr + token * stride + offsets + D // 2, mask=mask, other=0.0)
    if BACKWARD:
        a = low.to(tl.float32)
        b = high.to(tl.float32)
        new_low = (a * cos_low + b * sin_high).to(low.dtype)
        new_high = (b * cos_high - a * sin_low).to(low.dtype)
    else:
        new_low, new_high = apply_rotary(low, high, cos_low, cos_high, sin_low, sin_high)
    tl.store(out_ptr + token * NUM_HEADS * D + offsets, new_low, mask=mask)
    tl.store(out_ptr + token * NUM_HEADS * D + offsets + D // 2, new_high, mask=mask)


@triton.jit
def _load_half(base_ptr, offsets, mask):
    return tl.load(base_ptr + offsets, mask=mask, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, q_out, k_out, cos_ptr, sin_ptr, q_stride, k_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    D: tl.constexpr, HALF_BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """One program rotates all query and key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_BLOCK)
    heads = tl.arange(0, HEADS_BLOCK)
    in_half = half < D // 2
    low = token * D + half
    high = token * D + D // 2 + half
    cos_low = _load_half(cos_ptr, low, in_half)
    cos_high = _load_half(cos_ptr, high, in_half)
    sin_low = _load_half(sin_ptr, low, in_half)
    sin_high = _load_half(sin_ptr, high, in_half)
    _rotary_heads(
        q_ptr, q_out, token, q_stride, heads, half, in_half,
        cos_low, cos_high, sin_low, sin_high, HEADS, D, BACKWARD,
    )  # fmt: skip
    _rotary_heads(
        k_ptr, k_out, token, k_stride, heads, half, in_half,
        cos_low, cos_high, sin_low, sin_high, KEY_HEADS, D, BACKWARD,
    )  # fmt: skip


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        dq, dk = _rotate(grads[0].contiguous(), grads[1].contiguous(), cos, sin, backward=True)
        return dq, dk, None, None


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool
) -> tuple[Tensor, Tensor]:
    tokens, heads, width = q.shape
    q_out = q.new_empty(q.shape)
    k_out = k.new_empty(k.shape)
    _rotary_kernel[(tokens,)](
        q, k, q_out, k_out, cos, sin, q.stride(0), k.stride(0),
        HEADS=heads, KEY_HEADS=k.shape[1], HEADS_BLOCK=triton.next_power_of_2(heads),
        D=width, HALF_BLOCK=triton.next_power_of_2(width // 2), BACKWARD=backward,
        num_warps=2, **NO_FP_FUSION,
    )  # fmt: skip
    return q_out, k_out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q (tokens, heads, width) and k (tokens, key_heads, width) rotated to their positions.

    `cos` and `sin` are (tokens, width). The heads of one token must be contiguous in memory.
    """
    return _Rotary.apply(q, k, cos.contiguous(), sin.contiguous())  # type: ignore[return-value]
