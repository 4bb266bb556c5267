"""RMSNorm, forward and backward, for packed training passes and decode steps.

The decode kernels call `rms_norm_row` too, so training and decoding compute the same bits. A
CENTERED norm (Gemma) multiplies by 1 + weight in float32 and rounds once; others round before they
multiply by the weight.
"""

from typing import Any

import torch
from torch import Tensor

from postgrad.model.kernels import NO_FP_FUSION
from postgrad.model.kernels.launch import launch, tl, triton

# Programs of the backward pass; each sums the weight's gradient over its share of the rows.
MAX_PROGRAMS = 1024


@triton.jit
def scale_normalized(normalized, weight, dtype: tl.constexpr, CENTERED: tl.constexpr):
    """Return normalized float32 values times the weight, rounded as the stock modules round."""
    if CENTERED:
        out = normalized * (1.0 + weight.to(tl.float32))
    else:
        out = normalized.to(dtype).to(tl.float32) * weight.to(tl.float32)
    return out


@triton.jit
def rms_norm_row(x, weight, width, eps, CENTERED: tl.constexpr):
    """Return the normalized row in float32 and 1 / rms."""
    x_f32 = x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x_f32 * x_f32, 0) / width + eps)
    return scale_normalized(x_f32 * inverse_rms, weight, x.dtype, CENTERED), inverse_rms


@triton.jit
def _rms_norm_forward(
    x_ptr, weight_ptr, out_ptr, inverse_rms_ptr, width, eps,
    CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    in_row = cols < width
    x = tl.load(x_ptr + row * width + cols, mask=in_row, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0)
    out, inverse_rms = rms_norm_row(x, weight, width, eps, CENTERED)
    tl.store(out_ptr + row * width + cols, out.to(out_ptr.dtype.element_ty), mask=in_row)
    tl.store(inverse_rms_ptr + row, inverse_rms)


@triton.jit
def _rms_norm_backward(
    x_ptr, weight_ptr, grad_ptr, inverse_rms_ptr, dx_ptr, dw_ptr, num_rows, width,
    CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    in_row = cols < width
    weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    if CENTERED:
        weight += 1.0
    dw = tl.zeros([BLOCK], tl.float32)
    zero_i64 = tl.zeros([], tl.int64)
    for row in range(program, num_rows, tl.num_programs(0)):
        offsets = (zero_i64 + row) * width + cols
        x = tl.load(x_ptr + offsets, mask=in_row, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offsets, mask=in_row, other=0.0).to(tl.float32)
        inverse_rms = tl.load(inverse_rms_ptr + row)
        normalized = x * inverse_rms
        dw += grad * normalized
        weighted_grad = grad * weight
        projection = tl.sum(weighted_grad * normalized, 0) / width
        dx = inverse_rms * (weighted_grad - normalized * projection)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=in_row)
    tl.store(dw_ptr + program.to(tl.int64) * width + cols, dw, mask=in_row)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centered: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        num_rows, width = rows.shape
        out = torch.empty_like(rows)
        inverse_rms = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        launch(
            _rms_norm_forward, (num_rows,),
            rows, weight, out, inverse_rms, width, eps, CENTERED=centered,
            BLOCK=triton.next_power_of_2(width), num_warps=4, **NO_FP_FUSION,
        )  # fmt: skip
        ctx.save_for_backward(rows, weight, inverse_rms)
        ctx.centered = centered
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight, inverse_rms = ctx.saved_tensors
        num_rows, width = rows.shape
        grad = grads[0].reshape(num_rows, width).contiguous()
        dx = torch.empty_like(rows)
        num_programs = min(MAX_PROGRAMS, num_rows)
        dw = torch.empty(num_programs, width, dtype=torch.float32, device=rows.device)
        launch(
            _rms_norm_backward, (num_programs,),
            rows, weight, grad, inverse_rms, dx, dw, num_rows, width, CENTERED=ctx.centered,
            BLOCK=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
        return dx.view(grads[0].shape), dw.sum(0).to(weight.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
    """Return RMSNorm of x (..., width) over its last axis, times weight (width,).

    A `centered` norm multiplies by 1 + weight.
    """
    return _RmsNorm.apply(x, weight, eps, centered)  # type: ignore[return-value]
