"""Attention over packed tokens (model/passes/packing.py), forward and backward.

Keys are visited in blocks of BLOCK_N, the shared ones first, CHUNK blocks at a time. The decode kernel walks the same blocks in the same
order and joins the same chunks, so that what the engine samples and what the trainer prices are the same bits.
"""

# Triton launches its kernels with arguments that a type checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from postgrad.model.passes.packing import BLOCK_M, BLOCK_N, CHUNK, Packing

LOG2E = 1.4426950408889634
# A fused multiply-add would leave out a rounding that the stock modules make, and only in some of the kernels.
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
# Blocks and warps of the gradients in bfloat16, as measured on an H200 (docs/lab.md).
KEYS: dict[str, int] = {"M": 128, "num_warps": 4, "num_stages": 2}
QUERIES: dict[str, int] = {"N": 32, "num_warps": 4, "num_stages": 3}


class Instructions(NamedTuple):
    """Warps of a training program over BLOCK_M queries, rows and warps of a decode program."""

    forward_warps: int
    decode_rows: int
    decode_warps: int


def instructions(width: int) -> Instructions:
    """What makes the compiler choose the same tensor-core instructions for training and decoding heads of this width: equal bits.

    Narrow heads: the ones of 16 rows in both, so that a decode program, which has few rows, wastes little. Wide heads would spill
    registers in training then; both take the ones of 64 rows.
    """
    return Instructions(2, 16, 1) if width <= 64 else Instructions(4, 64, 4)


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
def join_chunk(acc, top, total, chunk_acc, chunk_top, chunk_total):
    """Put a chunk's softmax to that of the chunks before it."""
    new_top = tl.maximum(top, chunk_top)
    keep, add = tl.exp2(top - new_top), tl.exp2(chunk_top - new_top)
    return acc * keep[:, None] + chunk_acc * add[:, None], new_top, total * keep + chunk_total * add


@triton.jit
def _load(base, rows, stride, cols, inside, D: tl.constexpr):
    return tl.load(
        base + rows[:, None] * stride + cols[None, :],
        mask=inside[:, None] & (cols < D)[None, :],
        other=0.0,
    )


@triton.jit
def _forward(
    q_base, k_base, v_base, out_base, lse_base, tiles, scale_log2, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    PRECISE: tl.constexpr,
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
    shared_blocks = (shared_end - shared + N - 1) // N
    blocks = shared_blocks + (end - own + N - 1) // N
    for begin in range(0, blocks, CHUNK):
        chunk_top = tl.full([M], float("-inf"), tl.float32)
        chunk_total = tl.zeros([M], tl.float32)
        chunk_acc = tl.zeros([M, WIDTH], tl.float32)
        for j in range(begin, tl.minimum(begin + CHUNK, blocks)):
            is_shared = j < shared_blocks
            at = (
                tl.where(is_shared, shared + j * N, own + (j - shared_blocks) * N) + tl.arange(0, N)
            ).to(tl.int64)
            inside = at < tl.where(is_shared, shared_end, end)
            k = _load(k_base, at, k_token, cols, inside, D)
            v = _load(v_base, at, v_token, cols, inside, D)
            visible = inside[None, :] & (is_shared | (at[None, :] <= rows[:, None]))
            chunk_acc, chunk_top, chunk_total = absorb(
                chunk_acc, chunk_top, chunk_total, q, k, v, visible, scale_log2, PRECISE
            )
        acc, top, total = join_chunk(acc, top, total, chunk_acc, chunk_top, chunk_total)
    acc = acc / total[:, None]
    place = out_base + rows[:, None] * out_token + head * out_head + cols[None, :]
    tl.store(place, acc.to(out_base.dtype.element_ty), mask=here[:, None] & (cols < D)[None, :])
    tl.store(lse_base + head * num_tokens + rows, top + tl.log2(total), mask=here)


@triton.jit
def _backward_queries(
    q_base, k_base, v_base, out_base, grad_base, lse_base, delta_base, dq_base, tiles, scale, scale_log2, num_tokens,
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
    out = _load(out_base + head * grad_head, rows, grad_token, cols, here, D)
    lse = tl.load(lse_base + head * num_tokens + rows, mask=here, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(
        delta_base + head * num_tokens + rows, delta, mask=here
    )  # for the keys' gradient, which comes after
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
            visible = (
                inside[None, :] & ((at[None, :] <= rows[:, None]) | (part == 0)) & here[:, None]
            )
            p = tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0)
            dp = tl.dot(grad, tl.trans(v), input_precision=precision)
            ds = p * (dp - delta[:, None])
            dq += tl.dot(ds.to(k.dtype), k, input_precision=precision)
    place = dq_base + rows[:, None] * dq_token + head * dq_head + cols[None, :]
    tl.store(
        place, (dq * scale).to(dq_base.dtype.element_ty), mask=here[:, None] & (cols < D)[None, :]
    )


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


@triton.jit
def _sum_heads(
    dk_base,
    dv_base,
    dk_out,
    dv_out,
    size,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of a key head from those of its query heads."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    source = at // D * (GROUP * D) + at % D
    dk = tl.zeros([BLOCK], tl.float32)
    dv = tl.zeros([BLOCK], tl.float32)
    for member in tl.static_range(GROUP):
        dk += tl.load(dk_base + source + member * D, mask=inside, other=0.0)
        dv += tl.load(dv_base + source + member * D, mask=inside, other=0.0)
    tl.store(dk_out + at, dk.to(dk_out.dtype.element_ty), mask=inside)
    tl.store(dv_out + at, dv.to(dv_out.dtype.element_ty), mask=inside)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float
    ) -> Tensor:
        tokens, heads, _ = q.shape
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
        _forward[(len(packing.query_tiles), heads)](
            q, k, v, out, lse, packing.query_tiles, scale * LOG2E, tokens,
            *_strides(q, k, v, out), **_shape(q, k), N=BLOCK_N, M=BLOCK_M, CHUNK=CHUNK,
            num_warps=instructions(q.shape[2]).forward_warps, **EXACT,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing, ctx.scale = packing, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        packing, scale, tokens = ctx.packing, ctx.scale, len(q)
        grad, delta = grads[0].contiguous(), torch.empty_like(lse)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        # One program a query head keeps the long prompt tiles parallel; the heads of a key head are summed after.
        dk, dv = (torch.empty(q.shape, dtype=torch.float32, device=q.device) for _ in range(2))
        shape, wide = _shape(q, k), q.dtype == torch.float32
        _backward_queries[(len(packing.query_tiles), q.shape[1])](
            q, k, v, out, grad, lse, delta, dq, packing.query_tiles, scale, scale * LOG2E, tokens,
            *_strides(q, k, v, grad, dq), **shape, M=BLOCK_M, **({"N": BLOCK_N} if wide else QUERIES),
        )  # fmt: skip
        _backward_keys[(len(packing.key_tiles), q.shape[1])](
            q, k, v, grad, lse, delta, dk, dv, packing.key_tiles, scale, scale * LOG2E, tokens,
            *_strides(q, k, v, grad, dk), **shape, N=BLOCK_N, **({"M": BLOCK_M} if wide else KEYS),
        )  # fmt: skip
        dk_out, dv_out = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
        _sum_heads[(triton.cdiv(k.numel(), 1024),)](
            dk, dv, dk_out, dv_out, k.numel(), GROUP=shape["GROUP"], D=k.shape[2], BLOCK=1024
        )
        return dq, dk_out, dv_out, None, None


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
        "PRECISE": q.dtype == torch.float32,
    }
