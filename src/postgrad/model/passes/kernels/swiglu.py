"""SwiGLU, silu(gate) · up, forward and backward, alone and together with the down projection."""

# Triton launches its kernels with arguments that a type checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from postgrad.model.passes.kernels import NO_FP_FUSION

BLOCK = 1024


@triton.jit
def _swiglu_values(gate, up):
    """Return silu(gate) · up in float32, rounded as the stock modules round."""
    gate_f32 = gate.to(tl.float32)
    silu = (gate_f32 / (1.0 + tl.exp(-gate_f32))).to(gate.dtype).to(tl.float32)
    return silu * up.to(tl.float32)


@triton.jit
def _swiglu_forward(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Rows of `gate_up` hold gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < width
    gate = tl.load(gate_up_ptr + row * 2 * width + cols, mask=in_row, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * width + width + cols, mask=in_row, other=0.0)
    out = _swiglu_values(gate, up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + cols, out, mask=in_row)


@triton.jit
def _swiglu_backward(
    gate_up_ptr, grad_ptr, dx_ptr, out_ptr, width, RECOMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the gradient of gate and up; with RECOMPUTE also the output of the forward pass."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < width
    offsets = row * 2 * width + cols
    gate = tl.load(gate_up_ptr + offsets, mask=in_row, other=0.0)
    up = tl.load(gate_up_ptr + offsets + width, mask=in_row, other=0.0)
    if RECOMPUTE:
        out = _swiglu_values(gate, up).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * width + cols, out, mask=in_row)
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    grad = tl.load(grad_ptr + row * width + cols, mask=in_row, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    grad_up = grad * silu
    dtype = dx_ptr.dtype.element_ty
    tl.store(dx_ptr + offsets, grad_gate.to(dtype), mask=in_row)
    tl.store(dx_ptr + offsets + width, grad_up.to(dtype), mask=in_row)


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up of gate_up (rows, 2 · width), without a gradient."""
    rows = len(gate_up)
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, BLOCK))
    _swiglu_forward[grid](gate_up, out, width, BLOCK=BLOCK, **NO_FP_FUSION)
    return out


def _swiglu_gradient(gate_up: Tensor, grad: Tensor, recompute: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of gate_up and, with `recompute`, the output of the forward pass."""
    rows = len(gate_up)
    width = gate_up.shape[1] // 2
    dx = torch.empty_like(gate_up)
    out = gate_up.new_empty(rows, width) if recompute else dx
    grid = (rows, triton.cdiv(width, BLOCK))
    _swiglu_backward[grid](
        gate_up, grad.contiguous(), dx, out, width,
        RECOMPUTE=recompute, BLOCK=BLOCK, **NO_FP_FUSION,
    )  # fmt: skip
    return dx, out


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        return _swiglu_gradient(gate_up, grads[0], recompute=False)[0]


class _SwigluDown(torch.autograd.Function):
    """SwiGLU and the down projection after it.

    The backward pass recomputes the output of SwiGLU: it is wide, and cheap to compute.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return linear(swiglu_forward(gate_up), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate_up, weight = ctx.saved_tensors
        grad = grads[0]
        _, train_weight, train_bias = ctx.needs_input_grad
        dx, activated = _swiglu_gradient(gate_up, grad @ weight, recompute=train_weight)
        dw = grad.T @ activated if train_weight else None
        db = grad.sum(0) if train_bias else None
        return dx, dw, db


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up of gate_up (rows, 2 · width)."""
    return _Swiglu.apply(gate_up)  # type: ignore[return-value]


def swiglu_down(gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the down projection of silu(gate) · up; gate_up is (rows, 2 · width)."""
    return _SwigluDown.apply(gate_up, weight, bias)  # type: ignore[return-value]
