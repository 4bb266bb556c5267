"""Query, key and value heads from the output of their joined projection, forward and backward.

One kernel normalizes query and key heads where the model does that, and rotates them to their
positions. The decode kernels call `norm_halves` and `apply_rotary` too, so training and decoding
round alike.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from postgrad.model.kernels import NO_FP_FUSION
from postgrad.model.kernels.launch import launch, tl, triton
from postgrad.model.kernels.rms_norm import scale_normalized

PROGRAM_VALUES = 1024  # of the heads of one program
# Programs of the backward pass per block of heads; each sums the gradients of the norms' weights
# over its share of the tokens.
MAX_PROGRAMS = 512


class HeadNorms(NamedTuple):
    """The weights of the norms of query and key heads."""

    query: Tensor  # (head width,)
    key: Tensor
    eps: float
    centered: bool  # they multiply by 1 + weight


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
def norm_halves(
    low, high, is_query, q_weight, k_weight, half, in_half, eps,
    D: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """RMSNorm of heads given as two halves, rounded as rms_norm_row rounds."""
    kind = low.dtype
    low_f32 = low.to(tl.float32)
    high_f32 = high.to(tl.float32)
    inverse_rms = _inverse_rms(low_f32, high_f32, eps, D)
    weight_low = _head_weights(q_weight, k_weight, is_query, half, in_half)
    weight_high = _head_weights(q_weight + D // 2, k_weight + D // 2, is_query, half, in_half)
    new_low = scale_normalized(low_f32 * inverse_rms, weight_low, kind, CENTERED)
    new_high = scale_normalized(high_f32 * inverse_rms, weight_high, kind, CENTERED)
    return new_low.to(kind), new_high.to(kind)


@triton.jit
def _inverse_rms(low, high, eps, D: tl.constexpr):
    """Return 1 / rms of each head, (heads, 1)."""
    mean_square = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D
    return tl.rsqrt(mean_square + eps)[:, None]


@triton.jit
def _head_weights(q_weight, k_weight, is_query, half, in_half):
    """Return the weights of the norm of each head in float32, (heads, half)."""
    query = tl.load(q_weight + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    key = tl.load(k_weight + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query[:, None], query, key)


@triton.jit
def _load_rotation(ptr, token, half, in_half, D: tl.constexpr):
    """Return a token's cosines or sines for both halves of a head, (1, half) each."""
    at = ptr + token * D + half
    low = tl.load(at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    high = tl.load(at + D // 2, mask=in_half, other=0.0).to(tl.float32)[None, :]
    return low, high


@triton.jit
def _norm_gradient(
    grad_low, grad_high, x_low, x_high, is_query, q_weight, k_weight, half, in_half, eps,
    D: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Return the gradients of the heads x and of the norm's weights, two halves each."""
    inverse_rms = _inverse_rms(x_low, x_high, eps, D)
    x_low *= inverse_rms
    x_high *= inverse_rms
    dw_low = grad_low * x_low
    dw_high = grad_high * x_high
    weight_low = _head_weights(q_weight, k_weight, is_query, half, in_half)
    weight_high = _head_weights(q_weight + D // 2, k_weight + D // 2, is_query, half, in_half)
    if CENTERED:
        weight_low += 1.0
        weight_high += 1.0
    grad_low *= weight_low
    grad_high *= weight_high
    product = tl.sum(grad_low * x_low, 1) + tl.sum(grad_high * x_high, 1)
    projection = (product / D)[:, None]
    grad_low = inverse_rms * (grad_low - x_low * projection)
    grad_high = inverse_rms * (grad_high - x_high * projection)
    return grad_low, grad_high, dw_low, dw_high


@triton.jit
def _heads_forward(
    qkv_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_weight, k_weight, eps, qkv_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, NORM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One program computes HEADS_BLOCK heads of one token.

    In `qkv` query heads come first, then keys, then values. Values are copied only without NORM.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    half = tl.arange(0, HALF)
    in_half = half < D // 2
    is_query = heads < HEADS
    is_key = (heads >= HEADS) & (heads < HEADS + KEY_HEADS)
    is_value = (heads >= HEADS + KEY_HEADS) & (heads < HEADS + 2 * KEY_HEADS)
    inside = (is_query | is_key | is_value)[:, None] & in_half[None, :]
    at = qkv_ptr + token * qkv_stride + heads[:, None] * D + half[None, :]
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + D // 2, mask=inside, other=0.0)
    if NORM:
        low, high = norm_halves(
            low, high, is_query, q_weight, k_weight, half, in_half, eps, D, CENTERED
        )
    else:
        value_at = v_ptr + (token * KEY_HEADS + heads - HEADS - KEY_HEADS)[:, None] * D
        value_mask = is_value[:, None] & in_half[None, :]
        tl.store(value_at + half[None, :], low, mask=value_mask)
        tl.store(value_at + half[None, :] + D // 2, high, mask=value_mask)
    cos_low, cos_high = _load_rotation(cos_ptr, token, half, in_half, D)
    sin_low, sin_high = _load_rotation(sin_ptr, token, half, in_half, D)
    new_low, new_high = apply_rotary(low, high, cos_low, cos_high, sin_low, sin_high)
    q_at = q_ptr + (token * HEADS + heads)[:, None] * D + half[None, :]
    q_mask = is_query[:, None] & in_half[None, :]
    tl.store(q_at, new_low, mask=q_mask)
    tl.store(q_at + D // 2, new_high, mask=q_mask)
    k_at = k_ptr + (token * KEY_HEADS + heads - HEADS)[:, None] * D + half[None, :]
    k_mask = is_key[:, None] & in_half[None, :]
    tl.store(k_at, new_low, mask=k_mask)
    tl.store(k_at + D // 2, new_high, mask=k_mask)


@triton.jit
def _heads_backward(
    qkv_ptr, dq_ptr, dk_ptr, dv_ptr, d_qkv_ptr, dw_ptr, cos_ptr, sin_ptr, q_weight, k_weight, eps,
    num_tokens, qkv_stride, dv_token, dv_head,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, NORM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the joined projection's output.

    One program computes HEADS_BLOCK heads of every n-th token. With NORM it also stores its sum of
    the gradients of the norms' weights, for each head.
    """
    program = tl.program_id(0)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    total: tl.constexpr = HEADS + 2 * KEY_HEADS
    half = tl.arange(0, HALF)
    in_half = half < D // 2
    is_query = heads < HEADS
    is_key = (heads >= HEADS) & (heads < HEADS + KEY_HEADS)
    is_value = (heads >= HEADS + KEY_HEADS) & (heads < total)
    q_mask = is_query[:, None] & in_half[None, :]
    k_mask = is_key[:, None] & in_half[None, :]
    v_mask = is_value[:, None] & in_half[None, :]
    inside = q_mask | k_mask | v_mask
    dw_low = tl.zeros([HEADS_BLOCK, HALF], tl.float32)
    dw_high = tl.zeros([HEADS_BLOCK, HALF], tl.float32)
    zero = tl.zeros([], tl.int64)
    for number in range(program, num_tokens, tl.num_programs(0)):
        token = zero + number
        q_at = dq_ptr + (token * HEADS + heads)[:, None] * D + half[None, :]
        k_at = dk_ptr + (token * KEY_HEADS + heads - HEADS)[:, None] * D + half[None, :]
        v_head = (heads - HEADS - KEY_HEADS) * dv_head
        v_at = dv_ptr + token * dv_token + v_head[:, None] + half[None, :]
        low = tl.load(q_at, mask=q_mask, other=0.0) + tl.load(k_at, mask=k_mask, other=0.0)
        high = tl.load(q_at + D // 2, mask=q_mask, other=0.0)
        high += tl.load(k_at + D // 2, mask=k_mask, other=0.0)
        cos_low, cos_high = _load_rotation(cos_ptr, token, half, in_half, D)
        sin_low, sin_high = _load_rotation(sin_ptr, token, half, in_half, D)
        a = low.to(tl.float32)
        b = high.to(tl.float32)
        dtype = low.dtype
        grad_low = (a * cos_low + b * sin_high).to(dtype).to(tl.float32)
        grad_high = (b * cos_high - a * sin_low).to(dtype).to(tl.float32)
        if NORM:
            at = qkv_ptr + token * qkv_stride + heads[:, None] * D + half[None, :]
            x_low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            x_high = tl.load(at + D // 2, mask=inside, other=0.0).to(tl.float32)
            grad_low, grad_high, more_low, more_high = _norm_gradient(
                grad_low, grad_high, x_low, x_high, is_query, q_weight, k_weight, half, in_half,
                eps, D, CENTERED,
            )  # fmt: skip
            dw_low += more_low
            dw_high += more_high
        value_low = tl.load(v_at, mask=v_mask, other=0.0).to(tl.float32)
        value_high = tl.load(v_at + D // 2, mask=v_mask, other=0.0).to(tl.float32)
        grad_low = tl.where(is_value[:, None], value_low, grad_low)
        grad_high = tl.where(is_value[:, None], value_high, grad_high)
        out_at = d_qkv_ptr + (token * total + heads)[:, None] * D + half[None, :]
        tl.store(out_at, grad_low.to(dtype), mask=inside)
        tl.store(out_at + D // 2, grad_high.to(dtype), mask=inside)
    if NORM:
        dw_at = dw_ptr + (program * total + heads)[:, None] * D + half[None, :]
        tl.store(dw_at, dw_low, mask=inside)
        tl.store(dw_at + D // 2, dw_high, mask=inside)


class _ProjectedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        heads: int,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        centered: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, width = cos.shape
        key_heads = (qkv.shape[1] // width - heads) // 2
        has_norms = q_weight is not None
        q = qkv.new_empty(tokens, heads, width)
        k = qkv.new_empty(tokens, key_heads, width)
        if has_norms:  # the backward pass reads qkv, so its values need no copy
            v = qkv[:, (heads + key_heads) * width :].unflatten(1, (key_heads, width))
        else:
            v = torch.empty_like(k)
        shape = _shape_arguments(q, k, has_norms, centered)
        launch(
            _heads_forward, (tokens, _num_blocks(shape)),
            qkv, q, k, v, cos, sin, qkv if q_weight is None else q_weight,
            qkv if k_weight is None else k_weight, eps, qkv.stride(0), **shape,
            num_warps=4, **NO_FP_FUSION,
        )  # fmt: skip
        saved = qkv if has_norms else qkv.new_empty(0)
        ctx.save_for_backward(saved, cos, sin, q_weight, k_weight)
        ctx.eps, ctx.centered = eps, centered
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qkv, cos, sin, q_weight, k_weight = ctx.saved_tensors
        dq, dk = (grad.contiguous() for grad in grads[:2])
        dv = grads[2] if grads[2].stride(2) == 1 else grads[2].contiguous()
        tokens, heads, width = dq.shape
        key_heads = dk.shape[1]
        has_norms = q_weight is not None
        d_qkv = dq.new_empty(tokens, (heads + 2 * key_heads) * width)
        programs = min(MAX_PROGRAMS, tokens)
        dw_shape = (programs if has_norms else 0, heads + 2 * key_heads, width)
        dw = torch.empty(dw_shape, dtype=torch.float32, device=dq.device)
        shape = _shape_arguments(dq, dk, has_norms, ctx.centered)
        launch(
            _heads_backward, (programs, _num_blocks(shape)),
            qkv, dq, dk, dv, d_qkv, dw, cos, sin, dq if q_weight is None else q_weight,
            dq if k_weight is None else k_weight, ctx.eps, tokens,
            qkv.stride(0), dv.stride(0), dv.stride(1), **shape, num_warps=4,
        )  # fmt: skip
        if not has_norms:
            return d_qkv, *[None] * 7
        by_head = dw.sum(0)
        dw_q = by_head[:heads].sum(0).to(q_weight.dtype)
        dw_k = by_head[heads : heads + key_heads].sum(0).to(k_weight.dtype)
        return d_qkv, None, None, None, dw_q, dw_k, None, None


def _shape_arguments(q: Tensor, k: Tensor, has_norms: bool, centered: bool) -> dict[str, Any]:
    """Return the compile-time sizes for q and k, (tokens, heads, width)."""
    width = q.shape[2]
    return {
        "HEADS": q.shape[1],
        "KEY_HEADS": k.shape[1],
        "D": width,
        "HALF": triton.next_power_of_2(width // 2),
        "HEADS_BLOCK": max(1, PROGRAM_VALUES // triton.next_power_of_2(width)),
        "NORM": has_norms,
        "CENTERED": centered,
    }


def _num_blocks(shape: dict[str, Any]) -> int:
    """Return the number of programs for the heads of one token."""
    return triton.cdiv(shape["HEADS"] + 2 * shape["KEY_HEADS"], shape["HEADS_BLOCK"])


def projected_heads(
    qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (tokens, heads, width), k and v (tokens, key_heads, width), q and k rotated.

    `qkv` (tokens, (heads + 2 · key_heads) · width) holds query heads, then keys, then values. `cos`
    and `sin` are (tokens, width). With `norms`, query and key heads are normalized before they are
    rotated.
    """
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    weights = (None, None, 0.0, False) if norms is None else norms
    cos, sin = cos.contiguous(), sin.contiguous()
    return _ProjectedHeads.apply(qkv, num_heads, cos, sin, *weights)  # type: ignore[return-value]
