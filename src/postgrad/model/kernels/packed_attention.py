"""Attention over packed tokens (see model/passes/packing.py), forward and backward.

Keys are visited in blocks of BLOCK_N, shared keys first, CHUNK blocks at a time. The decode kernel
visits the same blocks in the same order and merges the same chunks. With heads of up to 64 its
results are the same bits; with wider heads it multiplies fewer rows at a time and may round
differently (docs/design.md).

With a sliding window of WINDOW tokens a query sees keys less than WINDOW positions before it.
Blocks that no query of a tile sees are skipped. A row may see no key of a block or chunk that
other rows of its tile see; such a block or chunk leaves the row's softmax as it was, bit for bit.
"""

from typing import Any

import torch
from torch import Tensor

from postgrad.model.kernels import NO_FP_FUSION
from postgrad.model.kernels import wide_attention as wide
from postgrad.model.kernels.launch import (
    LOG2E,
    launch,
    shape_arguments,
    tl,
    token_head_strides,
    triton,
    warp_config,
)
from postgrad.model.passes.packing import BLOCK_M, BLOCK_N, CHUNK, Packing
from postgrad.model.passes.recompute import keep_result, take_result


@triton.jit
def _finite_max(row_max, WINDOW: tl.constexpr):
    """Return the maximum to subtract in an exponent; 0 for a row that has seen no key yet."""
    if WINDOW:
        row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    return row_max


@triton.jit
def online_softmax_step(
    acc, row_max, row_sum, q, k, v, visible, scale_log2, PRECISE: tl.constexpr, WINDOW: tl.constexpr
):
    """Add one block of keys to the running softmax of each query.

    Without a window every query sees a key of every block that is visited.
    """
    precision: tl.constexpr = "ieee" if PRECISE else "tf32"
    scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale_log2
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    finite_max = _finite_max(new_max, WINDOW)
    rescale = tl.exp2(row_max - finite_max)
    p = tl.exp2(scores - finite_max[:, None])
    row_sum = row_sum * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision=precision)
    return acc, new_max, row_sum


@triton.jit
def merge_chunk(acc, row_max, row_sum, chunk_acc, chunk_max, chunk_sum, WINDOW: tl.constexpr):
    """Merge a chunk's softmax into that of the chunks before it."""
    new_max = tl.maximum(row_max, chunk_max)
    finite_max = _finite_max(new_max, WINDOW)
    rescale = tl.exp2(row_max - finite_max)
    chunk_rescale = tl.exp2(chunk_max - finite_max)
    acc = acc * rescale[:, None] + chunk_acc * chunk_rescale[:, None]
    row_sum = row_sum * rescale + chunk_sum * chunk_rescale
    return acc, new_max, row_sum


@triton.jit
def first_visible_block(position, shared, N: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first block of keys that the query at this position sees.

    Blocks of N keys: those of the `shared` prompt tokens, then those of the row's own tokens.
    """
    first_key = tl.maximum(position - WINDOW + 1, 0)
    own_block = (shared + N - 1) // N + (first_key - shared) // N
    return tl.where(first_key < shared, first_key // N, own_block)


@triton.jit
def _load_rows(base_ptr, rows, stride, cols, row_mask, D: tl.constexpr):
    mask = row_mask[:, None] & (cols < D)[None, :]
    return tl.load(base_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _packed_attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, tiles_ptr, positions_ptr, scale_log2, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, PRECISE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program computes one query tile of one head.

    `x_token` and `x_head` are the strides of tensor x along tokens and heads.
    """
    tile = tiles_ptr + tl.program_id(0) * 5
    head = tl.program_id(1).to(tl.int64)
    first, end, own_start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    shared_start, shared_end = tl.load(tile + 3), tl.load(tile + 4)
    rows = (first + tl.arange(0, M)).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    in_tile = rows < end
    q = _load_rows(q_ptr + head * q_head, rows, q_token, cols, in_tile, D)
    k_ptr += head // GROUP * k_head
    v_ptr += head // GROUP * v_head
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    shared_blocks = (shared_end - shared_start + N - 1) // N
    num_blocks = shared_blocks + (end - own_start + N - 1) // N
    first_block = 0
    if WINDOW:
        positions = tl.load(positions_ptr + rows, mask=in_tile, other=0)
        position = tl.load(positions_ptr + first, mask=first < end, other=0)
        first_block = first_visible_block(position, shared_end - shared_start, N, WINDOW)
    for chunk_start in range(first_block // CHUNK * CHUNK, num_blocks, CHUNK):
        chunk_max = tl.full([M], float("-inf"), tl.float32)
        chunk_sum = tl.zeros([M], tl.float32)
        chunk_acc = tl.zeros([M, WIDTH], tl.float32)
        start_block = chunk_start
        if WINDOW:
            start_block = tl.maximum(chunk_start, first_block)
        for block in range(start_block, tl.minimum(chunk_start + CHUNK, num_blocks)):
            is_shared = block < shared_blocks
            block_start = tl.where(
                is_shared, shared_start + block * N, own_start + (block - shared_blocks) * N
            )
            keys = (block_start + tl.arange(0, N)).to(tl.int64)
            key_exists = keys < tl.where(is_shared, shared_end, end)
            k = _load_rows(k_ptr, keys, k_token, cols, key_exists, D)
            v = _load_rows(v_ptr, keys, v_token, cols, key_exists, D)
            visible = key_exists[None, :] & (is_shared | (keys[None, :] <= rows[:, None]))
            if WINDOW:
                key_positions = tl.load(positions_ptr + keys, mask=key_exists, other=0)
                visible &= positions[:, None] - key_positions[None, :] < WINDOW
            chunk_acc, chunk_max, chunk_sum = online_softmax_step(
                chunk_acc, chunk_max, chunk_sum, q, k, v, visible, scale_log2, PRECISE, WINDOW
            )
        acc, row_max, row_sum = merge_chunk(
            acc, row_max, row_sum, chunk_acc, chunk_max, chunk_sum, WINDOW
        )
    acc = acc / row_sum[:, None]
    out_offsets = rows[:, None] * out_token + head * out_head + cols[None, :]
    out_mask = in_tile[:, None] & (cols < D)[None, :]
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(lse_ptr + head * num_tokens + rows, row_max + tl.log2(row_sum), mask=in_tile)


@triton.jit
def _packed_attention_backward_queries(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, tiles_ptr,
    positions_ptr, scale, scale_log2, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, dq_token, dq_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program computes dq of one query tile of one head.

    It also stores delta = sum(grad · out), which the key gradient kernel reads afterwards.
    """
    precision: tl.constexpr = "ieee" if PRECISE else "tf32"
    tile = tiles_ptr + tl.program_id(0) * 5
    head = tl.program_id(1).to(tl.int64)
    first, end, own_start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    shared_start, shared_end = tl.load(tile + 3), tl.load(tile + 4)
    rows = (first + tl.arange(0, M)).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    in_tile = rows < end
    q = _load_rows(q_ptr + head * q_head, rows, q_token, cols, in_tile, D)
    grad = _load_rows(grad_ptr + head * grad_head, rows, grad_token, cols, in_tile, D)
    out = _load_rows(out_ptr + head * grad_head, rows, grad_token, cols, in_tile, D)
    lse = tl.load(lse_ptr + head * num_tokens + rows, mask=in_tile, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + head * num_tokens + rows, delta, mask=in_tile)
    k_ptr += head // GROUP * k_head
    v_ptr += head // GROUP * v_head
    dq = tl.zeros([M, WIDTH], tl.float32)
    if WINDOW:
        positions = tl.load(positions_ptr + rows, mask=in_tile, other=0)
        shared = shared_end - shared_start
        position = tl.load(positions_ptr + first, mask=first < end, other=0)
        first_block = first_visible_block(position, shared, N, WINDOW)
        own_start += tl.maximum(first_block - (shared + N - 1) // N, 0) * N
        shared_start += first_block * N
    for segment in tl.static_range(2):  # 0: the shared keys, 1: the own keys
        keys_start = shared_start if segment == 0 else own_start
        keys_end = shared_end if segment == 0 else end
        for block_start in range(keys_start, keys_end, N):
            keys = (block_start + tl.arange(0, N)).to(tl.int64)
            key_exists = keys < keys_end
            k = _load_rows(k_ptr, keys, k_token, cols, key_exists, D)
            v = _load_rows(v_ptr, keys, v_token, cols, key_exists, D)
            scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale_log2
            causal = (keys[None, :] <= rows[:, None]) | (segment == 0)
            visible = key_exists[None, :] & causal & in_tile[:, None]
            if WINDOW:
                key_positions = tl.load(positions_ptr + keys, mask=key_exists, other=0)
                visible &= positions[:, None] - key_positions[None, :] < WINDOW
            p = tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0)
            dp = tl.dot(grad, tl.trans(v), input_precision=precision)
            ds = p * (dp - delta[:, None])
            dq += tl.dot(ds.to(k.dtype), k, input_precision=precision)
    dq_offsets = rows[:, None] * dq_token + head * dq_head + cols[None, :]
    dq_mask = in_tile[:, None] & (cols < D)[None, :]
    tl.store(dq_ptr + dq_offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=dq_mask)


@triton.jit
def _packed_attention_backward_keys(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, tiles_ptr,
    positions_ptr, scale, scale_log2, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, d_token, d_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program computes dk and dv of one key tile, for one query head of its key head."""
    precision: tl.constexpr = "ieee" if PRECISE else "tf32"
    tile = tiles_ptr + tl.program_id(0) * 4
    head = tl.program_id(1).to(tl.int64)
    key_head = head // GROUP
    first, end, visible_until = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    keys = (first + tl.arange(0, N)).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    in_tile = keys < end
    k = _load_rows(k_ptr + key_head * k_head, keys, k_token, cols, in_tile, D)
    v = _load_rows(v_ptr + key_head * v_head, keys, v_token, cols, in_tile, D)
    dk = tl.zeros([N, WIDTH], tl.float32)
    dv = tl.zeros([N, WIDTH], tl.float32)
    if WINDOW:
        key_positions = tl.load(positions_ptr + keys, mask=in_tile, other=0)
        # A window that ends inside the segment ends inside the tokens that follow the tile.
        window_end = end + WINDOW - 1
        visible_until = tl.where(window_end <= tl.load(tile + 3), window_end, visible_until)
    for block_start in range(first, visible_until, M):
        rows = (block_start + tl.arange(0, M)).to(tl.int64)
        row_exists = rows < visible_until
        q = _load_rows(q_ptr + head * q_head, rows, q_token, cols, row_exists, D)
        grad = _load_rows(grad_ptr + head * grad_head, rows, grad_token, cols, row_exists, D)
        lse = tl.load(lse_ptr + head * num_tokens + rows, mask=row_exists, other=0.0)
        delta = tl.load(delta_ptr + head * num_tokens + rows, mask=row_exists, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision=precision) * scale_log2
        visible = in_tile[:, None] & row_exists[None, :] & (keys[:, None] <= rows[None, :])
        if WINDOW:
            row_positions = tl.load(positions_ptr + rows, mask=row_exists, other=0)
            visible &= row_positions[None, :] - key_positions[:, None] < WINDOW
        p = tl.where(visible, tl.exp2(scores - lse[None, :]), 0.0)
        dv += tl.dot(p.to(grad.dtype), grad, input_precision=precision)
        dp = tl.dot(v, tl.trans(grad), input_precision=precision)
        ds = p * (dp - delta[None, :])
        dk += tl.dot(ds.to(q.dtype), q, input_precision=precision)
    mask = in_tile[:, None] & (cols < D)[None, :]
    offsets = keys[:, None] * d_token + head * d_head + cols[None, :]
    tl.store(dk_ptr + offsets, dk * scale, mask=mask)
    tl.store(dv_ptr + offsets, dv, mask=mask)


@triton.jit
def _sum_query_heads(
    dk_ptr, dv_ptr, dk_out, dv_out, size, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the key gradients of the query heads that share a key head."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    source = offsets // D * (GROUP * D) + offsets % D
    dk = tl.zeros([BLOCK], tl.float32)
    dv = tl.zeros([BLOCK], tl.float32)
    for member in tl.static_range(GROUP):
        dk += tl.load(dk_ptr + source + member * D, mask=mask, other=0.0)
        dv += tl.load(dv_ptr + source + member * D, mask=mask, other=0.0)
    tl.store(dk_out + offsets, dk.to(dk_out.dtype.element_ty), mask=mask)
    tl.store(dv_out + offsets, dv.to(dv_out.dtype.element_ty), mask=mask)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int
    ) -> Tensor:
        out, lse = take_result() or _attend(q, k, v, packing, scale, window)
        if any(ctx.needs_input_grad):
            keep_result(out, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing = packing
        ctx.scale = scale
        ctx.window = window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        packing: Packing = ctx.packing
        scale: float = ctx.scale
        _, heads, width = q.shape
        grad = grads[0].contiguous()
        delta = torch.empty_like(lse)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        # One program per query head keeps the long prompt tiles parallel.
        # _sum_query_heads sums the heads of one key head afterwards.
        dk, dv = (torch.empty(q.shape, dtype=torch.float32, device=q.device) for _ in range(2))
        tensors = (q, k, v, out, grad, lse, delta, dq, dk, dv)
        if wide.supports(q, ctx.window):
            wide.compute_gradients(*tensors, packing, scale)
        else:
            _compute_gradients(*tensors, packing, scale, ctx.window)
        dk_out, dv_out = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
        launch(
            _sum_query_heads, (triton.cdiv(k.numel(), 1024),),
            dk, dv, dk_out, dv_out, k.numel(), GROUP=heads // k.shape[1], D=width, BLOCK=1024,
        )  # fmt: skip
        return dq, dk_out, dv_out, None, None, None


def _compute_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, packing: Packing, scale: float, window: int,
) -> None:  # fmt: skip
    """Write the gradients dq, and dk and dv of each query head."""
    shape = {**shape_arguments(q, k), "PRECISE": q.dtype == torch.float32}
    config = warp_config(q.shape[2], q.dtype)
    tokens, heads, _ = q.shape
    launch(
        _packed_attention_backward_queries, (len(packing.query_tiles), heads),
        q, k, v, out, grad, lse, delta, dq, packing.query_tiles, packing.positions,
        scale, scale * LOG2E, tokens,
        *token_head_strides(q, k, v, grad, dq), **shape, M=BLOCK_M, WINDOW=window,
        **config.query_grad,
    )  # fmt: skip
    launch(
        _packed_attention_backward_keys, (len(packing.key_tiles), heads),
        q, k, v, grad, lse, delta, dk, dv, packing.key_tiles, packing.positions,
        scale, scale * LOG2E, tokens,
        *token_head_strides(q, k, v, grad, dk), **shape, N=BLOCK_N, WINDOW=window,
        **config.key_grad,
    )  # fmt: skip


def _attend(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return the outputs, and (heads, tokens) base-2 logarithms of the sums of weights."""
    tokens, heads, width = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    if wide.supports(q, window):
        wide.attend(q, k, v, out, lse, packing, scale)
        return out, lse
    config = warp_config(width, q.dtype)
    launch(
        _packed_attention_forward, (len(packing.query_tiles), heads),
        q, k, v, out, lse, packing.query_tiles, packing.positions, scale * LOG2E, tokens,
        *token_head_strides(q, k, v, out), **shape_arguments(q, k), N=BLOCK_N, M=BLOCK_M,
        CHUNK=CHUNK, PRECISE=q.dtype == torch.float32, WINDOW=window,
        num_warps=config.forward_warps, num_stages=config.forward_stages, **NO_FP_FUSION,
    )  # fmt: skip
    return out, lse


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int = 0
) -> Tensor:
    """Return (tokens, heads, width) attention outputs of packed tokens.

    q is (tokens, heads, width); k and v are (tokens, key_heads, width). The last axis must be
    contiguous in memory. `window` is the sliding window in tokens; 0 is none. Without gradients,
    k and v may have further tokens after those of q, which shared segments refer to.
    """
    return _PackedAttention.apply(q, k, v, packing, scale, window)  # type: ignore[return-value]
