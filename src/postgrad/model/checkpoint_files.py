"""The files of checkpoints, written by one or more ranks.

`policy/` stays a stock Hugging Face folder. Each rank writes the full weights of some blocks into
one file, and an index lists the files. The optimizer's files hold the ranks' shards as they are;
each says where its shards belong, so that another mesh, or one process, can put them together.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from postgrad.errors import RunError
from postgrad.files import fsync_path
from postgrad.model.load.formats import Loaded, save_tokenizer
from postgrad.model.load.weights import write_index
from postgrad.model.parallel.groups import REPLICATED, Division, join_parts

LAYOUT = "layout"  # key of a file's metadata


def part_path(file: Path, index: int, count: int) -> Path:
    """Return the name of one of `count` files that replace `file`; indexes begin with 0."""
    if count == 1:
        return file
    return file.with_name(f"{file.stem}-{index + 1:05d}-of-{count:05d}{file.suffix}")


# ---- weights


def assign_weights(sizes: dict[str, int], num_ranks: int) -> dict[str, int]:
    """Return the rank that writes each weight: nearly equal shares, a block's weights together."""
    blocks: dict[str, list[str]] = {}
    for name in sizes:
        numbered = re.match(r".*?\.\d+\.", name)
        blocks.setdefault(numbered[0] if numbered else name, []).append(name)
    total = sum(sizes.values())
    ranks: dict[str, int] = {}
    before = 0
    for names in blocks.values():
        size = sum(sizes[name] for name in names)
        ranks |= dict.fromkeys(names, (2 * before + size) * num_ranks // (2 * total))
        before += size
    return ranks


def to_stock_names(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as a stock folder has them, such as experts one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    converted = revert_weight_conversion(_without_weights(model), weights)
    return {name: tensor.contiguous() for name, tensor in converted.items()}


def _without_weights(model: Any) -> Any:
    """Return the stock model on the meta device."""
    with torch.device("meta"):
        return type(model)(model.config)


@dataclass
class ModelFiles:
    """The files of a stock Hugging Face folder besides its weights, and the index of those."""

    loaded: Loaded
    dtype: torch.dtype
    path: Path
    index: dict[str, tuple[str, int]]  # file and bytes of each weight

    def write(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        model = _without_weights(self.loaded.model).to(self.dtype)
        model.generation_config = self.loaded.model.generation_config
        # save_pretrained removes weights that it did not write, so it gets a folder of its own.
        with tempfile.TemporaryDirectory(dir=self.path) as folder:
            model.save_pretrained(folder, state_dict={})
            save_tokenizer(self.loaded, Path(folder))
            for file in Path(folder).iterdir():
                if file.suffix != ".safetensors":
                    file.replace(self.path / file.name)
        write_index(self.path, self.index)


# ---- optimizer


@dataclass(frozen=True)
class Layout:
    """Where the shards of one file belong: first slices, then shards of a slice.

    Experts that tokens are sent to are divided over neighbors instead, then sharded.
    """

    slice_rank: int
    num_slices: int
    shard_rank: int
    num_shards: int
    divisions: dict[str, list[Any]]  # fields of Division by parameter; without replicated ones
    num_expert_slices: int = 1

    @property
    def index(self) -> int:
        return self.slice_rank * self.num_shards + self.shard_rank

    @property
    def num_files(self) -> int:
        return self.num_slices * self.num_shards

    def slicing_of(self, key: str) -> tuple[Division, int, int]:
        """Return how a tensor is divided, which slice this file has, and how many there are."""
        fields = self.divisions.get(key.partition("/")[2])
        division = REPLICATED if fields is None else Division(*fields)
        if division.is_dispatched:
            return division, self.index % self.num_expert_slices, self.num_expert_slices
        return division, self.slice_rank, self.num_slices

    def to_metadata(self) -> dict[str, str]:
        return {LAYOUT: json.dumps(asdict(self))}


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a file, or the full tensors of the parts that ranks wrote instead.

    Raises: RunError if a part is missing.
    """
    if file.is_file():
        yield from load_file(file).items()
        return
    paths = sorted(file.parent.glob(f"{file.stem}-*-of-*{file.suffix}"))
    with ExitStack() as stack:
        parts = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        layouts = [Layout(**json.loads(part.metadata()[LAYOUT])) for part in parts]
        if not layouts or len(layouts) != layouts[0].num_files:
            raise RunError(f"{file}: {len(layouts)} of its files are here, and some are missing")
        held = [dict.fromkeys(part.keys()) for part in parts]
        for key in dict.fromkeys(key for keys in held for key in keys):
            division, _, num_slices = layouts[0].slicing_of(key)
            slices: list[list[Tensor]] = [[] for _ in range(num_slices)]
            for part, layout, keys in zip(parts, layouts, held, strict=True):
                if key in keys:
                    slices[layout.slicing_of(key)[1]].append(part.get_tensor(key))
            yield key, _join(slices, division)


def _join(slices: list[list[Tensor]], division: Division) -> Tensor:
    first = next(shard for shards in slices for shard in shards)
    if first.dim() == 0:  # a step count, which all ranks have
        return first
    return join_parts([torch.cat(shards) for shards in slices if shards], division)


def read_own_part(file: Path, layout: Layout) -> dict[str, Tensor] | None:
    """Return the tensors of this rank's part; None if another mesh wrote the checkpoint."""
    path = part_path(file, layout.index, layout.num_files)
    if not path.is_file():
        return None
    with safe_open(path, "pt") as part:
        if part.metadata() != layout.to_metadata():
            return None
    return load_file(path)


# ---- writing


@dataclass
class FolderFile:
    """A folder of these weights that `save` writes: a stock one, or that of an adapter."""

    save: Callable[[Loaded, dict[str, Tensor], Path], None]
    loaded: Loaded
    weights: dict[str, Tensor]
    path: Path

    def write(self) -> None:
        self.save(self.loaded, self.weights, self.path)


@dataclass
class TensorsFile:
    """One safetensors file."""

    tensors: dict[str, Tensor]
    path: Path
    metadata: dict[str, str] | None = None

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, self.path, self.metadata)


File = FolderFile | TensorsFile | ModelFiles


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


@torch.no_grad()
def write_files(files: list[File]) -> None:
    """Write the files, remove them from the list, and wait until the disk has them."""
    while files:
        path = files[0].path
        files.pop(0).write()  # its memory is freed as soon as it is on disk
        for written in sorted(path.rglob("*")) if path.is_dir() else [path]:
            fsync_path(written)
