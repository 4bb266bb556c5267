"""Writes a stock Hugging Face folder from a run, checkpoint, adapter, model or verl's shards.

Weights are read and written one file at a time. The folder is written under a temporary name and
then renamed, so it is complete or absent.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from postgrad.config.schema import ModelConfig
from postgrad.errors import (
    Conflict,
    Damaged,
    Missing,
    RunError,
    UnknownName,
    Unreadable,
    Unwritable,
    first_line,
)
from postgrad.files import atomic_folder
from postgrad.model import lora
from postgrad.model.load.formats import auto_class_of
from postgrad.model.load.load import load, save
from postgrad.model.load.weights import (
    LazyTensor,
    copy_model_files,
    read_lazy_weights,
    write_weights,
)
from postgrad.publish import verl_shards
from postgrad.training import checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LORA = ("merge", "keep")
Fill = Callable[[Path], None]  # fills a folder


@dataclass(frozen=True)
class ExportRequest:
    """What to export, and how."""

    source: str
    out: Path
    step: str = "latest"  # of a run: latest, best or a number
    dtype: str | None = None  # a key of DTYPES; None keeps the types
    shard_gib: float = 5.0  # size of a weight file, at most
    lora: str = "merge"  # one of LORA

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return None if self.dtype is None else DTYPES[self.dtype]

    @property
    def shard_bytes(self) -> int:
        return int(self.shard_gib * 2**30)


def export(request: ExportRequest, note: Callable[[str], None]) -> Path:
    """Write the folder and return it.

    Raises:
        ConfigError: the request cannot be met; nothing was written.
        RunError: the disk refused the write.
    """
    folder = find_folder(request.source, request.step)
    out = request.out.expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Unwritable(f"{out} exists already; name a new folder, or remove it")
    fill = _prepare(folder, request, note)
    try:
        with atomic_folder(out) as temporary:
            fill(temporary)
    except OSError as error:
        raise RunError(f"{out} could not be written: {error.strerror or error}") from error
    return out


def find_folder(source: str, step: str = "latest") -> Path:
    """Return the checkpoint of a run for `step`, or the folder `source` itself.

    Raises ConfigError if there is no such checkpoint or folder.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.name in ("latest", "best") and path.parent.name == "checkpoints":
        return path.parent / path.read_text().strip()
    if (path / "checkpoints").is_dir():
        return _find_checkpoint(path, step)
    if step != "latest":
        raise Conflict(
            f"step={step} chooses among the checkpoints of a run; {path} is not a run folder"
        )
    if not path.is_dir():
        raise Unreadable(
            f"{path}: no such folder; "
            "name a run, a checkpoint, a model folder or a folder with verl's shards"
        )
    return path


def _find_checkpoint(run: Path, step: str) -> Path:
    root = run / "checkpoints"
    if step == "latest":
        found = checkpoint.latest(run)
    elif step == "best":
        found = checkpoint.best(run)
    else:
        named = root / f"step-{step}"
        found = named if (named / "state.json").is_file() else None
    if found is not None:
        return found
    steps = checkpoint.saved_steps(run)
    if not steps:
        raise UnknownName(
            f"{run} has no checkpoint step={step}; it has no checkpoint yet", at="step"
        )
    hint = "; training.keep_best keeps the best" if step == "best" else ""
    existing = ", ".join(map(str, steps))
    raise UnknownName(
        f"{run} has no checkpoint step={step}; it has steps {existing}{hint}", at="step"
    )


def _prepare(folder: Path, request: ExportRequest, note: Callable[[str], None]) -> Fill:
    """Check everything and return the function that fills the folder. Raises ConfigError."""
    shards = verl_shards.find_shards(folder)
    if shards is not None:
        return _prepare_verl(shards, request, note)
    is_checkpoint = (folder / "policy").is_dir()
    policy = folder / "policy" if is_checkpoint else folder
    adapter = folder / "adapter" if is_checkpoint else folder
    dtype = request.torch_dtype
    if request.lora == "keep":
        if not (adapter / lora.CONFIG_FILE).is_file():
            raise Conflict(
                f"lora=keep: {folder} has no adapter, because it was not trained with "
                "model.lora.rank; use lora=merge"
            )
        return lambda out: _copy_adapter(adapter, policy, out)
    if lora.is_adapter(str(policy)):
        return lambda out: _merge_adapter(policy, dtype, out)
    weights = read_lazy_weights(policy)

    def fill(out: Path) -> None:
        copy_model_files(policy, out, dtype)
        write_weights(weights, out, dtype, request.shard_bytes, note)

    return fill


def _copy_adapter(adapter: Path, tokenizer: Path, out: Path) -> None:
    """Copy the adapter in peft's format, and the tokenizer."""
    for name in (lora.CONFIG_FILE, lora.WEIGHTS_FILE):
        shutil.copyfile(adapter / name, out / name)
    for file in tokenizer.glob("*token*"):
        shutil.copyfile(file, out / file.name)
    template = tokenizer / "chat_template.jinja"
    if template.is_file():
        shutil.copyfile(template, out / template.name)


def _merge_adapter(folder: Path, dtype: torch.dtype | None, out: Path) -> None:
    """Write the base model with the adapter merged into its weights."""
    loaded = load(ModelConfig(path=str(folder), dtype="float32"), torch.device("cpu"))
    loaded.model.to(dtype or torch.float32)
    save(loaded, out)


# ---- verl


class Expected(NamedTuple):
    """The weights that a configuration describes."""

    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]  # name -> name of the weight that it is tied to


def _prepare_verl(folder: Path, request: ExportRequest, note: Callable[[str], None]) -> Fill:
    """Check verl's shards and return the function that fills the folder. Raises ConfigError."""
    model_files = folder / "huggingface"
    if not (model_files / "config.json").is_file():
        raise Missing(
            f"{folder} has no huggingface/config.json; "
            "put the model's configuration and tokenizer there"
        )
    note(f"verl's shards in {folder}: {len(verl_shards.shard_files(folder))} ranks")
    weights, adapters = split_adapters(verl_shards.merge_shards(folder))
    if request.lora == "keep":
        adapter = folder / "lora_adapter"
        if not adapter.is_dir():
            raise Conflict(f"lora=keep: {folder} has no lora_adapter/; use lora=merge")
        return lambda out: _copy_adapter(adapter, model_files, out)
    if adapters:
        weights = merge_adapters(weights, adapters, _adapter_scale(folder))
    weights = check_weights(weights, _expected_weights(model_files), folder)

    # verl's shards are float32 masters, while its config.json names the type of the release.
    # The written configuration names the type of the written weights.
    dtype = request.torch_dtype
    written_dtype = dtype
    stored_dtypes = {weight.dtype for weight in weights.values()}
    if dtype is None and len(stored_dtypes) == 1:
        (written_dtype,) = stored_dtypes

    def fill(out: Path) -> None:
        copy_model_files(model_files, out, written_dtype)
        write_weights(weights, out, dtype, request.shard_bytes, note)

    return fill


def split_adapters(
    weights: Mapping[str, LazyTensor],
) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """Return the model's weights under their stock names, and those of LoRA adapters."""
    plain: dict[str, LazyTensor] = {}
    adapters: dict[str, LazyTensor] = {}
    for name, weight in weights.items():
        name = lora.stock_name(name.removeprefix(lora.FILE_PREFIX))
        is_adapter = ".lora_A." in name or ".lora_B." in name
        target = adapters if is_adapter else plain
        target[name] = weight
    return plain, adapters


def merge_adapters(
    weights: Mapping[str, LazyTensor], adapters: Mapping[str, LazyTensor], scale: float
) -> dict[str, LazyTensor]:
    """Return the weights with scale * B @ A added, computed in float32 when they are read.

    Raises ConfigError if an adapter has no weight or no second matrix.
    """
    merged = dict(weights)
    for name, a in adapters.items():
        if ".lora_A." not in name:
            continue
        base = name.split(".lora_A.")[0] + ".weight"
        if base not in merged:
            raise Damaged(f"the adapter {name} has no weight {base} in these shards")
        b = adapters.get(name.replace(".lora_A.", ".lora_B."))
        if b is None:
            raise Damaged(f"the adapter {name} has no second matrix in these shards")
        merged[base] = _add_product(merged[base], a, b, scale)
    return merged


def _add_product(base: LazyTensor, a: LazyTensor, b: LazyTensor, scale: float) -> LazyTensor:
    def read() -> Tensor:
        weight = base.read()
        product = b.read().float() @ a.read().float()
        return (weight.float() + scale * product).to(weight.dtype)

    return LazyTensor(base.shape, base.dtype, read)


def _adapter_scale(folder: Path) -> float:
    """Return alpha / rank from the file that verl writes next to its shards."""
    for name in ("lora_train_meta.json", f"lora_adapter/{lora.CONFIG_FILE}"):
        if (folder / name).is_file():
            settings: dict[str, Any] = json.loads((folder / name).read_text())
            if settings.get("r") and settings.get("lora_alpha"):
                return float(settings["lora_alpha"]) / float(settings["r"])
    raise Missing(
        f"{folder} has LoRA adapters, but neither lora_train_meta.json nor lora_adapter/ "
        "has their alpha and rank; copy one of them from the training machine"
    )


def _expected_weights(model_files: Path) -> Expected:
    """Return the weights that config.json describes. Raises ConfigError."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_files)
        with torch.device("meta"):
            model = auto_class_of(config).from_config(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = first_line(error)
        raise Damaged(f"{model_files}/config.json describes no model: {reason}") from error
    model.tie_weights()
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name_of[id(parameter)] != name:
            tied[name] = name_of[id(parameter)]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        if name not in tied:
            shapes[name] = tuple(tensor.shape)
    return Expected(shapes, tied)


def check_weights(
    weights: Mapping[str, LazyTensor], expected: Expected, folder: Path
) -> dict[str, LazyTensor]:
    """Return the weights of a stock folder, in the model's order.

    Raises ConfigError for a weight that is unknown, missing or of another shape, and for a tied
    weight that differs from the one it is tied to.
    """
    shapes, tied = expected
    for name in weights:
        if name not in shapes and name not in tied:
            raise Damaged(
                f"{folder}: {name} is not a weight of the model that "
                "huggingface/config.json describes"
            )
    found = {name: weights[name] for name in shapes if name in weights}
    for name in tied.keys() & weights.keys():
        other = tied[name]
        if other in weights and not torch.equal(weights[name].read(), weights[other].read()):
            raise Damaged(
                f"{folder}: huggingface/config.json ties {name} to {other}, but they differ; "
                "set tie_word_embeddings to false"
            )
        found.setdefault(other, weights[name])
    missing = [name for name in shapes if name not in found]
    if missing:
        raise Damaged(
            f"{folder} lacks {len(missing)} weights of the model, the first is {missing[0]}"
        )
    for name, weight in found.items():
        if weight.shape != shapes[name]:
            raise Damaged(
                f"{folder}: {name} is {weight.shape}, but config.json says {shapes[name]}"
            )
    return {name: found[name] for name in shapes}
