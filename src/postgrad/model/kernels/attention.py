"""Attention over packed tokens (model/packing.py), forward and backward.

Keys are visited in blocks of BLOCK_N, the shared ones first: the decode kernel walks the same blocks in the same order, so that what
the engine samples and what the trainer prices differ by rounding in the last bits only.
"""

# Triton launches its kernels with arguments that a type checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from postgrad.model.packing import BLOCK_M, BLOCK_N, Packing

LOG2E = 1.4426950408889634


@triton.jit
def absorb(acc, top, total, q, k, v, visible, scale_log2, PRECISE: tl.constexpr):
    """Take one block of keys into the running softmax of each query."""
    precision: tl.constexpr = "ieee" if PRECISE else "tf32"
    scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale_log2
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    keep = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    total = total * keep + tl.sum(p, 1)
    acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision=precision)
    return acc, new_top, total


@triton.jit
def _load(base, rows, stride, cols, inside, D: tl.constexpr):
    return tl.load(base + rows[:, None] * stride + cols[None, :], mask=inside[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def _forward(
    q_base, k_base, v_base, out_base, lse_base, tiles, scale_log2, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * 5
    head = tl.program_id(1).to(tl.int64)
    first, end, own = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    shared, shared_end = tl.load(tile + 3), tl.load(tile + 4)
    rows = (first + tl.arange(0, M)).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    here = rows < end
    q = _load(q_base + head * q_head, rows, q_token, cols, here, D)
    k_base += head // GROUP * k_head
    v_base += head // GROUP * v_head
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    for start in range(shared, shared_end, N):
        at = (start + tl.arange(0, N)).to(tl.int64)
        inside = at < shared_end
        k = _load(k_base, at, k_token, cols, inside, D)
        v = _load(v_base, at, v_token, cols, inside, D)
        acc, top, total = absorb(acc, top, total, q, k, v, inside[None, :], scale_log2, PRECISE)
    for start in range(own, end, N):
        at = (start + tl.arange(0, N)).to(tl.int64)
        inside = at < end
        k = _load(k_base, at, k_token, cols, inside, D)
        v = _load(v_base, at, v_token, cols, inside, D)
        acc, top, total = absorb(acc, top, total, q, k, v, at[None, :] <= rows[:, None], scale_log2, PRECISE)
    acc = acc / total[:, None]
    place = out_base + rows[:, None] * out_token + head * out_head + cols[None, :]
    tl.store(place, acc.to(out_base.dtype.element_ty), mask=here[:, None] & (cols < D)[None, :])
    tl.store(lse_base + head * num_tokens + rows, top + tl.log2(total), mask=here)


@triton.jit
def _backward_queries(
    q_base, k_base, v_base, grad_base, lse_base, delta_base, dq_base, tiles, scale, scale_log2, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, dq_token, dq_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    precision: tl.constexpr = "ieee" if PRECISE else "tf32"
    tile = tiles + tl.program_id(0) * 5
    head = tl.program_id(1).to(tl.int64)
    first, end, own = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    shared, shared_end = tl.load(tile + 3), tl.load(tile + 4)
    rows = (first + tl.arange(0, M)).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    here = rows < end
    q = _load(q_base + head * q_head, rows, q_token, cols, here, D)
    grad = _load(grad_base + head * grad_head, rows, grad_token, cols, here, D)
    lse = tl.load(lse_base + head * num_tokens + rows, mask=here, other=0.0)
    delta = tl.load(delta_base + head * num_tokens + rows, mask=here, other=0.0)
    k_base += head // GROUP * k_head
    v_base += head // GROUP * v_head
    dq = tl.zeros([M, WIDTH], tl.float32)
    for part in tl.static_range(2):
        begin = shared if part == 0 else own
        until = shared_end if part == 0 else end
        for start in range(begin, until, N):
            at = (start + tl.arange(0, N)).to(tl.int64)
            inside = at < until
            k = _load(k_base, at, k_token, cols, inside, D)
            v = _load(v_base, at, v_token, cols, inside, D)
            scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale_log2
            visible = inside[None, :] & ((at[None, :] <= rows[:, None]) | (part == 0)) & here[:, None]
            p = tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0)
            dp = tl.dot(grad, tl.trans(v), input_precision=precision)
            ds = p * (dp - delta[:, None])
            dq += tl.dot(ds.to(k.dtype), k, input_precision=precision)
    place = dq_base + rows[:, None] * dq_token + head * dq_head + cols[None, :]
    tl.store(place, (dq * scale).to(dq_base.dtype.element_ty), mask=here[:, None] & (cols < D)[None, :])


@triton.jit
def _backward_keys(
    q_base, k_base, v_base, grad_base, lse_base, delta_base, dk_base, dv_base, tiles, scale, scale_log2, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, d_token, d_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    precision: tl.constexpr = "ieee" if PRECISE else "tf32"
    tile = tiles + tl.program_id(0) * 3
    head = tl.program_id(1).to(tl.int64)
    key_head = head // GROUP
    first, end, seen_until = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    at = (first + tl.arange(0, N)).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    inside = at < end
    k = _load(k_base + key_head * k_head, at, k_token, cols, inside, D)
    v = _load(v_base + key_head * v_head, at, v_token, cols, inside, D)
    dk = tl.zeros([N, WIDTH], tl.float32)
    dv = tl.zeros([N, WIDTH], tl.float32)
    for start in range(first, seen_until, M):
        rows = (start + tl.arange(0, M)).to(tl.int64)
        here = rows < seen_until
        q = _load(q_base + head * q_head, rows, q_token, cols, here, D)
        grad = _load(grad_base + head * grad_head, rows, grad_token, cols, here, D)
        lse = tl.load(lse_base + head * num_tokens + rows, mask=here, other=0.0)
        delta = tl.load(delta_base + head * num_tokens + rows, mask=here, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision=precision) * scale_log2
        visible = inside[:, None] & here[None, :] & (at[:, None] <= rows[None, :])
        p = tl.where(visible, tl.exp2(scores - lse[None, :]), 0.0)
        dv += tl.dot(p.to(grad.dtype), grad, input_precision=precision)
        dp = tl.dot(v, tl.trans(grad), input_precision=precision)
        ds = p * (dp - delta[None, :])
        dk += tl.dot(ds.to(q.dtype), q, input_precision=precision)
    bounds = inside[:, None] & (cols < D)[None, :]
    where = at[:, None] * d_token + head * d_head + cols[None, :]
    tl.store(dk_base + where, dk * scale, mask=bounds)
    tl.store(dv_base + where, dv, mask=bounds)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
        tokens, heads, _ = q.shape
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
        _forward[(len(packing.query_tiles), heads)](
            q, k, v, out, lse, packing.query_tiles, scale * LOG2E, tokens,
            *_strides(q, k, v, out), **_shape(q, k), num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing, ctx.scale = packing, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        packing, scale, tokens = ctx.packing, ctx.scale, len(q)
        grad = grads[0].contiguous()
        delta = (grad.float() * out.float()).sum(-1).T.contiguous()
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        # One program a query head keeps the long prompt tiles parallel; the heads of a key head are summed after.
        dk, dv = (torch.empty(q.shape, dtype=torch.float32, device=q.device) for _ in range(2))
        shape = _shape(q, k)
        _backward_queries[(len(packing.query_tiles), q.shape[1])](
            q, k, v, grad, lse, delta, dq, packing.query_tiles, scale, scale * LOG2E, tokens,
            *_strides(q, k, v, grad, dq), **shape, num_warps=4,
        )  # fmt: skip
        _backward_keys[(len(packing.key_tiles), q.shape[1])](
            q, k, v, grad, lse, delta, dk, dv, packing.key_tiles, scale, scale * LOG2E, tokens,
            *_strides(q, k, v, grad, dk), **shape, num_warps=4,
        )  # fmt: skip
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for x in (dk, dv))
        return dq, dk, dv, None, None


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> Tensor:
    """q (tokens, heads, width), k and v (tokens, key_heads, width); returns (tokens, heads, width). The last axis lies close."""
    return _PackedAttention.apply(q, k, v, packing, scale)  # type: ignore[return-value]


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for t in tensors for stride in t.stride()[:2]]


def _shape(q: Tensor, k: Tensor) -> dict[str, Any]:
    width = q.shape[2]
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "D": width,
        "WIDTH": max(16, triton.next_power_of_2(width)),
        "M": BLOCK_M,
        "N": BLOCK_N,
        "PRECISE": q.dtype == torch.float32,
    }
