"""4-bit weights (see model/quantized.py) to bfloat16 or float32, in one kernel."""

import torch
from torch import Tensor

from postgrad.model.kernels import NO_FP_FUSION
from postgrad.model.kernels.launch import launch, tl, triton

BYTES = 1024  # codes per program, two weights each


@triton.jit
def _dequantize(
    codes_ptr, scales_ptr, levels_ptr, out_ptr, num_bytes, BYTES: tl.constexpr,
    BYTES_PER_SCALE: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BYTES
    offsets = start + tl.arange(0, BYTES)
    exists = offsets < num_bytes
    byte = tl.load(codes_ptr + offsets, mask=exists, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + offsets // BYTES_PER_SCALE, mask=exists, other=0.0)
    first = tl.load(levels_ptr + (byte >> 4)) * scale
    second = tl.load(levels_ptr + (byte & 15)) * scale
    values = tl.interleave(first, second).to(out_ptr.dtype.element_ty)
    out_offsets = 2 * start + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + out_offsets, values, mask=out_offsets < 2 * num_bytes)


def dequantize(codes: Tensor, scales: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the (out, in) matrix of codes (out, in / 2) and scales (out, in / block)."""
    out = torch.empty(len(codes), 2 * codes.shape[1], dtype=dtype, device=codes.device)
    num_bytes = codes.numel()
    launch(
        _dequantize, (triton.cdiv(num_bytes, BYTES),),
        codes, scales, levels, out, num_bytes, BYTES=BYTES,
        BYTES_PER_SCALE=num_bytes // scales.numel(), **NO_FP_FUSION,
    )  # fmt: skip
    return out
