"""LoRA adapters that share one base model: at most one is mounted at a time.

peft's layers stay in the model. Mounting an adapter puts its matrices into them; nothing is copied
and the base weights are never changed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from postgrad.config.schema import LoraConfig
from postgrad.errors import ConfigError
from postgrad.model.lora import (
    ADAPTER_NAME,
    CONFIG_FILE,
    FILE_PREFIX,
    WEIGHTS_FILE,
    adapted_modules,
    add_adapters,
)

ALPHA = 32.0  # Tinker's; LoRA scale is alpha / rank


@dataclass(frozen=True)
class LoraShape:
    """The rank of an adapter and the layers that it is on."""

    rank: int
    attention: bool = True
    mlp: bool = True

    def has(self, layer: str) -> bool:
        """Return whether a linear layer of a block, by its name in the model, gets an adapter."""
        return self.attention if "attn" in layer or "attention" in layer else self.mlp


class Adapter(nn.Module):
    """The matrices of one adapter, (rank, in) and (out, rank) per layer.

    New ones are drawn from the seed as peft draws them; the second matrices are zero.
    """

    def __init__(self, layers: dict[str, Any], shape: LoraShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.names = [name for name in layers if shape.has(name)]
        if not self.names:
            raise ConfigError("the adapter has no layers; set train_attn or train_mlp")
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.ModuleList()
        self.second = nn.ModuleList()
        for name in self.names:
            base = layers[name].base_layer
            first = nn.Linear(base.in_features, shape.rank, bias=False)
            second = nn.Linear(shape.rank, base.out_features, bias=False)
            bound = base.in_features**-0.5
            with torch.no_grad():
                first.weight.uniform_(-bound, bound, generator=generator)
                second.weight.zero_()
            place = {"device": base.weight.device, "dtype": base.weight.dtype}
            self.first.append(first.to(**place))
            self.second.append(second.to(**place))

    def tensors(self) -> dict[str, Tensor]:
        """Return the matrices by their names in peft's files."""
        named: dict[str, Tensor] = {}
        for name, first, second in zip(self.names, self.first, self.second, strict=True):
            named[f"{FILE_PREFIX}{name}.lora_A.weight"] = first.weight  # type: ignore[assignment]
            named[f"{FILE_PREFIX}{name}.lora_B.weight"] = second.weight  # type: ignore[assignment]
        return named

    @torch.no_grad()
    def copy_from(self, tensors: dict[str, Tensor]) -> None:
        """Copy the matrices of an adapter of the same shape."""
        for name, matrix in self.tensors().items():
            matrix.copy_(tensors[name])

    def snapshot(self) -> dict[str, Tensor]:
        """Return a copy of the matrices in host memory."""
        return {
            name: matrix.detach().to("cpu", copy=True) for name, matrix in self.tensors().items()
        }


class AdapterSlots:
    """The layers of a model that adapters are mounted in."""

    def __init__(self, model: Any, base_name: str) -> None:
        """Raises ConfigError if peft is not installed."""
        add_adapters(model, LoraConfig(rank=1), seed=0, base=base_name)
        self.base_name = base_name
        self.layers = adapted_modules(model)
        self.mounted: Adapter | None = None
        for layer in self.layers.values():
            _clear(layer)
        model.requires_grad_(False)

    def make_adapter(self, shape: LoraShape, seed: int = 0) -> Adapter:
        """Return a new adapter, which changes nothing yet. Raises ConfigError."""
        return Adapter(self.layers, shape, seed)

    def num_parameters(self, shape: LoraShape) -> int:
        """Return the number of parameters of an adapter."""
        bases = [layer.base_layer for name, layer in self.layers.items() if shape.has(name)]
        return sum(shape.rank * (base.in_features + base.out_features) for base in bases)

    def mount(self, adapter: Adapter | None) -> None:
        """Let the model compute with this adapter; None: as the base model."""
        if adapter is self.mounted:
            return
        for layer in self.layers.values():
            _clear(layer)
        self.mounted = adapter
        if adapter is None:
            return
        for name, first, second in zip(adapter.names, adapter.first, adapter.second, strict=True):
            layer = self.layers[name]
            layer.lora_A[ADAPTER_NAME] = first
            layer.lora_B[ADAPTER_NAME] = second
            layer.scaling[ADAPTER_NAME] = ALPHA / adapter.shape.rank

    def save(self, adapter: Adapter, folder: Path) -> None:
        """Write the adapter in peft's format, which PeftModel.from_pretrained reads."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(adapter.snapshot(), folder / WEIGHTS_FILE, {"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_name,
            "r": adapter.shape.rank,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": adapter.names,
        }
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1))


def _clear(layer: Any) -> None:
    for matrices in (layer.lora_A, layer.lora_B):
        if ADAPTER_NAME in matrices:
            del matrices[ADAPTER_NAME]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the matrices of a saved adapter by their names in peft's files."""
    return load_file(folder / WEIGHTS_FILE)
