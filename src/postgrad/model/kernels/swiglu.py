"""SwiGLU, silu(gate) · up, forward and backward, alone and together with the down projection.

With GELU, the activation is the tanh approximation of gelu instead of silu (GeGLU, Gemma).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from postgrad.model.kernels import NO_FP_FUSION
from postgrad.model.kernels.launch import launch, tl, triton
from postgrad.model.lora import AdapterProducts
from postgrad.model.optimizers.gradient_sums import weight_gradients
from postgrad.model.quantized import QuantizedWeight, dense

BLOCK = 1024
GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 · sqrt(2 / pi)
GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _sigmoid_argument(gate, GELU: tl.constexpr):
    """Return u such that the activation of gate is gate · sigmoid(u).

    0.5 · (1 + tanh(u / 2)) is sigmoid(u), so the tanh approximation of gelu has this form too.
    """
    argument = gate
    if GELU:
        argument = GELU_SCALE * (gate + GELU_CUBIC * (gate * gate * gate))
    return argument


@triton.jit
def _swiglu_values(gate, up, GELU: tl.constexpr):
    """Return activation(gate) · up in float32, rounded as the stock modules round."""
    gate_f32 = gate.to(tl.float32)
    activated = gate_f32 / (1.0 + tl.exp(-_sigmoid_argument(gate_f32, GELU)))
    return activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@triton.jit
def _swiglu_forward(gate_up_ptr, out_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of `gate_up` hold gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < width
    gate = tl.load(gate_up_ptr + row * 2 * width + cols, mask=in_row, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * width + width + cols, mask=in_row, other=0.0)
    out = _swiglu_values(gate, up, GELU).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + cols, out, mask=in_row)


@triton.jit
def _swiglu_backward(
    gate_up_ptr, grad_ptr, dx_ptr, out_ptr, width,
    RECOMPUTE: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of gate and up; with RECOMPUTE also the output of the forward pass."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < width
    offsets = row * 2 * width + cols
    gate = tl.load(gate_up_ptr + offsets, mask=in_row, other=0.0)
    up = tl.load(gate_up_ptr + offsets + width, mask=in_row, other=0.0)
    if RECOMPUTE:
        out = _swiglu_values(gate, up, GELU).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * width + cols, out, mask=in_row)
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    grad = tl.load(grad_ptr + row * width + cols, mask=in_row, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-_sigmoid_argument(gate, GELU)))
    activated = gate * sigmoid
    gate_dsigmoid = activated * (1.0 - sigmoid)
    if GELU:
        gate_dsigmoid *= GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * gate * gate)
    grad_gate = grad * up * (sigmoid + gate_dsigmoid)
    grad_up = grad * activated
    dtype = dx_ptr.dtype.element_ty
    tl.store(dx_ptr + offsets, grad_gate.to(dtype), mask=in_row)
    tl.store(dx_ptr + offsets + width, grad_up.to(dtype), mask=in_row)


def swiglu_forward(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """Return activation(gate) · up of gate_up (rows, 2 · width), without a gradient."""
    rows = len(gate_up)
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, BLOCK))
    launch(_swiglu_forward, grid, gate_up, out, width, GELU=gelu, BLOCK=BLOCK, **NO_FP_FUSION)
    return out


def _swiglu_gradient(
    gate_up: Tensor, grad: Tensor, gelu: bool, recompute: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of gate_up and, with `recompute`, the output of the forward pass."""
    rows = len(gate_up)
    width = gate_up.shape[1] // 2
    dx = torch.empty_like(gate_up)
    out = gate_up.new_empty(rows, width) if recompute else dx
    grid = (rows, triton.cdiv(width, BLOCK))
    launch(
        _swiglu_backward, grid,
        gate_up, grad.contiguous(), dx, out, width,
        RECOMPUTE=recompute, GELU=gelu, BLOCK=BLOCK, **NO_FP_FUSION,
    )  # fmt: skip
    return dx, out


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, gelu: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.gelu = gelu
        return swiglu_forward(gate_up, gelu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        return _swiglu_gradient(gate_up, grads[0], ctx.gelu, recompute=False)[0], None


class _SwigluDown(torch.autograd.Function):
    """SwiGLU and the down projection after it.

    The backward pass recomputes the output of SwiGLU: it is wide, and cheap to compute.
    """

    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.parameter, ctx.gelu = weight, gelu
        return linear(swiglu_forward(gate_up, gelu), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate_up, weight = ctx.saved_tensors
        grad = grads[0]
        _, train_weight, train_bias, _ = ctx.needs_input_grad
        dx, activated = _swiglu_gradient(gate_up, grad @ weight, ctx.gelu, recompute=train_weight)
        dw = weight_gradients([ctx.parameter], grad, activated)[0] if train_weight else None
        db = grad.sum(0) if train_bias else None
        return dx, dw, db, None


class _SwigluDownWithAdapter(torch.autograd.Function):
    """SwiGLU, the frozen down projection after it and its adapter.

    The backward pass recomputes the output of SwiGLU, which the gradient of the adapter's first
    matrix needs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        first: Tensor,
        second: Tensor,
        scaling: float,
        gelu: bool,
    ) -> Tensor:
        activated = swiglu_forward(gate_up, gelu)
        inner = linear(activated, first)
        ctx.save_for_backward(gate_up, first, second, inner)
        ctx.weight, ctx.scaling, ctx.gelu = weight, scaling, gelu
        out = linear(activated, dense(weight), bias)
        return out.addmm_(inner, second.T, alpha=scaling)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate_up, first, second, inner = ctx.saved_tensors
        grad = grads[0]
        grad_inner = (grad @ second).mul_(ctx.scaling)
        grad_activated = (grad @ dense(ctx.weight)).addmm_(grad_inner, first)
        dx, activated = _swiglu_gradient(gate_up, grad_activated, ctx.gelu, recompute=True)
        grad_second = grad.T @ inner * ctx.scaling
        return dx, None, None, grad_inner.T @ activated, grad_second, None, None


def swiglu(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """Return activation(gate) · up of gate_up (rows, 2 · width)."""
    return _Swiglu.apply(gate_up, gelu)  # type: ignore[return-value]


def swiglu_down(gate_up: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """Return the down projection of activation(gate) · up; gate_up is (rows, 2 · width)."""
    return _SwigluDown.apply(gate_up, weight, bias, gelu)  # type: ignore[return-value]


def swiglu_down_with_adapter(
    gate_up: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    adapter: AdapterProducts,
    gelu: bool = False,
) -> Tensor:
    """Return the frozen down projection of activation(gate) · up plus its adapter's output."""
    return _SwigluDownWithAdapter.apply(gate_up, weight, bias, *adapter, gelu)  # type: ignore[return-value]
