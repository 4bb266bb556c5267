"""Reads checkpoints that verl wrote with FSDP: one file per rank with a shard of every weight.

`actor/model_world_size_W_rank_R.pt` hold DTensors, sharded along one dimension; the last shards are
shorter or empty. `actor/huggingface/` has the configuration and the tokenizer.

The files are pickles. torch's weights-only loader reads them, with the classes below in place of
those of torch.distributed; they only store what was saved. So no code of a file runs, no process
group is needed, and files of older torch versions load. Weights stay on disk until they are read.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad.errors import Damaged, Unreadable, Unsupported
from postgrad.model.load.weights import LazyTensor

SHARD_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
# Wrapping a module adds these to the names of its weights.
WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


# ---- classes in place of those of torch.distributed


class SavedObject:
    """In place of any small class: stores its arguments and its state."""

    def __new__(cls, *values: Any) -> "SavedObject":
        saved = super().__new__(cls)
        saved.values = values
        return saved

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)
        self.state = state


class Shard(SavedObject):
    """The placement of a weight that is sharded along `dim`."""


class Replicate(SavedObject):
    """The placement of a weight that every rank has."""


class Partial(SavedObject):
    """The placement of a weight whose ranks hold summands; no checkpoint should have one."""


class SavedTensor(torch.Tensor):
    """In place of DTensor, with the attributes it was saved with: `_local_tensor` and `_spec`."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a saved shard is only read, never computed with")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            for name, value in (part or {}).items():
                setattr(self, name, value)


def _ignore_member(kind: Any, name: Any) -> type[SavedObject]:
    """In place of getattr, by which pickles name nested classes and enum members; none is read."""
    return SavedObject


TENSOR = "torch.distributed.tensor"
OLD_TENSOR = "torch.distributed._tensor"  # before torch 2.5
MESH_LAYOUT = "torch.distributed._mesh_layout"
PLACEMENTS = {
    "Shard": Shard,
    "_StridedShard": Shard,
    "Replicate": Replicate,
    "Partial": Partial,
    "_Partial": Partial,
}


def _stand_ins() -> dict[str, Any]:
    """Return the class or function that stands in for each name that the pickles may hold."""
    names: dict[str, Any] = {}
    for name in (f"{TENSOR}.DTensor", f"{TENSOR}._api.DTensor"):
        names[name] = SavedTensor
    for name in (f"{OLD_TENSOR}.DTensor", f"{OLD_TENSOR}.api.DTensor"):
        names[name] = SavedTensor
    for package in (TENSOR, OLD_TENSOR):
        for name, kind in PLACEMENTS.items():
            names[f"{package}.placement_types.{name}"] = kind
        for module in ("_dtensor_spec", "placement_types"):
            for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry"):
                names[f"{package}.{module}.{name}"] = SavedObject
    for name in (
        "torch.distributed.device_mesh.DeviceMesh",
        f"{OLD_TENSOR}.device_mesh.DeviceMesh",
    ):
        names[name] = SavedObject
    for name in ("_MeshLayout", "_FlatLayout"):
        names[f"{MESH_LAYOUT}.{name}"] = SavedObject
    names["builtins.getattr"] = _ignore_member
    names["__builtin__.getattr"] = _ignore_member
    return names


@contextmanager
def _allow_stand_ins() -> Iterator[None]:
    """Let the weights-only loader use the stand-ins, and nothing else, inside the block."""
    previous = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([(kind, name) for name, kind in _stand_ins().items()])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(previous)


def read_shard(file: Path) -> dict[str, Any]:
    """Return the state of one rank by name; its tensors stay on disk. Raises ConfigError."""
    try:
        with _allow_stand_ins():
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # torch raises many types: for a cut zip file, a forbidden class, a file of another kind
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0][:200] if lines else type(error).__name__
        raise Unreadable(f"{file} cannot be read as weights: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise Damaged(f"{file} has no weights by name but a {type(state).__name__}")
    return state


# ---- folders


def find_shards(path: Path) -> Path | None:
    """Return the folder with verl's shards, or None.

    It is `path`, its actor/, or the actor/ of the step that latest_checkpointed_iteration.txt
    names.
    """
    candidates = [path, path / "actor"]
    pointer = path / "latest_checkpointed_iteration.txt"
    if pointer.is_file():
        candidates.append(path / f"global_step_{pointer.read_text().strip()}" / "actor")
    for folder in candidates:
        if folder.is_dir() and any(SHARD_FILE.fullmatch(file.name) for file in folder.iterdir()):
            return folder
    return None


def shard_files(folder: Path) -> list[Path]:
    """Return the files of all ranks, in order.

    Raises ConfigError if one is missing, or if the files have several world sizes.
    """
    by_world_size: dict[int, dict[int, Path]] = {}
    for file in folder.iterdir():
        if match := SHARD_FILE.fullmatch(file.name):
            by_world_size.setdefault(int(match[1]), {})[int(match[2])] = file
    if len(by_world_size) > 1:
        sizes = " and ".join(map(str, sorted(by_world_size)))
        raise Damaged(
            f"{folder} has shards of world sizes {sizes}; "
            "remove those that are not of this checkpoint"
        )
    ((world_size, files),) = by_world_size.items()
    missing = sorted(set(range(world_size)) - set(files))
    if missing:
        names = ", ".join(f"model_world_size_{world_size}_rank_{rank}.pt" for rank in missing[:3])
        more = " ..." if len(missing) > 3 else ""
        raise Damaged(
            f"{folder} lacks {len(missing)} of {world_size} shards: {names}{more}; "
            "copy them from the other nodes"
        )
    unknown = sorted(set(files) - set(range(world_size)))
    if unknown:
        raise Damaged(f"{files[unknown[0]]}: there is no rank {unknown[0]} of {world_size}")
    return [files[rank] for rank in range(world_size)]


# ---- merging


def merge_shards(folder: Path) -> dict[str, LazyTensor]:
    """Return every weight of the checkpoint by name; its shards are joined when it is read.

    Raises ConfigError that names the weight whose shards do not fit together.
    """
    files = shard_files(folder)
    states = [read_shard(file) for file in files]
    for file, state in zip(files, states, strict=True):
        different = sorted(state.keys() ^ states[0].keys())
        if different:
            raise Damaged(
                f"{file} and {files[0].name} have different weights; "
                f"{different[0]!r} is in only one of them"
            )
    weights: dict[str, LazyTensor] = {}
    for name in states[0]:
        shards = [state[name] for state in states]
        weights[unwrapped_name(name)] = _merge(f"{folder}: {name}", shards)
    return weights


def unwrapped_name(name: str) -> str:
    """Return the name of a weight without what wrapping its modules added."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def _merge(label: str, shards: list[Any]) -> LazyTensor:
    """Return one weight from its shards, one per rank; `label` names it in errors."""
    kinds = {_kind(shard) for shard in shards}
    if kinds == {"tensor"}:
        return _merge_copies(label, shards)
    if kinds == {"DTensor"}:
        return _merge_dtensors(label, shards)
    raise Damaged(f"{label} is not the same kind of tensor on all ranks")


def _kind(shard: Any) -> str:
    if isinstance(shard, SavedTensor):
        return "DTensor"
    return "tensor" if isinstance(shard, Tensor) else "other"


def _merge_copies(label: str, copies: list[Tensor]) -> LazyTensor:
    """Return a weight that every rank has. Reading it raises ConfigError if the copies differ."""
    first = copies[0]
    if any(copy.shape != first.shape or copy.dtype != first.dtype for copy in copies):
        raise Damaged(
            f"{label} has different shapes on different ranks, but no record of how it is sharded"
        )

    def read() -> Tensor:
        if not all(torch.equal(first, copy) for copy in copies[1:]):
            raise Damaged(f"{label} differs between ranks, but has no record of how it is sharded")
        return first

    return LazyTensor(tuple(first.shape), first.dtype, read)


def _merge_dtensors(label: str, shards: list[Any]) -> LazyTensor:
    spec = shards[0]._spec
    placements = tuple(spec.placements)
    for shard in shards:
        if _describe(shard._spec.placements) != _describe(placements):
            raise Damaged(f"{label} is sharded in different ways on different ranks")
    if len(placements) == 2 and isinstance(placements[0], Replicate):
        placements = placements[1:]
        shards = _first_replica(label, shards)
    if len(placements) != 1:
        names = getattr(spec.mesh, "mesh_dim_names", None)
        names = names or getattr(spec.mesh, "_mesh_dim_names", None) or ()
        raise Unsupported(
            f"{label} is sharded along {len(placements)} dimensions of devices "
            f"({', '.join(names)}); only FSDP's single dimension is supported"
        )
    placement = placements[0]
    local = [shard._local_tensor for shard in shards]
    if isinstance(placement, Replicate):
        return _merge_copies(label, local)
    if not isinstance(placement, Shard):
        raise Damaged(f"{label} is a sum over ranks, which no checkpoint should hold")
    shape = tuple(_field(spec.tensor_meta, "shape", 0))
    return _concatenate(label, shape, int(_field(placement, "dim", 0)), local)


def _concatenate(label: str, shape: tuple[int, ...], dim: int, shards: list[Tensor]) -> LazyTensor:
    """Return the shards joined along `dim`. Raises ConfigError if they do not give `shape`."""
    dtypes = {shard.dtype for shard in shards}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise Damaged(f"{label} has different types on different ranks: {names}")
    filled = [shard for shard in shards if shard.numel()]  # ranks after the last row hold nothing
    filled = filled or shards[:1]
    length = sum(shard.shape[dim] for shard in filled)
    other_dims = {tuple(shard.shape[:dim] + shard.shape[dim + 1 :]) for shard in filled}
    if length != shape[dim] or other_dims != {shape[:dim] + shape[dim + 1 :]}:
        shapes = ", ".join(str(tuple(shard.shape)) for shard in shards)
        raise Damaged(f"{label} should be {shape}, but its shards are {shapes}")
    return LazyTensor(shape, shards[0].dtype, lambda: torch.cat(filled, dim=dim))


def _describe(placements: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return (kind, dimension) of each placement, to compare them."""
    described = []
    for placement in placements:
        dim = _field(placement, "dim", 0) if isinstance(placement, Shard) else None
        described.append((type(placement).__name__, dim))
    return described


def _field(saved: Any, name: str, index: int) -> Any:
    """Return a field of a saved object, by name, or by index if it was saved as a tuple."""
    if hasattr(saved, name):
        return getattr(saved, name)
    return saved.values[index] if saved.values else saved.state[index]


def _first_replica(label: str, shards: list[Any]) -> list[Any]:
    """Return the shards of the first replica, in order, of a weight with several replicas."""
    meshes = [shard._spec.mesh for shard in shards]
    coordinates: list[Any] = [getattr(mesh, "_coordinate_on_dim", None) or () for mesh in meshes]
    if all(len(coordinate) == 2 for coordinate in coordinates):
        first = []
        for rank, (replica, position) in enumerate(coordinates):
            if replica == 0:
                first.append((position, rank))
        return [shards[rank] for _, rank in sorted(first)]
    mesh = getattr(meshes[0], "mesh", None)
    if isinstance(mesh, Tensor) and mesh.dim() == 2:
        return [shards[rank] for rank in mesh[0].tolist()]
    raise Unsupported(
        f"{label}: these shards do not record how {len(shards)} ranks were arranged "
        "in two dimensions"
    )
