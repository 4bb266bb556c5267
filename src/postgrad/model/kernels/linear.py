"""Several linear layers of one input, computed as one matrix product, and their LoRA adapters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from postgrad.model.lora import (
    AdapterProducts,
    add_lora_outputs,
    base_layer,
    joined_adapters,
)
from postgrad.model.optimizers.gradient_sums import weight_gradients
from postgrad.model.quantized import (
    QuantizedLinear,
    QuantizedWeight,
    concatenate,
    dense,
    quantized_linear,
    split_rows,
)

# Weight and bias of several layers, concatenated.
FusedParams = tuple[Tensor | QuantizedWeight, Tensor | None]


class _FusedLinear(torch.autograd.Function):
    """One product for several linear layers; the gradient goes to each layer's own parameters."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weights = [p for p in parameters if p.dim() == 2]
        ctx.has_bias = bias is not None
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = grads[0]
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        is_trained = any(ctx.needs_input_grad[3:])
        no_grads = [None] * len(ctx.weights)
        dw = weight_gradients(ctx.weights, grad, x) if is_trained else no_grads
        if not ctx.has_bias:
            db = []
        elif is_trained:
            db = grad.sum(0).split([len(weight) for weight in ctx.weights])
        else:
            db = no_grads
        return dx, None, None, *dw, *db


class _LinearWithAdapters(torch.autograd.Function):
    """One product for several frozen linear layers, to which their adapters add theirs.

    `matrices` are the two of each adapter, None for a layer without one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        widths: list[int],
        scalings: list[float],
        *matrices: Tensor | None,
    ) -> Tensor:
        out = linear(x, dense(weight), bias)
        adapters = _adapters(matrices, scalings)
        inner = add_adapters(out, x, adapters, widths)
        ctx.save_for_backward(x, inner, *matrices)
        ctx.weight, ctx.widths, ctx.scalings = weight, widths, scalings
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, inner, *matrices = ctx.saved_tensors
        grad_out = grads[0]
        adapters = _adapters(matrices, ctx.scalings)
        active = [adapter for adapter in adapters if adapter is not None]
        ranks = [len(adapter.first) for adapter in active]
        grad_inner = torch.empty_like(inner)
        values = zip(inner.split(ranks, 1), grad_inner.split(ranks, 1), strict=True)
        grad_seconds: list[Tensor | None] = []
        for adapter, grad in zip(adapters, grad_out.split(ctx.widths, 1), strict=True):
            if adapter is None:
                grad_seconds.append(None)
                continue
            value, grad_value = next(values)
            torch.mm(grad, adapter.second, out=grad_value).mul_(adapter.scaling)
            grad_seconds.append(grad.T @ value * adapter.scaling)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (grad_out @ dense(ctx.weight)).addmm_(grad_inner, _joined_firsts(active))
        grad_firsts = iter((grad_inner.T @ x).split(ranks))
        by_matrix: list[Tensor | None] = []
        for grad_second in grad_seconds:
            by_matrix += [None if grad_second is None else next(grad_firsts), grad_second]
        return dx, None, None, None, None, *by_matrix


def _adapters(
    matrices: Sequence[Tensor | None], scalings: list[float]
) -> list[AdapterProducts | None]:
    adapters: list[AdapterProducts | None] = []
    for first, second, scaling in zip(matrices[::2], matrices[1::2], scalings, strict=True):
        if first is None or second is None:
            adapters.append(None)
        else:
            adapters.append(AdapterProducts(first, second, scaling))
    return adapters


def add_adapters(
    out: Tensor, x: Tensor, adapters: Sequence[AdapterProducts | None], widths: list[int]
) -> Tensor:
    """Add the adapters' outputs for x (tokens, width) to the layers' outputs, in place.

    Returns the values between the two matrices of all adapters, (tokens, sum of ranks).
    """
    active = [adapter for adapter in adapters if adapter is not None]
    inner = linear(x, _joined_firsts(active))
    values = iter(inner.split([len(adapter.first) for adapter in active], 1))
    for part, adapter in zip(out.split(widths, 1), adapters, strict=True):
        if adapter is not None:
            part.addmm_(next(values), adapter.second.T, alpha=adapter.scaling)
    return inner


def _joined_firsts(adapters: Sequence[AdapterProducts]) -> Tensor:
    """Return the first matrices of the adapters as one, (sum of ranks, width)."""
    firsts = [adapter.first for adapter in adapters]
    return firsts[0] if len(firsts) == 1 else torch.cat(firsts)


def fuse_linears(modules: list[Any]) -> FusedParams:
    """Concatenate the weights (and biases) of linear layers that read the same input.

    The layers' parameters become views of the result, so the weights exist once in memory.
    """
    if isinstance(modules[0], QuantizedLinear):
        weight = _concatenate_quantized(modules)
    else:
        weight = _concatenate([module.weight for module in modules])
    if modules[0].bias is None:
        return weight, None
    return weight, _concatenate([module.bias for module in modules])


def _concatenate(parameters: list[Tensor]) -> Tensor:
    fused = torch.cat([p.detach() for p in parameters])
    views = fused.split([len(p) for p in parameters])
    for p, view in zip(parameters, views, strict=True):
        p.data = view
    return fused


def _concatenate_quantized(modules: list[QuantizedLinear]) -> QuantizedWeight:
    fused = concatenate([module.quantized for module in modules])
    parts = split_rows(fused, [module.out_features for module in modules])
    for module, part in zip(modules, parts, strict=True):
        module.quantized = part
    return fused


def decode_linear(x: Tensor, fused: FusedParams, modules: list[Any]) -> Tensor:
    """Return the modules' outputs for x (rows, width), concatenated, without a gradient."""
    weight, bias = fused
    out = linear(x, dense(weight), bias)
    adapters = joined_adapters(modules)
    if adapters is None:
        return add_lora_outputs(out, modules, x)
    add_adapters(out, x, adapters, _widths(modules))
    return out


def fused_linear(x: Tensor, fused: FusedParams, modules: list[Any]) -> Tensor:
    """Return the modules' outputs for x (tokens, width), concatenated."""
    weight, bias = fused
    adapters = joined_adapters(modules)
    is_frozen = not any(p.requires_grad for m in modules for p in base_layer(m).parameters())
    if adapters is not None and is_frozen:
        matrices = [(None, None) if a is None else a[:2] for a in adapters]
        scalings = [0.0 if adapter is None else adapter.scaling for adapter in adapters]
        flat = [matrix for pair in matrices for matrix in pair]
        return _LinearWithAdapters.apply(x, weight, bias, _widths(modules), scalings, *flat)  # type: ignore[return-value]
    return add_lora_outputs(_plain_outputs(x, fused, modules), modules, x)


def _plain_outputs(x: Tensor, fused: FusedParams, modules: list[Any]) -> Tensor:
    """Return the modules' outputs without their adapters."""
    weight, bias = fused
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias)
    layers = [base_layer(module) for module in modules]
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return _FusedLinear.apply(x, weight, bias, *weights, *biases)  # type: ignore[return-value]


def _widths(modules: list[Any]) -> list[int]:
    return [base_layer(module).out_features for module in modules]
