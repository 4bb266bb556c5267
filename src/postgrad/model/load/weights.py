"""Weights that stay on disk until they are read, and Hugging Face folders written from them.

At most one file's weights are in memory at a time, so a model larger than the memory can be
converted.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from postgrad.errors import Missing, Unreadable, Unsupported

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# The other files of a model folder: settings, tokenizer, its own code.
OTHER_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".py")
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class LazyTensor:
    """One weight with known shape and type; `read` loads it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def nbytes(self, dtype: torch.dtype | None) -> int:
        """Return the size in bytes in `dtype`; None means the weight's own type."""
        return math.prod(self.shape) * (dtype or self.dtype).itemsize


def read_lazy_weights(folder: Path) -> dict[str, LazyTensor]:
    """Return the weights of a stock folder, by name.

    Raises: ConfigError if there are none, or a file cannot be read.
    """
    weights: dict[str, LazyTensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            weights |= _read_lazy_file(file)
        except (SafetensorError, OSError) as error:
            raise Unreadable(f"{file} cannot be read: {error}") from error
    if not weights:
        raise Missing(f"{folder} has no model*.safetensors; give a folder with model weights")
    return weights


def _read_lazy_file(file: Path) -> dict[str, LazyTensor]:
    weights: dict[str, LazyTensor] = {}
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118  (not a dict)
            tensor = opened.get_slice(name)
            dtype = DTYPES.get(tensor.get_dtype())
            if dtype is None:
                raise Unsupported(
                    f"{file}: {name} is {tensor.get_dtype()}; "
                    "only floating-point weights can be exported"
                )
            weights[name] = LazyTensor(tuple(tensor.get_shape()), dtype, _reader(file, name))
    return weights


def _reader(file: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with safe_open(file, "pt") as opened:
            return opened.get_tensor(name)

    return read


def plan_shards(
    weights: Mapping[str, LazyTensor], dtype: torch.dtype | None, max_bytes: int
) -> list[list[str]]:
    """Return the names of each file's weights, in order.

    A file is full when one more weight would make it larger than `max_bytes`.
    """
    files: list[list[str]] = [[]]
    size = 0
    for name, weight in weights.items():
        nbytes = weight.nbytes(dtype)
        if files[-1] and size + nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def write_weights(
    weights: Mapping[str, LazyTensor],
    folder: Path,
    dtype: torch.dtype | None,
    max_bytes: int,
    on_progress: Callable[[str], None],
) -> None:
    """Write the weights as safetensors, with an index if there are several files.

    `dtype` None keeps each weight's type. `on_progress` gets one line per file.
    """
    files = plan_shards(weights, dtype, max_bytes)
    index: dict[str, tuple[str, int]] = {}
    for number, names in enumerate(files, 1):
        file = "model.safetensors"
        if len(files) > 1:
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensor = weights[name].read()
            tensor = tensor.to(dtype or tensor.dtype)
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
            index[name] = (file, weights[name].nbytes(dtype))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        size_gib = sum(t.nbytes for t in tensors.values()) / 2**30
        on_progress(f"{file}: {len(names)} weights, {size_gib:.2f} GiB")
    write_index(folder, index)


def write_index(folder: Path, index: dict[str, tuple[str, int]]) -> None:
    """Write which file has each weight, from files and bytes by name; nothing for one file."""
    if len({file for file, _ in index.values()}) <= 1:
        return
    content = {
        "metadata": {"total_size": sum(nbytes for _, nbytes in index.values())},
        "weight_map": {name: file for name, (file, _) in sorted(index.items())},
    }
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def copy_model_files(source: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Copy a model folder's files except its weights; write `dtype` into config.json if given."""
    for file in sorted(source.iterdir()):
        if _is_model_file(file):
            shutil.copyfile(file, folder / file.name)
    config_file = folder / "config.json"
    if dtype is not None and config_file.is_file():
        config: dict[str, Any] = json.loads(config_file.read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        config_file.write_text(json.dumps(config, indent=2) + "\n")


def _is_model_file(file: Path) -> bool:
    if not file.is_file() or file.suffix not in OTHER_SUFFIXES:
        return False
    return file.name != INDEX and not file.name.startswith("adapter_")
