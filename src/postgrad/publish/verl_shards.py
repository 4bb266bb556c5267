"""Checkpoints that verl wrote with FSDP: one file a rank, each a part of every weight.

`actor/model_world_size_W_rank_R.pt` hold DTensors (FSDP2, and FSDP1 with a device mesh) or ShardedTensors (FSDP1 without), cut along one
dimension, the last parts shorter or empty; `actor/huggingface/` has configuration and tokenizer. The files are pickles: they are read with
torch's weights-only loader, and the classes they name are replaced by the plain ones below, which only hold what was saved. So no code of
a file runs, no process group is needed, and files of older torch versions load, too. Weights stay on disk until one is asked for.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad.errors import ConfigError
from postgrad.model.weights import LazyTensor

SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
WRAPPERS = (
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_orig_mod.",
)  # what wrapping adds to names


# ---- what the pickles hold


class Held:
    """Stands for any small class of torch.distributed: takes whatever it is made with and keeps its state."""

    def __new__(cls, *values: Any) -> "Held":
        made = super().__new__(cls)
        made.values = values
        return made

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)
        self.state = state


class Cut(Held):
    """A weight cut along `dim`."""


class Whole(Held):
    """A weight that every rank has."""


class Summand(Held):
    """A weight whose ranks hold parts of a sum; no checkpoint should have one."""


class Part(torch.Tensor):
    """Stands for DTensor and ShardedTensor: `_local_tensor` and `_spec`, or `_local_shards` and `_metadata`, as they were saved."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a part of a weight is read, never computed with")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __setstate__(self, state: Any) -> None:
        if (
            isinstance(state, tuple) and len(state) == 5
        ):  # ShardedTensor: shards, metadata, process group, spec, remote references
            self._local_shards, self._metadata = state[:2]
            return
        for part in state if isinstance(state, tuple) else (state,):
            for name, value in (part or {}).items():
                setattr(self, name, value)


def _member(kind: Any, name: Any) -> type[Held]:
    """Stands for getattr, by which pickles name nested classes and members of enumerations: none of those are read here."""
    return Held


TENSOR, SHARD_ROOM = "torch.distributed.tensor", "torch.distributed._shard"
OLD = "torch.distributed._tensor"  # where DTensor lived before torch 2.5
KNOWN: dict[str, Any] = {
    **dict.fromkeys((f"{TENSOR}.DTensor", f"{TENSOR}._api.DTensor", f"{OLD}.api.DTensor", f"{OLD}.DTensor"), Part),
    **{f"{room}.placement_types.{name}": kind for room in (TENSOR, OLD) for name, kind in
       (("Shard", Cut), ("_StridedShard", Cut), ("Replicate", Whole), ("Partial", Summand), ("_Partial", Summand))},
    **{f"{room}.{file}.{name}": Held for room in (TENSOR, OLD) for file in ("_dtensor_spec", "placement_types")
       for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")},
    **dict.fromkeys(("torch.distributed.device_mesh.DeviceMesh", f"{OLD}.device_mesh.DeviceMesh"), Held),
    **dict.fromkeys(("torch.distributed._mesh_layout._MeshLayout", "torch.distributed._mesh_layout._FlatLayout"), Held),
    f"{SHARD_ROOM}.sharded_tensor.api.ShardedTensor": Part,
    **{f"{SHARD_ROOM}.{name}": Held for name in (
        "metadata.ShardMetadata", "sharded_tensor.shard.Shard", "sharded_tensor.metadata.ShardedTensorMetadata",
        "sharded_tensor.metadata.TensorProperties", "sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "sharding_spec.chunk_sharding_spec.ChunkShardingSpec", "sharding_spec.api.EnumerableShardingSpec")},
    "torch.distributed.remote_device._remote_device": Held,
    "builtins.getattr": _member,
    "__builtin__.getattr": _member,
}  # fmt: skip


@contextmanager
def _stand_ins() -> Iterator[None]:
    """The classes above in place of torch.distributed's own, for the weights-only loader."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([(kind, name) for name, kind in KNOWN.items()])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def read_shard(file: Path) -> dict[str, Any]:
    """One rank's state, its tensors still on disk. Raises ConfigError."""
    try:
        with _stand_ins():
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds: a cut zip, a class that is not allowed, a file that is no pickle
        reason = next(
            (line for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise ConfigError(f"{file} cannot be read as weights: {reason.strip()[:200]}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{file} holds no weights by name but a {type(found).__name__}")
    return found


# ---- folders


def find_shards(path: Path) -> Path | None:
    """The folder with verl's shards that a path means: itself, its actor/, or that of the latest step; None when there are none."""
    pointer = path / "latest_checkpointed_iteration.txt"
    named = (
        [path / f"global_step_{pointer.read_text().strip()}" / "actor"] if pointer.is_file() else []
    )
    for folder in (path, path / "actor", *named):
        if folder.is_dir() and any(SHARD.fullmatch(file.name) for file in folder.iterdir()):
            return folder
    return None


def shard_files(folder: Path) -> list[Path]:
    """The files of all ranks, in order. Raises ConfigError when they are of several world sizes or one is missing."""
    found: dict[int, dict[int, Path]] = {}
    for file in folder.iterdir():
        if match := SHARD.fullmatch(file.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = file
    if len(found) > 1:
        sizes = " and ".join(map(str, sorted(found)))
        raise ConfigError(
            f"{folder} has shards of world sizes {sizes}; remove those that are not of this checkpoint"
        )
    ((size, ranks),) = found.items()
    missing = sorted(set(range(size)) - set(ranks))
    if missing:
        names = ", ".join(f"model_world_size_{size}_rank_{rank}.pt" for rank in missing[:3])
        raise ConfigError(
            f"{folder} lacks {len(missing)} of {size} shards: {names}{' ...' if len(missing) > 3 else ''}; "
            "copy them from the other nodes"
        )
    if extra := sorted(set(ranks) - set(range(size))):
        raise ConfigError(f"{ranks[extra[0]]}: there is no rank {extra[0]} of {size}")
    return [ranks[rank] for rank in range(size)]


# ---- merging


def merged(folder: Path) -> dict[str, LazyTensor]:
    """Every weight of the checkpoint by name, put together when it is read. Raises ConfigError that names what does not fit."""
    files = shard_files(folder)
    states = [read_shard(file) for file in files]
    for file, state in zip(files, states, strict=True):
        if state.keys() != states[0].keys():
            odd = sorted(state.keys() ^ states[0].keys())[0]
            raise ConfigError(
                f"{file} and {files[0].name} have different weights; {odd!r} is in only one of them"
            )
    out: dict[str, LazyTensor] = {}
    for name in states[0]:
        parts = [state[name] for state in states]
        out[plain_name(name)] = _lazy(folder, name, parts)
    return out


def plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _lazy(folder: Path, name: str, parts: list[Any]) -> LazyTensor:
    where = f"{folder}: {name}"
    kinds = {
        ("dtensor" if hasattr(p, "_spec") else "sharded") if isinstance(p, Part) else "plain"
        for p in parts
    }
    if len(kinds) > 1 or not all(isinstance(p, Tensor) for p in parts):
        raise ConfigError(f"{where} is not the same kind of tensor on all ranks")
    if kinds == {"plain"}:
        return _replicated(where, parts)
    return _from_dtensors(where, parts) if kinds == {"dtensor"} else _from_sharded(where, parts)


def _replicated(where: str, parts: list[Tensor]) -> LazyTensor:
    if len({(tuple(p.shape), p.dtype) for p in parts}) > 1:
        raise ConfigError(
            f"{where} has different shapes on different ranks and does not say how it was cut"
        )

    def read() -> Tensor:
        if not all(torch.equal(parts[0], p) for p in parts[1:]):
            raise ConfigError(f"{where} differs between ranks and does not say how it was cut")
        return parts[0]

    return LazyTensor(tuple(parts[0].shape), parts[0].dtype, read)


def _from_dtensors(where: str, parts: list[Any]) -> LazyTensor:
    spec = parts[0]._spec
    shape = tuple(_attribute(spec.tensor_meta, "shape", 0))
    names = (
        getattr(spec.mesh, "mesh_dim_names", None)
        or getattr(spec.mesh, "_mesh_dim_names", None)
        or ()
    )
    rules = [tuple(p._spec.placements) for p in parts]
    if any(_described(rule) != _described(rules[0]) for rule in rules):
        raise ConfigError(f"{where} is cut in different ways on different ranks")
    rule = rules[0]
    if len(rule) == 2 and isinstance(rule[0], Whole):
        rule, parts = rule[1:], _first_copy(where, parts)
    if len(rule) != 1:
        raise ConfigError(
            f"{where} is cut along {len(rule)} dimensions of devices ({', '.join(names)}); only FSDP's one is known here"
        )
    local = [p._local_tensor for p in parts]
    if isinstance(rule[0], Whole):
        return _replicated(where, local)
    if not isinstance(rule[0], Cut):
        raise ConfigError(f"{where} is a sum over ranks, which no checkpoint should hold")
    return _joined(where, shape, int(_attribute(rule[0], "dim", 0)), local)


def _from_sharded(where: str, parts: list[Any]) -> LazyTensor:
    metadata = parts[0]._metadata
    shape = tuple(_attribute(metadata, "size", 1))
    pieces: dict[tuple[int, ...], Tensor] = {}
    for part in parts:
        for shard in part._local_shards:
            offsets = tuple(_attribute(_attribute(shard, "metadata", 1), "shard_offsets", 0))
            pieces[offsets] = _attribute(shard, "tensor", 0)
    if any(any(offsets[1:]) for offsets in pieces):
        raise ConfigError(f"{where} is not cut along its first dimension alone")
    at = 0
    for offsets, piece in sorted(pieces.items(), key=lambda item: item[0]):
        if offsets[0] != at:
            raise ConfigError(f"{where}: rows {at} to {offsets[0] - 1} are in no shard")
        at += len(piece)
    return _joined(
        where, shape, 0, [piece for _, piece in sorted(pieces.items(), key=lambda item: item[0])]
    )


def _joined(where: str, shape: tuple[int, ...], dim: int, parts: list[Tensor]) -> LazyTensor:
    real = [p for p in parts if p.numel()] or parts[:1]  # a rank beyond the last row holds nothing
    kinds = {p.dtype for p in parts}
    if len(kinds) > 1:
        raise ConfigError(
            f"{where} has different types on different ranks: {', '.join(sorted(map(str, kinds)))}"
        )
    found = [p.shape[dim] for p in real]
    others = [tuple(p.shape[:dim] + p.shape[dim + 1 :]) for p in real]
    if sum(found) != shape[dim] or any(other != shape[:dim] + shape[dim + 1 :] for other in others):
        sizes = ", ".join(str(tuple(p.shape)) for p in parts)
        raise ConfigError(f"{where} should be {shape}, but its parts are {sizes}")
    return LazyTensor(shape, parts[0].dtype, lambda: torch.cat(real, dim=dim))


def _described(rule: tuple[Any, ...]) -> list[tuple[str, Any]]:
    return [
        (type(one).__name__, _attribute(one, "dim", 0) if isinstance(one, Cut) else None)
        for one in rule
    ]


def _attribute(held: Any, name: str, place: int) -> Any:
    """A field of something that was saved, by name, or by place where it was saved as a tuple."""
    if hasattr(held, name):
        return getattr(held, name)
    return held.values[place] if held.values else held.state[place]


def _first_copy(where: str, parts: list[Any]) -> list[Any]:
    """Of weights that are both copied and cut, the parts of the first copy, in order."""
    meshes = [part._spec.mesh for part in parts]
    places = [getattr(mesh, "_coordinate_on_dim", None) for mesh in meshes]
    known = [
        (place[0], place[1], part)
        for place, part in zip(places, parts, strict=True)
        if place is not None and len(place) == 2
    ]
    if len(known) == len(parts):
        return [part for copy, _, part in sorted(known, key=lambda one: one[1]) if copy == 0]
    if isinstance(table := getattr(meshes[0], "mesh", None), Tensor) and table.dim() == 2:
        return [parts[rank] for rank in table[0].tolist()]
    raise ConfigError(
        f"{where}: how {len(parts)} ranks were laid out in two dimensions cannot be read from these shards"
    )
