"""Attention over packed tokens for wide heads without a sliding window, forward and backward.

Faster than those of packed_attention.py, but without the bits of the decode kernel, which wide
heads do not share anyway. A program computes a query tile for HEADS query heads of one key head,
so keys and values are read once for all of them. Blocks of keys that every query of the tile sees
are computed without a mask.
"""

import torch
from torch import Tensor

from postgrad.model.device import shared_memory_bytes
from postgrad.model.kernels.launch import (
    LOG2E,
    launch,
    shape_arguments,
    tl,
    token_head_strides,
    triton,
)
from postgrad.model.passes.packing import BLOCK_M, BLOCK_N, Packing

MIN_WIDTH = 65
MAX_WIDTH = 128
# Measured on an H200 (benchmarks/NOTES.md) with one and two query heads per program.
ONE_HEAD: dict[str, int] = {"HEADS": 1, "N": BLOCK_N, "num_warps": 4, "num_stages": 2}
TWO_HEADS: dict[str, int] = {"HEADS": 2, "N": BLOCK_N, "num_warps": 8, "num_stages": 3}
# For GPUs with 99 KiB of shared memory per program, such as an L40S. Others have 163 KiB or more.
FEWER_STAGES: dict[str, int] = {"num_stages": 2}
QUERY_GRADIENT_BYTES = 128 << 10
KEY_GRADIENT: dict[str, int] = {"M": 64, "num_warps": 4, "num_stages": 2}


@triton.jit
def _load(ptr, rows, stride, cols, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load whole rows of D values; all rows exist."""
    pointers = ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    if D == WIDTH:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=(cols < D)[None, :], other=0.0)
    return values


@triton.jit
def _load_some(ptr, rows, stride, cols, exists, D: tl.constexpr):
    """Load rows of D values; zeros for rows that do not exist."""
    pointers = ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    return tl.load(pointers, mask=exists[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def _load_keys(
    ptr, keys, keys_end, stride, cols, MASKED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):
    if MASKED:
        values = _load_some(ptr, keys, stride, cols, keys < keys_end, D)
    else:
        values = _load(ptr, keys, stride, cols, D, WIDTH)
    return values


@triton.jit
def _visible(keys, keys_end, rows, CAUSAL: tl.constexpr):
    """Return the (rows, keys) mask of a block that some queries of the tile do not see."""
    exists = (keys < keys_end)[None, :]
    if CAUSAL:
        exists = exists & (keys[None, :] <= rows[:, None])
    return exists


@triton.jit
def _key_range(
    PART: tl.constexpr, first, end, own_start, shared_start, shared_end, N: tl.constexpr
):
    """Return start, stop and end of a part of the keys that a query tile sees.

    Parts 0 and 2 are whole blocks of the shared and the own keys that every query sees, without a
    mask. Parts 1 and 3 are what follows them.
    """
    if PART < 2:
        segment_start, whole, keys_end = shared_start, shared_end - shared_start, shared_end
    else:
        segment_start, whole, keys_end = own_start, first - own_start, end
    middle = segment_start + whole // N * N
    if PART % 2 == 0:
        start, stop = segment_start, middle
    else:
        start, stop = middle, keys_end
    return start, stop, keys_end


@triton.jit
def _forward_blocks(
    acc, row_max, row_sum, q, k_ptr, v_ptr, start, stop, keys_end, rows, cols,
    k_token, v_token, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the keys start..stop to the running softmax of each query."""
    for block_start in range(start, stop, N):
        keys = block_start + tl.arange(0, N)
        k = _load_keys(k_ptr, keys, keys_end, k_token, cols, MASKED, D, WIDTH)
        v = _load_keys(v_ptr, keys, keys_end, v_token, cols, MASKED, D, WIDTH)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            scores = tl.where(_visible(keys, keys_end, rows, CAUSAL), scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _query_gradient_blocks(
    dq, q, grad, lse, delta, k_ptr, v_ptr, start, stop, keys_end, rows, cols,
    k_token, v_token, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Add what the keys start..stop give to the gradient of each query."""
    for block_start in range(start, stop, N):
        keys = block_start + tl.arange(0, N)
        k = _load_keys(k_ptr, keys, keys_end, k_token, cols, MASKED, D, WIDTH)
        v = _load_keys(v_ptr, keys, keys_end, v_token, cols, MASKED, D, WIDTH)
        scores = tl.dot(q, tl.trans(k))
        p = tl.exp2(scores * scale_log2 - lse[:, None])
        if MASKED:
            p = tl.where(_visible(keys, keys_end, rows, CAUSAL), p, 0.0)
        dp = tl.dot(grad, tl.trans(v))
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def _key_gradient_blocks(
    dk, dv, k, v, q_ptr, grad_ptr, lse_ptr, delta_ptr, start, stop, rows_end, keys, cols,
    q_token, grad_token, scale_log2,
    MASKED: tl.constexpr, M: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add what the queries start..stop give to the gradients of keys and values."""
    for block_start in range(start, stop, M):
        rows = block_start + tl.arange(0, M)
        q = _load_keys(q_ptr, rows, rows_end, q_token, cols, MASKED, D, WIDTH)
        grad = _load_keys(grad_ptr, rows, rows_end, grad_token, cols, MASKED, D, WIDTH)
        if MASKED:
            lse = tl.load(lse_ptr + rows, mask=rows < rows_end, other=0.0)
            delta = tl.load(delta_ptr + rows, mask=rows < rows_end, other=0.0)
        else:
            lse = tl.load(lse_ptr + rows)
            delta = tl.load(delta_ptr + rows)
        scores = tl.dot(k, tl.trans(q))
        p = tl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            visible = (rows < rows_end)[None, :] & (keys[:, None] <= rows[None, :])
            p = tl.where(visible, p, 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv)
        dp = tl.dot(v, tl.trans(grad))
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _tile_rows(tile, HEADS: tl.constexpr, M: tl.constexpr):
    """Return rows and heads of a program's queries: M rows of the first head, M of the next..."""
    index = tl.arange(0, HEADS * M)
    rows = tl.load(tile) + index % M
    heads = tl.program_id(1) * HEADS + index // M
    return rows, heads


@triton.jit
def _wide_attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, tiles_ptr, scale_log2, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """One program computes one query tile of HEADS heads."""
    tile = tiles_ptr + tl.program_id(0) * 5
    rows, heads = _tile_rows(tile, HEADS, M)
    first, end, own_start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    shared_start, shared_end = tl.load(tile + 3), tl.load(tile + 4)
    cols = tl.arange(0, WIDTH)
    in_tile = rows < end
    in_row = in_tile[:, None] & (cols < D)[None, :]
    q_offsets = rows.to(tl.int64) * q_token + heads * q_head
    q = tl.load(q_ptr + q_offsets[:, None] + cols[None, :], mask=in_row, other=0.0)
    key_head = (tl.program_id(1) * HEADS // GROUP).to(tl.int64)
    k_ptr += key_head * k_head
    v_ptr += key_head * v_head
    row_max = tl.full([HEADS * M], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS * M], tl.float32)
    acc = tl.zeros([HEADS * M, WIDTH], tl.float32)
    for part in tl.static_range(4):
        start, stop, keys_end = _key_range(part, first, end, own_start, shared_start, shared_end, N)
        acc, row_max, row_sum = _forward_blocks(
            acc, row_max, row_sum, q, k_ptr, v_ptr, start, stop, keys_end, rows, cols,
            k_token, v_token, scale_log2, part % 2 == 1, part == 3, N, D, WIDTH,
        )  # fmt: skip
    acc = acc / row_sum[:, None]
    out_offsets = rows.to(tl.int64) * out_token + heads * out_head
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets[:, None] + cols[None, :], out, mask=in_row)
    tl.store(lse_ptr + heads * num_tokens + rows, row_max + tl.log2(row_sum), mask=in_tile)


@triton.jit
def _wide_attention_query_gradient(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, tiles_ptr,
    scale, scale_log2, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, dq_token, dq_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """One program computes dq of one query tile of HEADS heads.

    It also stores delta = sum(grad · out), which the key gradient kernel reads afterwards.
    """
    tile = tiles_ptr + tl.program_id(0) * 5
    rows, heads = _tile_rows(tile, HEADS, M)
    first, end, own_start = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    shared_start, shared_end = tl.load(tile + 3), tl.load(tile + 4)
    cols = tl.arange(0, WIDTH)
    in_tile = rows < end
    in_row = in_tile[:, None] & (cols < D)[None, :]
    q_offsets = (rows.to(tl.int64) * q_token + heads * q_head)[:, None] + cols[None, :]
    grad_offsets = (rows.to(tl.int64) * grad_token + heads * grad_head)[:, None] + cols[None, :]
    q = tl.load(q_ptr + q_offsets, mask=in_row, other=0.0)
    grad = tl.load(grad_ptr + grad_offsets, mask=in_row, other=0.0)
    out = tl.load(out_ptr + grad_offsets, mask=in_row, other=0.0)
    lse = tl.load(lse_ptr + heads * num_tokens + rows, mask=in_tile, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + heads * num_tokens + rows, delta, mask=in_tile)
    key_head = (tl.program_id(1) * HEADS // GROUP).to(tl.int64)
    k_ptr += key_head * k_head
    v_ptr += key_head * v_head
    dq = tl.zeros([HEADS * M, WIDTH], tl.float32)
    for part in tl.static_range(4):
        start, stop, keys_end = _key_range(part, first, end, own_start, shared_start, shared_end, N)
        dq = _query_gradient_blocks(
            dq, q, grad, lse, delta, k_ptr, v_ptr, start, stop, keys_end, rows, cols,
            k_token, v_token, scale_log2, part % 2 == 1, part == 3, N, D, WIDTH,
        )  # fmt: skip
    dq_offsets = (rows.to(tl.int64) * dq_token + heads * dq_head)[:, None] + cols[None, :]
    tl.store(dq_ptr + dq_offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def _wide_attention_key_gradient(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, tiles_ptr,
    scale, scale_log2, num_tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, d_token, d_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program computes dk and dv of one key tile, for one query head of its key head."""
    tile = tiles_ptr + tl.program_id(0) * 4
    head = tl.program_id(1).to(tl.int64)
    first, end, visible_until = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    keys = first + tl.arange(0, N)
    cols = tl.arange(0, WIDTH)
    in_tile = keys < end
    k = _load_some(k_ptr + head // GROUP * k_head, keys, k_token, cols, in_tile, D)
    v = _load_some(v_ptr + head // GROUP * v_head, keys, v_token, cols, in_tile, D)
    q_ptr += head * q_head
    grad_ptr += head * grad_head
    lse_ptr += head * num_tokens
    delta_ptr += head * num_tokens
    dk = tl.zeros([N, WIDTH], tl.float32)
    dv = tl.zeros([N, WIDTH], tl.float32)
    # The first N queries are the tile's own tokens; those after them see all of its keys.
    own_stop = tl.minimum(first + (M if M > N else N), visible_until)
    full_stop = own_stop + (visible_until - own_stop) // M * M
    for part in tl.static_range(3):
        if part == 0:
            start, stop = first, own_stop
        elif part == 1:
            start, stop = own_stop, full_stop
        else:
            start, stop = full_stop, visible_until
        dk, dv = _key_gradient_blocks(
            dk, dv, k, v, q_ptr, grad_ptr, lse_ptr, delta_ptr, start, stop, visible_until,
            keys, cols, q_token, grad_token, scale_log2, part != 1, M, D, WIDTH,
        )  # fmt: skip
    mask = in_tile[:, None] & (cols < D)[None, :]
    offsets = (keys.to(tl.int64) * d_token)[:, None] + head * d_head + cols[None, :]
    tl.store(dk_ptr + offsets, dk * scale, mask=mask)
    tl.store(dv_ptr + offsets, dv, mask=mask)


def supports(q: Tensor, window: int) -> bool:
    """Return whether these kernels compute the attention of q, (tokens, heads, width)."""
    is_wide = MIN_WIDTH <= q.shape[2] <= MAX_WIDTH
    return is_wide and not window and q.dtype in (torch.bfloat16, torch.float16)


def _query_config(q: Tensor, k: Tensor, needed_bytes: int = 0) -> dict[str, int]:
    """Return the launch parameters of the kernels that work on query tiles.

    `needed_bytes` of shared memory are those of TWO_HEADS; where a GPU has less, fewer blocks are
    loaded ahead.
    """
    if q.shape[1] // k.shape[1] % 2:
        return ONE_HEAD
    return TWO_HEADS if shared_memory_bytes(q.device) >= needed_bytes else TWO_HEADS | FEWER_STAGES


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing, scale: float
) -> None:
    """Write the outputs, and (heads, tokens) base-2 logarithms of the sums of weights."""
    config = _query_config(q, k)
    launch(
        _wide_attention_forward, (len(packing.query_tiles), q.shape[1] // config["HEADS"]),
        q, k, v, out, lse, packing.query_tiles, scale * LOG2E, len(q),
        *token_head_strides(q, k, v, out), **shape_arguments(q, k), M=BLOCK_M, **config,
    )  # fmt: skip


def compute_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, packing: Packing, scale: float,
) -> None:  # fmt: skip
    """Write the gradients dq, and dk and dv of each query head."""
    shape = shape_arguments(q, k)
    config = _query_config(q, k, QUERY_GRADIENT_BYTES)
    scales = (scale, scale * LOG2E, len(q))
    launch(
        _wide_attention_query_gradient, (len(packing.query_tiles), q.shape[1] // config["HEADS"]),
        q, k, v, out, grad, lse, delta, dq, packing.query_tiles, *scales,
        *token_head_strides(q, k, v, grad, dq), **shape, M=BLOCK_M, **config,
    )  # fmt: skip
    launch(
        _wide_attention_key_gradient, (len(packing.key_tiles), q.shape[1]),
        q, k, v, grad, lse, delta, dk, dv, packing.key_tiles, *scales,
        *token_head_strides(q, k, v, grad, dk), **shape, N=BLOCK_N, **KEY_GRADIENT,
    )  # fmt: skip
