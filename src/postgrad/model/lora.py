"""LoRA through peft: small matrices beside the linear layers are trained, the model itself stands still.

peft's layers are put into the stock model in place, so blocks, views, engine and trainer reach it as before, and all of them compute with
base and adapter side by side. Outside it is a stock model: `merged_weights` has the base model's names, and a checkpoint holds merged
weights in `policy/` and the adapter in peft's own format in `adapter/`, from which a run goes on bit for bit.
"""

import dataclasses
import importlib.util
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from postgrad.config.schema import LoraConfig, ModelConfig
from postgrad.errors import ConfigError, did_you_mean
from postgrad.model.loaded import Loaded

ADAPTER_NAME = "default"  # peft's word for the one adapter there is
FILE_PREFIX = "base_model.model."  # how peft begins the names in its files
BASE_SUFFIX = ".base_layer.weight"  # how the names of adapted weights end in the model
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def add_adapters(model: Any, config: LoraConfig, seed: int, base: str = "") -> None:
    """Put fresh adapters into the model; only they can be trained from now on. `base` is written into the adapter's files.

    The first matrices come from the seed alone, the second are zero: wherever it is made, the model answers as it did before.

    Raises: ConfigError for targets the model does not have, or that the head reads past.
    """
    peft = import_peft()
    targets: Any = (
        config.targets
        if config.targets == "all-linear"
        else [name.strip() for name in config.targets.split(",")]
    )
    _check_targets(model, targets)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    settings.base_model_name_or_path = base or None
    peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER_NAME)
    settings.target_modules = sorted(
        settings.target_modules
    )  # peft makes a set of them, and its files would differ from run to run
    generator = torch.Generator().manual_seed(seed)
    for name, p in adapter_parameters(model).items():
        if ".lora_A." in name and p.device.type != "meta":
            bound = math.sqrt(1 / p.shape[1])  # as peft and torch draw a linear layer
            drawn = torch.rand(p.shape, generator=generator, device="cpu") * 2 * bound - bound
            with torch.no_grad():
                p.copy_(drawn)


def import_peft() -> Any:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("LoRA adapters need one more package: pip install 'postgrad[lora]'")
    import peft

    return peft


def _check_targets(model: Any, targets: Any) -> None:
    if targets == "all-linear":
        return
    ends = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    ends -= {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if module is model.get_output_embeddings()
    }
    for target in targets:
        if target not in ends:
            raise ConfigError(
                f"model.lora.targets={','.join(targets)}: {target!r} is not a linear layer inside the model's blocks; "
                f"{did_you_mean(target, sorted(ends))}"
            )


def adapted_modules(model: nn.Module) -> dict[str, Any]:
    """peft's layers in the model, by name; none where there are no adapters."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' weights, by their names in the model."""
    return {
        name: p for name, p in model.named_parameters() if ".lora_A." in name or ".lora_B." in name
    }


def stock_name(name: str) -> str:
    """A parameter's name in the stock model."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def merged_weights(model: nn.Module, buffers: bool = False) -> dict[str, Tensor]:
    """All weights under the stock model's names, adapters added in float32 and rounded once; a tied head is there once.

    `buffers` adds what a stock save would write beside the weights.
    """
    modules, own = adapted_modules(model), adapter_parameters(model)
    held = {name: p.detach() for name, p in model.named_parameters()}
    held |= model.state_dict() if buffers else {}
    out: dict[str, Tensor] = {}
    for name, p in held.items():
        if name in own:
            continue
        module = modules.get(name.removesuffix(BASE_SUFFIX)) if name.endswith(BASE_SUFFIX) else None
        out[stock_name(name)] = p if module is None else merge(p, module, *lora_matrices(module))
    return out


def lora_matrices(module: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """(rank, in) and (out, rank): the two matrices of a layer's adapter."""
    return module.lora_A[ADAPTER_NAME].weight, module.lora_B[ADAPTER_NAME].weight


def merge(weight: Tensor, module: Any, first: Tensor, second: Tensor) -> Tensor:
    """(out, in) a layer's weight with what its adapter, given as its two matrices, adds; in float32, rounded once."""
    return (weight.float() + (second.float() @ first.float()) * module.scaling[ADAPTER_NAME]).to(
        weight.dtype
    )


def base_layer(module: Any) -> Any:
    """The plain linear layer inside, or the module itself."""
    return module.base_layer if hasattr(module, "base_layer") else module


def lora_output(module: Any, x: Tensor) -> Tensor | None:
    """What the layer's adapter adds to its output for `x`, rounded as peft's own forward does; None where it has none, or it is off."""
    if not hasattr(module, "base_layer") or module.disable_adapters:
        return None
    return (
        module.lora_B[ADAPTER_NAME](
            module.lora_A[ADAPTER_NAME](module.lora_dropout[ADAPTER_NAME](x))
        )
        * module.scaling[ADAPTER_NAME]
    )


def add_lora_outputs(out: Tensor, modules: list[Any], x: Tensor) -> Tensor:
    """`out` (tokens, widths side by side), the modules' plain products of `x`, plus what their adapters add."""
    added = [lora_output(module, x) for module in modules]
    if all(one is None for one in added):
        return out
    parts = out.split([base_layer(module).out_features for module in modules], dim=-1)
    return torch.cat(
        [part if one is None else part + one for part, one in zip(parts, added, strict=True)],
        dim=-1,
    )


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the model answers as its base does: what a reference needs no second copy for."""
    modules = adapted_modules(model).values()
    trained = {p: p.requires_grad for p in adapter_parameters(model).values()}
    for module in modules:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in modules:
            module.enable_adapters(True)
        for (
            p,
            on,
        ) in (
            trained.items()
        ):  # peft makes all of them trainable again, a method may want some still
            p.requires_grad_(on)


# ---- files


def save_adapter(model: Any, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """The adapter in peft's own format: PeftModel.from_pretrained reads it. `weights` are given where the model has only parts of them."""
    folder.mkdir(parents=True, exist_ok=True)
    held = (
        {name: p.detach() for name, p in adapter_parameters(model).items()}
        if weights is None
        else weights
    )
    save_file(
        {_in_file(name): t.contiguous().cpu() for name, t in held.items()},
        folder / WEIGHTS_FILE,
        {"format": "pt"},
    )
    model.peft_config[ADAPTER_NAME].save_pretrained(str(folder))


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> None:
    """Copy a saved adapter into the model's own."""
    for name, tensor in read_adapter(model, folder).items():
        model.get_parameter(name).copy_(tensor)


def read_adapter(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """A saved adapter, by the names of its weights in the model."""
    tensors = load_file(folder / WEIGHTS_FILE)
    return {name: tensors[_in_file(name)] for name in adapter_parameters(model)}


def _in_file(name: str) -> str:
    return f"{FILE_PREFIX}{name.replace(f'.{ADAPTER_NAME}.', '.')}"


def is_adapter(path: str) -> bool:
    """Whether a folder holds an adapter and no model of its own."""
    folder = Path(path)
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def base_model_config(config: ModelConfig, folder: str) -> ModelConfig:
    """Where the model of an adapter folder is. Raises ConfigError."""
    try:
        base = json.loads((Path(folder) / CONFIG_FILE).read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"model.path={config.path}: {CONFIG_FILE} cannot be read ({error})"
        ) from error
    if not base:
        raise ConfigError(
            f"model.path={config.path} is an adapter that names no model; write base_model_name_or_path into its {CONFIG_FILE}"
        )
    return dataclasses.replace(config, path=str(base))


def merge_adapter(model: Any, folder: str) -> Any:
    """The model with the adapter of a folder merged into it: a stock model again. Raises ConfigError."""
    peft = import_peft()
    try:
        return peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"model.path={folder}: the adapter does not fit its model: {str(error).splitlines()[0][:200]}"
        ) from error


def save_merged(loaded: Loaded, folder: Path) -> None:
    """A stock Hugging Face folder with the adapters merged."""
    loaded.model.save_pretrained(folder, state_dict=merged_weights(loaded.model, buffers=True))
    loaded.tokenizer.save_pretrained(folder)
