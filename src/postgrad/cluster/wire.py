"""What crosses a process boundary: plain values, tensors, batches and the engine's dataclasses, as one block of bytes.

Tensors travel as safetensors, everything else as JSON; nothing is pickled, so a peer can never make this process run code.
"""

import dataclasses
import json
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from postgrad.model.views import View
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.types import Batch, Ragged

DATACLASSES: dict[str, type] = {
    kind.__name__: kind for kind in (Request, Completion, Sampling, View, Ragged)
}


def encode(value: Any) -> bytes:
    """Bytes of a nested value."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_flatten(value, tensors)).encode()
    block = save_tensors(tensors) if tensors else b""
    return len(plain).to_bytes(8, "little") + plain + block


def decode(data: bytes) -> Any:
    """The value that encode() was given."""
    size = int.from_bytes(data[:8], "little")
    tensors = load_tensors(data[8 + size :]) if len(data) > 8 + size else {}
    return _restore(json.loads(data[8 : 8 + size]), tensors)


def _flatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, Batch):
        parts = [value.prompt, value.response, dict(value.tokens), dict(value.rows)]
        return {"batch": [_flatten(part, tensors) for part in parts]}
    if dataclasses.is_dataclass(value) and DATACLASSES.get(type(value).__name__) is type(value):
        fields = {f.name: _flatten(vars(value)[f.name], tensors) for f in dataclasses.fields(value)}
        return {"object": type(value).__name__, "fields": fields}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(
                key, str
            ):  # JSON would make text of it, and the receiver would not find it again
                raise TypeError(
                    f"a dict with the key {key!r} cannot cross a process boundary; keys must be text"
                )
        return {"dict": {key: _flatten(item, tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_flatten(item, tensors) for item in value]
    raise TypeError(f"{type(value).__name__} cannot cross a process boundary")


def _restore(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_restore(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "batch" in value:
        return Batch(*(_restore(part, tensors) for part in value["batch"]))
    if "object" in value:
        return DATACLASSES[value["object"]](
            **{k: _restore(v, tensors) for k, v in value["fields"].items()}
        )
    return {key: _restore(item, tensors) for key, item in value["dict"].items()}
