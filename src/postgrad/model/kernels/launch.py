"""Launches the Triton kernels; launch parameters of those for attention, by width of heads."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from postgrad.model.passes.packing import BLOCK_M, BLOCK_N


class _NoTriton:
    """Replaces triton and triton.language where they are missing: no kernel is launched there."""

    @staticmethod
    def jit(function: Any) -> Any:
        return function

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value

    @staticmethod
    def cdiv(dividend: int, divisor: int) -> int:
        return -(-dividend // divisor)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        return 1 << (number - 1).bit_length()


triton: Any  # a kernel's text is Triton's language, not Python's
tl: Any
try:
    import triton
    import triton.language as tl
except ImportError:  # there is no version for macOS
    triton = tl = _NoTriton()


def launch(
    kernel: Any, grid: tuple[int, ...], tensor: Tensor, *args: Any, **constants: Any
) -> None:
    """Launch a kernel. On meta tensors, which count memory only, do nothing."""
    if not tensor.is_meta:
        kernel[grid](tensor, *args, **constants)


LOG2E = 1.4426950408889634


class WarpConfig(NamedTuple):
    """Launch parameters for one width of heads, as measured on an H200 (benchmarks/NOTES.md).

    Training programs work on BLOCK_M queries.
    """

    forward_warps: int
    forward_stages: int
    decode_rows: int
    decode_warps: int
    decode_stages: int
    same_bits: bool  # decoding and training divide rows into the same chunks
    key_grad: dict[str, int]
    query_grad: dict[str, int]


NARROW = WarpConfig(
    forward_warps=2,
    forward_stages=3,
    decode_rows=16,
    decode_warps=1,
    decode_stages=3,
    same_bits=True,
    key_grad={"M": 128, "num_warps": 4, "num_stages": 2},
    query_grad={"N": 32, "num_warps": 4, "num_stages": 3},
)
# More queries per step of the key gradient would spill registers: 2.5 times slower.
WIDE = NARROW._replace(
    forward_warps=4,
    decode_warps=2,
    decode_stages=2,
    same_bits=False,
    key_grad={"M": 32, "num_warps": 4, "num_stages": 3},
)
# For a decode step of many programs: 10% faster at 8,192, 3% slower at 2,048.
WIDE_MANY = WIDE._replace(decode_warps=4, decode_stages=4)
MANY_PROGRAMS = 4096
# Not tuned, only within the limits of registers and shared memory.
WIDEST = WIDE._replace(
    forward_warps=8,
    forward_stages=2,
    decode_warps=4,
    decode_stages=2,
    key_grad={"M": 32, "num_warps": 8, "num_stages": 2},
    query_grad={"N": 32, "num_warps": 8, "num_stages": 2},
)


# float32 takes twice the shared memory.
FLOAT32: dict[str, Any] = {"key_grad": {"M": BLOCK_M}, "query_grad": {"N": BLOCK_N}}
WIDEST_FLOAT32: dict[str, Any] = {
    "forward_stages": 1,
    "decode_stages": 1,
    "key_grad": {"M": 32, "num_warps": 8, "num_stages": 1},
    "query_grad": {"N": 32, "num_warps": 8, "num_stages": 1},
}


def warp_config(width: int, dtype: torch.dtype, num_programs: int = 0) -> WarpConfig:
    """Return the launch parameters for heads of this width; `num_programs` of a decode step.

    Decoding uses the 16-row tensor-core instructions, which waste little where few query heads
    share a key head. For narrow heads, training uses them too and divides rows into the same
    chunks, so both compute the same bits. For wide heads, training would spill registers with them
    and uses the 64-row instructions. Models with wide heads have matrix products whose bits depend
    on the number of rows anyway.
    """
    if width > 128:
        return WIDEST._replace(**WIDEST_FLOAT32) if dtype == torch.float32 else WIDEST
    if width <= 64:
        return NARROW._replace(**FLOAT32) if dtype == torch.float32 else NARROW
    if dtype == torch.float32:
        return WIDE._replace(**FLOAT32)
    return WIDE_MANY if num_programs >= MANY_PROGRAMS else WIDE


def token_head_strides(*tensors: Tensor) -> list[int]:
    """Return the strides along tokens and heads of each tensor."""
    return [stride for t in tensors for stride in t.stride()[:2]]


def shape_arguments(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Return the compile-time sizes of the attention of q and k, (tokens, heads, width)."""
    width = q.shape[2]
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "D": width,
        "WIDTH": max(16, triton.next_power_of_2(width)),
    }
