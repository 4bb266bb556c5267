"""LoRA through peft: small matrices beside the linear layers are trained, the model is frozen.

peft's layers replace the model's linear layers in place, so blocks, views, engine and trainer use
the model as before. Outside it looks like a stock model: `merged_weights` has the base model's
names. A checkpoint holds merged weights in `policy/` and the adapter, in peft's format, in
`adapter/`; a run resumes from the latter bit for bit.
"""

import copy
import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from postgrad.config.schema import LoraConfig, ModelConfig
from postgrad.errors import (
    Damaged,
    Missing,
    NotInstalled,
    UnknownName,
    Unreadable,
    Unsupported,
    did_you_mean,
    first_line,
)
from postgrad.machine import is_installed
from postgrad.model.load.folder_checks import check_folder
from postgrad.model.load.formats import Loaded, is_image_text_model, tower_parameters
from postgrad.model.quantized import QuantizedLinear, quantized_modules

FILE_PREFIX = "base_model.model."  # prefix of all parameter names in peft's files
BASE_SUFFIX = ".base_layer.weight"  # suffix of adapted weights' names in the model
CONFIG_FILE = "adapter_config.json"
ADAPTER_NAME = "default"  # peft's name for a model's only adapter
WEIGHTS_FILE = "adapter_model.safetensors"


def add_adapters(model: Any, config: LoraConfig, seed: int, base: str = "") -> None:
    """Add new adapters to the model and freeze everything else.

    The first matrices are drawn from the seed, the second are zero, so the model's outputs do not
    change yet. `base` is the base model's name for the adapter's files.

    Raises: ConfigError for targets that the model does not have, the LM head, and experts.
    """
    peft = import_peft()
    targets: Any = config.targets
    if targets != "all-linear":
        targets = [name.strip() for name in config.targets.split(",")]
        _check_targets(model, targets)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
        exclude_modules=_frozen_tower(model) or None,
    )
    settings.base_model_name_or_path = base or None
    _leave_out_experts(settings, model)
    try:
        peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER_NAME)
    except ValueError as error:
        raise Unsupported(
            f"model.lora.rank={config.rank}: peft cannot add adapters to "
            f"{type(model).__name__} ({first_line(error)}); choose layers with model.lora.targets, "
            "or train all weights with model.lora.rank=0"
        ) from error
    # peft turns the list into a set, whose order would differ from run to run in its files.
    settings.target_modules = sorted(settings.target_modules)
    for module in adapted_modules(model).values():
        _use_dtype_of_layer(module)
    generator = torch.Generator().manual_seed(seed)
    for name, p in adapter_parameters(model).items():
        if ".lora_A." in name and p.device.type != "meta":
            _draw_uniform(p, generator)


def _frozen_tower(model: Any) -> list[str]:
    """Return the names of the linear layers that read pictures, unless they are trained."""
    if not hasattr(model, "config") or not is_image_text_model(model):
        return []
    if any(p.requires_grad for p in tower_parameters(model).values()):
        return []
    inside = {id(module) for module in model.get_decoder().modules()}
    inside.add(id(model.get_output_embeddings()))
    linears = (nn.Linear, QuantizedLinear)
    modules = model.named_modules()
    return [name for name, one in modules if isinstance(one, linears) and id(one) not in inside]


def _use_dtype_of_layer(module: Any) -> None:
    """Give the adapter its layer's dtype. peft does so too, except on the meta device."""
    layer = base_layer(module)
    dtype = layer.quantized.dtype if isinstance(layer, QuantizedLinear) else layer.weight.dtype
    for matrices in (module.lora_A, module.lora_B):
        matrices.to(dtype)


@torch.no_grad()
def _draw_uniform(p: Tensor, generator: torch.Generator) -> None:
    """Initialize a matrix as peft and torch initialize a linear layer."""
    bound = math.sqrt(1 / p.shape[1])
    p.copy_(torch.rand(p.shape, generator=generator, device="cpu") * 2 * bound - bound)


def import_peft() -> Any:
    """Return the module peft. Raises ConfigError if it is not installed."""
    if not is_installed("peft"):
        raise NotInstalled(
            "model.lora.rank and adapter folders need one more package: "
            "pip install 'postgrad[lora]'"
        )
    import peft

    return peft


def _check_targets(model: Any, targets: list[str]) -> None:
    head = model.get_output_embeddings()
    layer_names: set[str] = set()
    head_names: set[str] = set()
    for name, module in model.named_modules():
        last_part = name.rsplit(".", 1)[-1]
        if module is head:
            head_names.add(last_part)
        elif isinstance(module, nn.Linear | Conv1D):
            layer_names.add(last_part)
    layer_names -= head_names
    for target in targets:
        if target not in layer_names:
            raise UnknownName(
                f"model.lora.targets={','.join(targets)}: {target!r} is not a linear layer of the "
                f"model's blocks; {did_you_mean(target, sorted(layer_names))}"
            )


def _leave_out_experts(settings: Any, model: Any) -> None:
    """Leave out layers that peft would replace by adapters of the experts' stacked matrices.

    peft does so for some types of models, by names such as gate_proj. merged_weights() and the
    engines know adapters of linear layers only.

    Raises: ConfigError if the targets name such layers.
    """
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # an older peft, which adapts linear layers only
        return
    converted = copy.deepcopy(settings)
    conversion.convert_peft_config_for_transformers(converted, model, conversions=None)
    if not converted.target_parameters:
        return
    names = ",".join(sorted(converted.target_modules))
    if settings.target_modules != "all-linear":
        raise Unsupported(
            f"model.lora.targets={','.join(sorted(settings.target_modules))}: peft would adapt the "
            f"experts of {model.config.model_type}, which is not supported; use "
            f"model.lora.targets={names or 'all-linear'}"
        )
    settings.target_modules = sorted(converted.target_modules)


# ---- the model's layers


def adapted_modules(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers in the model, by name; empty without adapters."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapters' weights, by their names in the model."""
    return {
        name: p for name, p in model.named_parameters() if ".lora_A." in name or ".lora_B." in name
    }


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Let the model compute as its base model, so a reference needs no second copy."""
    modules = adapted_modules(model).values()
    requires_grad = {p: p.requires_grad for p in adapter_parameters(model).values()}
    for module in modules:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in modules:
            module.enable_adapters(True)
        # peft makes all adapters trainable again, but a method may have frozen some.
        for p, before in requires_grad.items():
            p.requires_grad_(before)


# ---- merged weights


def stock_name(name: str) -> str:
    """Return a parameter's name in the stock model."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights under the stock model's names, with the adapters merged.

    4-bit weights are dequantized. Adapters are added in float32 and rounded once. A tied head is
    listed once.
    """
    modules = adapted_modules(model)
    adapter_names = adapter_parameters(model).keys()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    quantized = {f"{name}.weight": module for name, module in quantized_modules(model).items()}
    merged: dict[str, Tensor] = {}
    for name in [*weights, *quantized]:
        weight = quantized[name].weight if name in quantized else weights[name]
        if name in adapter_names:
            continue
        module = modules.get(name.removesuffix(BASE_SUFFIX)) if name.endswith(BASE_SUFFIX) else None
        if module is not None:
            weight = merge(weight, module, *lora_matrices(module))
        merged[stock_name(name)] = weight
    return merged


def merge(weight: Tensor, module: Any, first: Tensor, second: Tensor) -> Tensor:
    """Return a layer's (out, in) weight with its adapter added in float32 and rounded once.

    `first` is (rank, in) and `second` (out, rank). The weight of a Conv1D (GPT-2) is (in, out).
    """
    delta = (second.float() @ first.float()) * module.scaling[ADAPTER_NAME]
    if module.fan_in_fan_out:
        delta = delta.T
    return (weight.float() + delta).to(weight.dtype)


# ---- files


def save_adapter(loaded: Loaded, weights: dict[str, Tensor], folder: Path) -> None:
    """Write an adapter in peft's format, which PeftModel.from_pretrained reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_file_name(name): t.contiguous().cpu() for name, t in weights.items()}
    save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
    loaded.model.peft_config[ADAPTER_NAME].save_pretrained(str(folder))


def read_adapter(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Return a saved adapter's weights, by their names in the model."""
    tensors = load_file(folder / WEIGHTS_FILE)
    return {name: tensors[_file_name(name)] for name in adapter_parameters(model)}


def _file_name(name: str) -> str:
    """Return a parameter's name in peft's files."""
    return f"{FILE_PREFIX}{name.replace(f'.{ADAPTER_NAME}.', '.')}"


def is_adapter(path: str) -> bool:
    """Return whether a folder holds an adapter and no full model."""
    folder = Path(path)
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def base_model_config(config: ModelConfig, folder: str) -> ModelConfig:
    """Return the configuration with the path of an adapter folder's base model.

    Raises: ConfigError if the folder does not name one.
    """
    try:
        base = json.loads((Path(folder) / CONFIG_FILE).read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise Unreadable(
            f"model.path={config.path}: {CONFIG_FILE} cannot be read ({error})"
        ) from error
    if not base:
        raise Missing(
            f"model.path={config.path} is an adapter without a base model; write "
            f"base_model_name_or_path into its {CONFIG_FILE}"
        )
    return dataclasses.replace(config, path=str(base))


def merge_adapter(model: Any, folder: str) -> Any:
    """Return the model with the folder's adapter merged into it: a stock model again.

    Raises: ConfigError if the adapter does not fit.
    """
    peft = import_peft()
    if Path(folder).is_dir():
        check_folder(Path(folder), with_weights=True)
    names = _adapter_names(model)
    try:
        adapted = peft.PeftModel.from_pretrained(model, folder, key_mapping=names)
        loaded = adapted.load_adapter(folder, ADAPTER_NAME, key_mapping=names)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        reason = first_line(error)
        raise Damaged(
            f"model.path={folder}: the adapter does not fit its base model: {reason}"
        ) from error
    if not hasattr(adapted.base_model, "merge_and_unload"):
        kind = adapted.peft_config["default"].peft_type
        raise Unsupported(
            f"model.path={folder}: an adapter of the kind {kind.value!s} cannot be merged into "
            "its base model; give a model folder, or a LoRA adapter"
        )
    missing = [name for name in loaded.missing_keys if ".lora_" in name]
    if missing:  # peft warns and leaves these layers as they are
        raise Damaged(
            f"model.path={folder}: the adapter does not fit its base model: it lacks {missing[0]}"
        )
    return adapted.merge_and_unload().requires_grad_(True)  # peft froze the base model


def _adapter_names(model: Any) -> dict[str, str]:
    """Return how to rename an adapter's weights for the model: patterns and replacements.

    An adapter may be of the language model alone, which is a part of a model of text and images.
    """
    names: dict[str, str] = dict(getattr(model, "_checkpoint_conversion_mapping", None) or {})
    if any(name.startswith("model.language_model.layers.") for name, _ in model.named_modules()):
        names[r"^model\.layers\."] = "model.language_model.layers."
    return names


# ---- what an adapter computes, for passes that call the products themselves


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
    out = module.lora_B[ADAPTER_NAME](module.lora_A[ADAPTER_NAME](x))
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

    That is an exchange with other ranks, which hooks do.
    """
    if not has_active_adapter(module):
        return None
    layers = [module.lora_A[ADAPTER_NAME], module.lora_B[ADAPTER_NAME], base_layer(module)]
    if any(has_hooks(layer) for layer in layers):
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
