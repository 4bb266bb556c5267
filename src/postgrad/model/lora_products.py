"""What the LoRA adapter of a layer computes, for passes that call the products themselves."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ADAPTER_NAME = "default"  # peft's name for a model's only adapter


def lora_matrices(module: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the two matrices of a layer's adapter, (rank, in) and (out, rank)."""
    return module.lora_A[ADAPTER_NAME].weight, module.lora_B[ADAPTER_NAME].weight


def base_layer(module: Any) -> Any:
    """Return the plain linear layer inside an adapted one, or the module itself."""
    return module.base_layer if hasattr(module, "base_layer") else module


def lora_output(module: Any, x: Tensor) -> Tensor | None:
    """Return what the layer's adapter adds to its output for x, rounded as in peft's forward.

    Returns None without an adapter, or if it is disabled.
    """
    if not has_active_adapter(module):
        return None
    dropped = module.lora_dropout[ADAPTER_NAME](x)
    out = module.lora_B[ADAPTER_NAME](module.lora_A[ADAPTER_NAME](dropped))
    return out * module.scaling[ADAPTER_NAME]


class AdapterProducts(NamedTuple):
    """What a layer's adapter adds: scaling · (x @ first.T) @ second.T."""

    first: Tensor
    second: Tensor
    scaling: float


def has_active_adapter(module: Any) -> bool:
    """Return whether a layer has an adapter that is switched on."""
    # A layer may have room for an adapter, but none now.
    return (
        hasattr(module, "base_layer")
        and not module.disable_adapters
        and ADAPTER_NAME in module.lora_A
    )


def adapter_products(module: Any) -> AdapterProducts | None:
    """Return the products of a layer's active adapter; None if it does anything else.

    That is dropout, or an exchange with other ranks, which hooks do.
    """
    if not has_active_adapter(module):
        return None
    layers = [module.lora_A[ADAPTER_NAME], module.lora_B[ADAPTER_NAME], base_layer(module)]
    is_hooked = any(has_hooks(layer) for layer in layers)
    if is_hooked or not isinstance(module.lora_dropout[ADAPTER_NAME], nn.Identity):
        return None
    return AdapterProducts(*lora_matrices(module), module.scaling[ADAPTER_NAME])


def joined_adapters(modules: list[Any]) -> list[AdapterProducts | None] | None:
    """Return the products of each layer's adapter, None for a layer without an active one.

    Returns None if no layer has one, or if one does anything else.
    """
    adapters = [adapter_products(module) for module in modules]
    is_active = [has_active_adapter(module) for module in modules]
    if not any(is_active) or is_active != [adapter is not None for adapter in adapters]:
        return None
    return adapters


def has_hooks(layer: nn.Module) -> bool:
    """Return whether a layer must be called as a module: its hooks exchange tensors of ranks."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def add_lora_outputs(out: Tensor, modules: list[Any], x: Tensor) -> Tensor:
    """Return `out` plus the outputs of the modules' adapters for x.

    `out` is (tokens, sum of widths): the modules' plain outputs, concatenated.
    """
    additions = [lora_output(module, x) for module in modules]
    if all(addition is None for addition in additions):
        return out
    widths = [base_layer(module).out_features for module in modules]
    parts: list[Tensor] = []
    for part, addition in zip(out.split(widths, dim=-1), additions, strict=True):
        parts.append(part if addition is None else part + addition)
    return torch.cat(parts, dim=-1)
