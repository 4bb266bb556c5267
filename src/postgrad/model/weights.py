"""Weights by name that stay on disk until they are read, and a stock Hugging Face folder written from them file by file.

Nothing here holds more than one file's weights at a time, so a model larger than the memory can be converted.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from postgrad.errors import ConfigError

KINDS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BESIDE = (
    ".json",
    ".txt",
    ".jinja",
    ".model",
    ".py",
)  # what a model folder has beside its weights: settings, tokenizer, own code
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class LazyTensor:
    """One weight: its shape and type are known, `read` gets it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def nbytes(self, dtype: torch.dtype | None) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size * (dtype or self.dtype).itemsize


def read_lazy_weights(folder: Path) -> dict[str, LazyTensor]:
    """The weights of a stock folder. Raises ConfigError."""
    out: dict[str, LazyTensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    part = opened.get_slice(name)
                    kind = KINDS.get(part.get_dtype())
                    if kind is None:
                        raise ConfigError(
                            f"{file}: {name} is {part.get_dtype()}; only floating-point weights can be exported"
                        )
                    out[name] = LazyTensor(tuple(part.get_shape()), kind, _reader(file, name))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
    if not out:
        raise ConfigError(f"{folder} has no model*.safetensors")
    return out


def _reader(file: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with safe_open(file, "pt") as opened:
            return opened.get_tensor(name)

    return read


def plan_shards(
    weights: Mapping[str, LazyTensor], dtype: torch.dtype | None, most: int
) -> list[list[str]]:
    """Names by file, in order: a file is full when one more weight would exceed `most` bytes."""
    files: list[list[str]] = [[]]
    size = 0
    for name, weight in weights.items():
        own = weight.nbytes(dtype)
        if files[-1] and size + own > most:
            files.append([])
            size = 0
        files[-1].append(name)
        size += own
    return files


def write_weights(
    weights: Mapping[str, LazyTensor],
    out: Path,
    dtype: torch.dtype | None,
    most: int,
    progress: Callable[[str], None],
) -> None:
    """Write the weights as safetensors, with an index when there are several files. `dtype` None keeps each weight's type."""
    files = plan_shards(weights, dtype, most)
    where: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = (
            "model.safetensors"
            if len(files) == 1
            else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        )
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensor = weights[name].read()
            tensors[name] = tensor.to(dtype or tensor.dtype).clone(
                memory_format=torch.contiguous_format
            )
            where[name] = file
        save_file(tensors, out / file, metadata={"format": "pt"})
        progress(
            f"{file}: {len(names)} weights, {sum(t.nbytes for t in tensors.values()) / 2**30:.2f} GiB"
        )
    if len(files) > 1:
        total = sum(weight.nbytes(dtype) for weight in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def copy_model_files(source: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Configuration, tokenizer and the rest of a model folder; a chosen type is written into config.json."""
    for file in sorted(source.iterdir()):
        if (
            file.is_file()
            and file.suffix in BESIDE
            and file.name != INDEX
            and not file.name.startswith("adapter_")
        ):
            shutil.copyfile(file, out / file.name)
    file = out / "config.json"
    if dtype is not None and file.is_file():
        settings: dict[str, Any] = json.loads(file.read_text())
        settings.pop("torch_dtype", None)
        file.write_text(
            json.dumps(settings | {"dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
        )
