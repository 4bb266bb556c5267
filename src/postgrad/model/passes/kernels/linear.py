"""Several linear layers of one input, computed as one matrix product."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from postgrad.model.gradient_sums import weight_gradients
from postgrad.model.lora import base_layer
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


def decode_linear(x: Tensor, fused: FusedParams) -> Tensor:
    """Return the layers' outputs for x (rows, width), concatenated, without a gradient."""
    weight, bias = fused
    return linear(x, dense(weight), bias)


def fused_linear(x: Tensor, fused: FusedParams, modules: list[Any]) -> Tensor:
    """Return the modules' outputs for x (tokens, width), concatenated, without their adapters."""
    weight, bias = fused
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias)
    layers = [base_layer(module) for module in modules]
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return _FusedLinear.apply(x, weight, bias, *weights, *biases)  # type: ignore[return-value]
