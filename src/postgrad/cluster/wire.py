"""Values as bytes, for other processes: plain values, tensors, batches, the engine's dataclasses.

Tensors are encoded as safetensors, everything else as JSON. Nothing is pickled, so a message
cannot run code.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from postgrad.model.port import View
from postgrad.pictures import Picture
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.types import Batch, Ragged

# Keeps a value apart from the message; returns where, as JSON data, or None to encode the value.
Store = Callable[[Any], dict[str, Any] | None]
# Returns the value that a Store keeps, from what it returned.
Load = Callable[[dict[str, Any]], Any]

PICTURE = "picture "  # before the key of a picture: the name of its bytes among the tensors

DATACLASSES: dict[str, type] = {
    kind.__name__: kind for kind in (Request, Completion, Sampling, View, Ragged)
}


def _encode_all(_: Any) -> None:
    return None


def encode(value: Any, store: Store = _encode_all) -> bytes:
    """Return a nested value as bytes. Raises TypeError for a type that cannot be sent."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_to_json(value, tensors, store)).encode()
    tensor_bytes = save_tensors(tensors) if tensors else b""
    return len(plain).to_bytes(8, "little") + plain + tensor_bytes


def decode(data: bytes, load: Load | None = None) -> Any:
    """Return the value that `encode` was given; `load` is needed if that had a `store`."""
    start = 8
    end = start + int.from_bytes(data[:start], "little")
    parts: dict[str, Any] = dict(load_tensors(data[end:])) if len(data) > end else {}
    for name, tensor in parts.items():
        if name.startswith(PICTURE):
            parts[name] = Picture(tensor.numpy().tobytes())
    return _from_json(json.loads(data[start:end]), parts, load)


def _to_json(value: Any, tensors: dict[str, Tensor], store: Store) -> Any:
    """Return the value as JSON data; move its tensors to `tensors`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    stored = store(value)
    if stored is not None:
        return {"stored": stored}
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, Picture):  # the rows of a group have the same one
        name = f"{PICTURE}{value.key}"
        if name not in tensors:
            tensors[name] = torch.frombuffer(bytearray(value.data), dtype=torch.uint8)
        return {"picture": name}
    if isinstance(value, Batch):
        parts = [value.prompt, value.response, dict(value.tokens), dict(value.rows)]
        return {"batch": [_to_json(part, tensors, store) for part in parts]}
    if dataclasses.is_dataclass(value) and DATACLASSES.get(type(value).__name__) is type(value):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: _to_json(vars(value)[name], tensors, store) for name in names}
        return {"object": type(value).__name__, "fields": fields}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):  # JSON would silently make it a string
                raise TypeError(
                    f"a dict with the key {key!r} cannot be sent or stored; keys must be strings"
                )
        return {"dict": {key: _to_json(item, tensors, store) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_to_json(item, tensors, store) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be sent or stored")


def _from_json(value: Any, parts: dict[str, Any], load: Load | None) -> Any:
    if isinstance(value, list):
        return [_from_json(item, parts, load) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return parts[value["tensor"]]
    if "picture" in value:
        return parts[value["picture"]]
    if "stored" in value:
        assert load is not None
        return load(value["stored"])
    if "batch" in value:
        return Batch(*(_from_json(part, parts, load) for part in value["batch"]))
    if "object" in value:
        fields = {name: _from_json(item, parts, load) for name, item in value["fields"].items()}
        return DATACLASSES[value["object"]](**fields)
    return {key: _from_json(item, parts, load) for key, item in value["dict"].items()}
