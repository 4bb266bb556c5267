"""RMSNorm, rotary positions and the gated activation, one kernel each way, for packed training passes and decode steps alike.

The decode step calls the same row functions (`normed_row`, `gated_values`), so the two paths compute the same bits. `install` puts them
into a stock model's own modules; names, weights and checkpoints stay as they are.
"""

# Triton launches its kernels with arguments that a type checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from types import MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import SiLUActivation

from postgrad.model.lora import base_layer, with_additions
from postgrad.model.passes.kernels.attention import EXACT, packed_attention
from postgrad.model.passes.packing import Packing

ATTENTIONS = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention")
GATED = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP")
PARTS = 1024  # programs that share the rows of a norm's backward pass, each with a sum of its own for the weight


@triton.jit
def normed_row(h, weight, width, eps):
    """RMSNorm of one row with the rounding of the stock modules: normalized in float32, rounded, then weighted."""
    wide = h.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    return (wide * scale).to(h.dtype).to(tl.float32) * weight.to(tl.float32), scale


@triton.jit
def gated_values(gate, up):
    """silu(gate) · up with the rounding of the stock modules."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@triton.jit
def rotated(low, high, cos_low, cos_high, sin_low, sin_high):
    """The two halves of a head turned to their position, with the rounding of the stock modules."""
    kind = low.dtype
    a, b = low.to(tl.float32), high.to(tl.float32)
    new_low = (a * cos_low).to(kind).to(tl.float32) + (-b * sin_low).to(kind).to(tl.float32)
    new_high = (b * cos_high).to(kind).to(tl.float32) + (a * sin_high).to(kind).to(tl.float32)
    return new_low.to(kind), new_high.to(kind)


@triton.jit
def _rotate_heads(
    source, target, token, stride, heads, half, inside, cos_low, cos_high, sin_low, sin_high,
    COUNT: tl.constexpr, D: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    real = (heads < COUNT)[:, None] & inside[None, :]
    within = heads[:, None] * D + half[None, :]
    low = tl.load(source + token * stride + within, mask=real, other=0.0)
    high = tl.load(source + token * stride + within + D // 2, mask=real, other=0.0)
    if BACK:
        a, b = low.to(tl.float32), high.to(tl.float32)
        new_low, new_high = (
            (a * cos_low + b * sin_high).to(low.dtype),
            (b * cos_high - a * sin_low).to(low.dtype),
        )
    else:
        new_low, new_high = rotated(low, high, cos_low, cos_high, sin_low, sin_high)
    tl.store(target + token * COUNT * D + within, new_low, mask=real)
    tl.store(target + token * COUNT * D + within + D // 2, new_high, mask=real)


@triton.jit
def _rotate(
    q_base, k_base, q_out, k_out, cos_base, sin_base, q_stride, k_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """One program turns all query and key heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    half, heads = tl.arange(0, HALF), tl.arange(0, WIDE)
    inside = half < D // 2
    cos_low = tl.load(cos_base + token * D + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_base + token * D + D // 2 + half, mask=inside, other=0.0).to(tl.float32)[
        None, :
    ]
    sin_low = tl.load(sin_base + token * D + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_base + token * D + D // 2 + half, mask=inside, other=0.0).to(tl.float32)[
        None, :
    ]
    _rotate_heads(
        q_base,
        q_out,
        token,
        q_stride,
        heads,
        half,
        inside,
        cos_low,
        cos_high,
        sin_low,
        sin_high,
        HEADS,
        D,
        BACK,
    )
    _rotate_heads(
        k_base,
        k_out,
        token,
        k_stride,
        heads,
        half,
        inside,
        cos_low,
        cos_high,
        sin_low,
        sin_high,
        KEY_HEADS,
        D,
        BACK,
    )


@triton.jit
def _norm_forward(x_base, weight_base, out_base, scales, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    h = tl.load(x_base + row * width + cols, mask=inside, other=0.0)
    weight = tl.load(weight_base + cols, mask=inside, other=0.0)
    out, scale = normed_row(h, weight, width, eps)
    tl.store(out_base + row * width + cols, out.to(out_base.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _norm_backward(
    x_base, weight_base, grad_base, scales, dx_base, dw_base, rows, width, BLOCK: tl.constexpr
):
    part = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    weight = tl.load(weight_base + cols, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    wide_zero = tl.zeros([], tl.int64)
    for row in range(part, rows, tl.num_programs(0)):
        at = (wide_zero + row) * width + cols
        x = tl.load(x_base + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_base + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        unit = x * scale
        dw += grad * unit
        slope = grad * weight
        dx = scale * (slope - unit * (tl.sum(slope * unit, 0) / width))
        tl.store(dx_base + at, dx.to(dx_base.dtype.element_ty), mask=inside)
    tl.store(dw_base + part.to(tl.int64) * width + cols, dw, mask=inside)


@triton.jit
def gate_rows(x_base, out_base, width, BLOCK: tl.constexpr):
    """silu(gate) · up of rows that hold gate and up side by side."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    gate = tl.load(x_base + row * 2 * width + cols, mask=inside, other=0.0)
    up = tl.load(x_base + row * 2 * width + width + cols, mask=inside, other=0.0)
    tl.store(
        out_base + row * width + cols,
        gated_values(gate, up).to(out_base.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _gate_rows_backward(
    x_base, grad_base, dx_base, out_base, width, AGAIN: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradient of gate and up; AGAIN gives what gate_rows gave as well."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    at = row * 2 * width + cols
    gate = tl.load(x_base + at, mask=inside, other=0.0)
    up = tl.load(x_base + at + width, mask=inside, other=0.0)
    if AGAIN:
        tl.store(
            out_base + row * width + cols,
            gated_values(gate, up).to(out_base.dtype.element_ty),
            mask=inside,
        )
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    grad = tl.load(grad_base + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * s
    kind = dx_base.dtype.element_ty
    tl.store(dx_base + at, (grad * up * (s + silu * (1.0 - s))).to(kind), mask=inside)
    tl.store(dx_base + at + width, (grad * silu).to(kind), mask=inside)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out, scales = (
            torch.empty_like(flat),
            torch.empty(len(flat), dtype=torch.float32, device=x.device),
        )
        width = flat.shape[1]
        _norm_forward[(len(flat),)](
            flat,
            weight,
            out,
            scales,
            width,
            eps,
            BLOCK=triton.next_power_of_2(width),
            num_warps=4,
            **EXACT,
        )
        ctx.save_for_backward(flat, weight, scales)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        flat, weight, scales = ctx.saved_tensors
        rows, width = flat.shape
        grad, dx = grads[0].reshape(rows, width).contiguous(), torch.empty_like(flat)
        parts = min(PARTS, rows)
        dw = torch.empty(parts, width, dtype=torch.float32, device=flat.device)
        block = triton.next_power_of_2(width)
        _norm_backward[(parts,)](
            flat, weight, grad, scales, dx, dw, rows, width, BLOCK=block, num_warps=4
        )
        return dx.view(grads[0].shape), dw.sum(0).to(weight.dtype), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return gate(both)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # type: ignore[override]
        (both,) = ctx.saved_tensors
        return _gate_slope(both, grads[0], again=False)[0]


def _gate_slope(both: Tensor, grad: Tensor, again: bool) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up, and what the gate gave, where that is wanted again."""
    rows, width, dx = len(both), both.shape[1] // 2, torch.empty_like(both)
    out = both.new_empty(rows, width) if again else dx
    _gate_rows_backward[(rows, triton.cdiv(width, 1024))](
        both, grad.contiguous(), dx, out, width, AGAIN=again, BLOCK=1024, **EXACT
    )
    return dx, out


class _GatedDown(torch.autograd.Function):
    """The gate and the linear layer after it. What the gate gives is computed again for the gradient: it is wide, and quick to make."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(both, weight)
        return linear(gate(both), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        both, weight = ctx.saved_tensors
        grad, (_, learns, bias_learns) = grads[0], ctx.needs_input_grad
        dx, gated = _gate_slope(both, grad @ weight, again=learns)
        return dx, grad.T @ gated if learns else None, grad.sum(0) if bias_learns else None


class _Joined(torch.autograd.Function):
    """Several linear layers of one input as one product; the gradient goes to each layer's own parameters."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, whole: Tensor, bias: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, whole)
        ctx.lengths = [len(p) for p in parameters if p.dim() == 2]
        ctx.has_bias = bias is not None
        return linear(x, whole, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, whole = ctx.saved_tensors
        grad = grads[0]
        dx = grad @ whole if ctx.needs_input_grad[0] else None
        learns = any(ctx.needs_input_grad[3:])
        dw = (grad.T @ x).split(ctx.lengths) if learns else [None] * len(ctx.lengths)
        db = (
            grad.sum(0).split(ctx.lengths)
            if learns and ctx.has_bias
            else [None] * len(ctx.lengths) * ctx.has_bias
        )
        return dx, None, None, *dw, *db


def join(modules: list[Any]) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) for several linear layers of one input; their parameters become views of it, so there is one copy."""

    def together(name: str) -> Tensor | None:
        parts = [getattr(module, name) for module in modules]
        if parts[0] is None:
            return None
        whole = torch.cat([p.detach() for p in parts])
        for p, view in zip(parts, whole.split([len(p) for p in parts]), strict=True):
            p.data = view
        return whole

    weight = together("weight")
    assert weight is not None
    return weight, together("bias")


def joined(x: Tensor, whole: tuple[Tensor, Tensor | None], modules: list[Any]) -> Tensor:
    """x (tokens, width) through all of the modules, side by side, without what adapters add."""
    modules = [base_layer(m) for m in modules]
    parameters = [m.weight for m in modules] + [m.bias for m in modules if m.bias is not None]
    return _Joined.apply(x, *whole, *parameters)  # type: ignore[return-value]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turn(q, k, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (
            *_turn(grads[0].contiguous(), grads[1].contiguous(), *ctx.saved_tensors, back=True),
            None,
            None,
        )


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    (tokens, heads, width), key_heads = q.shape, k.shape[1]
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    sizes = {
        "HEADS": heads,
        "KEY_HEADS": key_heads,
        "WIDE": triton.next_power_of_2(heads),
        "D": width,
    }
    _rotate[(tokens,)](
        q,
        k,
        q_out,
        k_out,
        cos,
        sin,
        q.stride(0),
        k.stride(0),
        **sizes,
        HALF=triton.next_power_of_2(width // 2),
        BACK=back,
        num_warps=2,
        **EXACT,
    )
    return q_out, k_out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q (tokens, heads, width) and k (tokens, key_heads, width) turned by cos and sin (tokens, width). The heads of a token lie close."""
    return _Rotary.apply(q, k, cos.contiguous(), sin.contiguous())  # type: ignore[return-value]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[return-value]


def gate(both: Tensor) -> Tensor:
    """silu(gate) · up of (rows, 2 · width), without a gradient."""
    rows, width = len(both), both.shape[1] // 2
    out = both.new_empty(rows, width)
    gate_rows[(rows, triton.cdiv(width, 1024))](both, out, width, BLOCK=1024, **EXACT)
    return out


def gated(both: Tensor) -> Tensor:
    """silu(gate) · up of (rows, 2 · width)."""
    return _Gated.apply(both)  # type: ignore[return-value]


def install(model: nn.Module) -> None:
    """Let the norms and gated layers of a stock model compute with these kernels; modules of another make stay as they are."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = MethodType(_norm_module, module)
        elif type(module).__name__ in GATED and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
            module.joined = join([module.gate_proj, module.up_proj])
            module.forward = MethodType(_gated_module, module)
        elif type(module).__name__ in ATTENTIONS:
            module.joined = join([module.q_proj, module.k_proj, module.v_proj])
            module.forward = MethodType(_attention_module, module)


def _norm_module(module: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _attention_module(
    module: Any, hidden_states: Tensor, *args: Any, packing: Packing | None = None, **kwargs: Any
) -> Any:
    """Packed passes take fewer, larger kernels; everything else is the stock module's."""
    if packing is None:
        return type(module).forward(module, hidden_states, *args, **kwargs)
    cos, sin = kwargs["position_embeddings"]
    tokens, width = hidden_states.shape[1], module.head_dim
    projections = [module.q_proj, module.k_proj, module.v_proj]
    together = with_additions(
        joined(hidden_states[0], module.joined, projections), projections, hidden_states[0]
    )
    q, k, v = (
        x.unflatten(1, (-1, width))
        for x in together.split([p.out_features for p in projections], dim=1)
    )
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    q, k = rotary(q, k, cos[0], sin[0])
    v = v.contiguous()  # else the gradient would keep all three projections for its sake
    if (cache := kwargs.get("past_key_values")) is not None:
        cache.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], module.layer_idx)
    out = packed_attention(q, k, v, packing, module.scaling)
    return module.o_proj(out.view(1, tokens, -1)), None


def _gated_module(module: Any, x: Tensor) -> Tensor:
    flat, projections = x.reshape(-1, x.shape[-1]), [module.gate_proj, module.up_proj]
    both = with_additions(joined(flat, module.joined, projections), projections, flat)
    if type(module.down_proj) is not nn.Linear:  # an adapter's layer has more to add
        return module.down_proj(gated(both)).view(x.shape)
    return _GatedDown.apply(both, module.down_proj.weight, module.down_proj.bias).view(x.shape)  # type: ignore[union-attr]
