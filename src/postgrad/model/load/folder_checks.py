"""Checks of a model folder before transformers reads it: a folder is data, and may be hostile.

Refused: links to files outside the folder, index files that name such files, weights that are
pickled, kernels that config.json would fetch, and declared sizes that the weights do not have.
"""

import json
import math
from pathlib import Path
from typing import Any

from postgrad.errors import Damaged, Unreadable, Unsupported

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
MAX_HEADER_BYTES = 100 * 2**20  # the limit of safetensors itself
# Sizes that are multiplied by the hidden size in some weight.
WIDTHS = (
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "moe_intermediate_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
)
# A size that config.json declares may exceed the weights by this factor: quantized files are small.
SLACK = 16


def check_folder(folder: Path, with_weights: bool) -> None:
    """Raise ConfigError if a file of the folder must not be read; weights only if asked."""
    for file in sorted(folder.iterdir()):
        _check_link(folder, file)
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise Unreadable(f"{file} is a pipe, socket or device, not a file; remove it")
    for name in INDEXES:
        _check_index(folder / name)
    config = _read_config(folder / "config.json")
    _check_kernels(folder, config)
    if with_weights:
        _check_pickles(folder)
    _check_sizes(folder, config)


def _check_link(folder: Path, file: Path) -> None:
    """Refuses a link out of the folder, except into the blobs of the hub's download cache."""
    if not file.is_symlink():
        return
    target = file.resolve()
    root = folder.resolve()
    if target.is_relative_to(root):
        return
    cache = root.parent.parent
    if cache.name.startswith("models--") and target.is_relative_to(cache / "blobs"):
        return
    raise Unsupported(
        f"model.path={folder}: {file.name} is a link to {target}, outside of the folder; "
        "copy that file into the folder if you trust it"
    )


def _check_index(file: Path) -> None:
    """Refuses an index that names files of another folder."""
    if not file.is_file():
        return
    index = _read_json(file)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise Damaged(f"model.path={file.parent}: {file.name} has no table weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise Damaged(
                f"model.path={file.parent}: {file.name} names {str(name)[:100]!r}, which is no "
                "file of this folder; an index names files without a path"
            )


def _read_config(file: Path) -> dict[str, Any]:
    """Return config.json, or an empty table where there is none."""
    if not file.is_file():
        return {}
    config = _read_json(file)
    if not isinstance(config, dict):
        raise Damaged(f"model.path={file.parent} cannot be loaded: config.json is no table")
    if not isinstance(config.get("text_config", {}), dict):
        raise Damaged(f"model.path={file.parent}: config.json: text_config is no table")
    return config


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Damaged(
            f"model.path={file.parent} cannot be loaded: {file.name} is not JSON ({reason})"
        ) from error


def _check_kernels(folder: Path, config: dict[str, Any]) -> None:
    """Refuses an attention implementation that transformers would fetch from a hub and run."""
    for key in ATTENTION_KEYS:
        if "/" in str(config.get(key, "")):
            raise Unsupported(
                f"model.path={folder}: config.json asks for the kernels {config[key]!r}, which "
                f"are code from a hub; remove {key} from config.json"
            )


def _check_pickles(folder: Path) -> None:
    """Refuses a folder whose only weights are pickled: unpickling can run any program."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = [file.name for file in sorted(folder.iterdir()) if file.suffix in PICKLES]
    if pickles:
        raise Unsupported(
            f"model.path={folder}: its weights are pickled ({pickles[0]}), and loading them can "
            "run any program; convert them to safetensors where they come from"
        )


def _check_sizes(folder: Path, config: dict[str, Any]) -> None:
    """Refuses sizes that would take far more memory than the weights in the folder."""
    num_tensors, num_bytes = _count_weights(folder)
    if not num_tensors:
        return
    text = config.get("text_config", config)
    layers = _declared(folder, text, "num_hidden_layers")
    width = _declared(folder, text, "hidden_size")
    if layers > num_tensors:
        raise Damaged(
            f"model.path={folder}: config.json declares {layers} layers, and the weights have "
            f"{num_tensors} tensors; the folder is damaged"
        )
    for key in WIDTHS:
        if _declared(folder, text, key) * width > SLACK * num_bytes:
            raise Damaged(
                f"model.path={folder}: config.json declares {key}={text[key]} with "
                f"hidden_size={width}, and the weights have {num_bytes} bytes; the folder is "
                "damaged"
            )


def _declared(folder: Path, config: dict[str, Any], key: str) -> int:
    """Return a size of config.json, 0 if it is not given. Raises ConfigError for other values."""
    value = config.get(key)
    if value is None or isinstance(value, list):  # some families have one size per layer
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Damaged(f"model.path={folder}: config.json: {key}={str(value)[:50]} is no size")
    return value


def _count_weights(folder: Path) -> tuple[int, int]:
    """Return (tensors, bytes) of all safetensors files, from their headers."""
    num_tensors = 0
    num_bytes = 0
    for file in folder.glob("*.safetensors"):
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size, MAX_HEADER_BYTES):
                raise Damaged(
                    f"model.path={folder} cannot be loaded: {file.name} declares a header of "
                    f"{length} bytes and has {size}; the file is damaged"
                )
            try:
                header = json.loads(opened.read(length))
                shapes = [entry["shape"] for name, entry in header.items() if name[0] != "_"]
                num_values = sum(math.prod(shape) for shape in shapes)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise Damaged(
                    f"model.path={folder} cannot be loaded: the header of {file.name} is damaged"
                ) from error
        if num_values > SLACK * size:
            raise Damaged(
                f"model.path={folder}: {file.name} declares {num_values} values in {size} bytes; "
                "the file is damaged"
            )
        num_tensors += len(shapes)
        num_bytes += size
    return num_tensors, num_bytes
