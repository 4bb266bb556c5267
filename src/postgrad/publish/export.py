"""A stock Hugging Face folder from a run, a checkpoint, an adapter, a model folder or verl's shards.

Weights are read and written one file's worth at a time; the folder is written aside and renamed, so that it is whole or not there.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad.config.schema import ModelConfig
from postgrad.errors import ConfigError, RunError
from postgrad.files import atomic_folder
from postgrad.model import lora
from postgrad.model.load import load, save
from postgrad.model.weights import LazyTensor, copy_model_files, read_lazy_weights, write_weights
from postgrad.publish import verl_shards as verl
from postgrad.training import checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LORA = ("merge", "keep")


@dataclass(frozen=True)
class Wanted:
    """What to export. `step` is latest, best or a number, of a run; `dtype` None keeps the types; `lora` is merge or keep."""

    source: str
    out: Path
    step: str = "latest"
    dtype: str | None = None
    shard_gib: float = 5.0
    lora: str = "merge"


def export(wanted: Wanted, note: Callable[[str], None]) -> Path:
    """Write the folder and return it. Raises ConfigError before anything is written, RunError when the disk refuses."""
    folder = find_folder(wanted.source, wanted.step)
    out = wanted.out.expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; name a new folder, or remove it")
    make = _maker(folder, wanted, note)
    try:
        with atomic_folder(out) as temporary:
            make(temporary)
    except OSError as error:
        raise RunError(f"{out} could not be written: {error.strerror or error}") from error
    return out


def find_folder(source: str, step: str = "latest") -> Path:
    """The folder a word and a step mean: a checkpoint of a run, or the folder itself. Raises ConfigError."""
    path = Path(source).expanduser()
    if path.is_file() and path.name in ("latest", "best") and path.parent.name == "checkpoints":
        return path.parent / path.read_text().strip()
    if (path / "checkpoints").is_dir():
        return _checkpoint(path, step)
    if step != "latest":
        raise ConfigError(
            f"step={step} chooses among the checkpoints of a run; {path} is not a run folder"
        )
    if not path.is_dir():
        raise ConfigError(
            f"{path}: no such folder; name a run, a checkpoint, a model folder or a folder with verl's shards"
        )
    return path


def _checkpoint(run: Path, step: str) -> Path:
    if step in ("latest", "best"):
        found = checkpoint.latest(run) if step == "latest" else checkpoint.best(run)
    else:
        found = run / "checkpoints" / f"step-{step}"
        found = found if (found / "state.json").is_file() else None
    if found is None:
        there = sorted(
            int(p.name.removeprefix("step-")) for p in (run / "checkpoints").glob("step-*")
        )
        steps = (
            f"it has steps {', '.join(map(str, there))}" if there else "it has no checkpoint yet"
        )
        hint = "; training.keep_best keeps the best" if step == "best" and there else ""
        raise ConfigError(f"{run} has no checkpoint step={step}; {steps}{hint}")
    return found


def _maker(folder: Path, wanted: Wanted, note: Callable[[str], None]) -> Callable[[Path], None]:
    """The function that fills the folder, after everything that can be wrong has been looked at."""
    dtype = None if wanted.dtype is None else DTYPES[wanted.dtype]
    most = int(wanted.shard_gib * 2**30)
    if (shards := verl.find_shards(folder)) is not None:
        return _from_verl(shards, wanted, dtype, most, note)
    policy = folder / "policy" if (folder / "policy").is_dir() else folder
    adapter = folder / "adapter" if policy is not folder else folder
    if wanted.lora == "keep":
        if not (adapter / lora.CONFIG_FILE).is_file():
            raise ConfigError(
                f"lora=keep: {folder} has no adapter; it was not trained with model.lora.rank, so use lora=merge"
            )
        return lambda out: _keep(adapter, policy, out)
    if lora.is_adapter(str(policy)):
        return lambda out: _merge_adapter(policy, dtype, out)
    weights = read_lazy_weights(policy)

    def make(out: Path) -> None:
        copy_model_files(policy, out, dtype)
        write_weights(weights, out, dtype, most, note)

    return make


def _keep(adapter: Path, policy: Path, out: Path) -> None:
    """The adapter in peft's format, with the tokenizer beside it."""
    for name in (lora.CONFIG_FILE, lora.WEIGHTS_FILE):
        shutil.copyfile(adapter / name, out / name)
    for file in policy.glob("*token*"):
        shutil.copyfile(file, out / file.name)
    if (template := policy / "chat_template.jinja").is_file():
        shutil.copyfile(template, out / template.name)


def _merge_adapter(folder: Path, dtype: torch.dtype | None, out: Path) -> None:
    loaded = load(ModelConfig(path=str(folder), dtype="float32"), torch.device("cpu"))
    loaded.model.to(dtype or torch.float32)
    save(loaded, out)


# ---- verl


def _from_verl(
    folder: Path, wanted: Wanted, dtype: torch.dtype | None, most: int, note: Callable[[str], None]
) -> Callable[[Path], None]:
    beside = folder / "huggingface"
    if not (beside / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no huggingface/config.json; put the model's configuration and tokenizer there"
        )
    note(f"verl's shards in {folder}: {len(verl.shard_files(folder))} ranks")
    weights, adapters = split_adapters(verl.merged(folder))
    if wanted.lora == "keep":
        if not (kept := folder / "lora_adapter").is_dir():
            raise ConfigError(f"lora=keep: {folder} has no lora_adapter/; use lora=merge")
        return lambda out: _keep(kept, beside, out)
    if adapters:
        weights = with_adapters(weights, adapters, _scale(folder))
    weights = fitting(weights, _expected(beside), folder)

    # verl keeps float32 masters; the configuration it saves says what the model was published in.
    kinds = {weight.dtype for weight in weights.values()}
    written = dtype or (kinds.pop() if len(kinds) == 1 else None)

    def make(out: Path) -> None:
        copy_model_files(beside, out, written)
        write_weights(weights, out, dtype, most, note)

    return make


def split_adapters(
    weights: Mapping[str, LazyTensor],
) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """Weights under the stock model's names, and those of LoRA adapters apart."""
    plain, adapters = {}, {}
    for name, weight in weights.items():
        name = name.removeprefix(lora.FILE_PREFIX)
        (adapters if ".lora_A." in name or ".lora_B." in name else plain)[lora.stock_name(name)] = (
            weight
        )
    return plain, adapters


def with_adapters(
    weights: Mapping[str, LazyTensor], adapters: Mapping[str, LazyTensor], scale: float
) -> dict[str, LazyTensor]:
    """The weights with what the adapters add, computed in float32 when read."""
    out = dict(weights)
    for name, first in adapters.items():
        if ".lora_A." not in name:
            continue
        base, second = (
            name.split(".lora_A.")[0] + ".weight",
            adapters.get(name.replace(".lora_A.", ".lora_B.")),
        )
        if base not in out or second is None:
            raise ConfigError(
                f"the adapter {name} has no {'weight ' + base if base not in out else 'second matrix'} in these shards"
            )
        out[base] = _added(out[base], first, second, scale)
    return out


def _added(base: LazyTensor, first: LazyTensor, second: LazyTensor, scale: float) -> LazyTensor:
    def read() -> Tensor:
        weight = base.read()
        return (weight.float() + scale * (second.read().float() @ first.read().float())).to(
            weight.dtype
        )

    return LazyTensor(base.shape, base.dtype, read)


def _scale(folder: Path) -> float:
    """How often the adapters count, from the file that verl writes beside its shards."""
    for name in ("lora_train_meta.json", f"lora_adapter/{lora.CONFIG_FILE}"):
        if (folder / name).is_file():
            settings: dict[str, Any] = json.loads((folder / name).read_text())
            if settings.get("r") and settings.get("lora_alpha"):
                return float(settings["lora_alpha"]) / float(settings["r"])
    raise ConfigError(
        f"{folder} holds LoRA adapters, but neither lora_train_meta.json nor lora_adapter/ says their alpha and rank"
    )


def _expected(beside: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes of the weights the configuration asks for, and its tied names: copy -> weight."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(beside))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{beside}/config.json does not make a model: {str(error).splitlines()[0][:200]}"
        ) from error
    model.tie_weights()
    by_parameter = {id(p): name for name, p in model.named_parameters()}
    everything = dict(model.named_parameters(remove_duplicate=False))
    tied = {
        name: by_parameter[id(p)] for name, p in everything.items() if by_parameter[id(p)] != name
    }
    return {
        name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied
    }, tied


def fitting(
    weights: Mapping[str, LazyTensor],
    expected: tuple[dict[str, tuple[int, ...]], dict[str, str]],
    folder: Path,
) -> dict[str, LazyTensor]:
    """The weights a stock folder holds, in the model's order; each of the others is named. A tied head must equal what it is tied to."""
    shapes, tied = expected
    out = {name: weights[name] for name in shapes if name in weights}
    for name in weights:
        if name not in shapes and name not in tied:
            raise ConfigError(
                f"{folder}: {name} is not a weight of the model that huggingface/config.json describes"
            )
    for name in tied.keys() & weights.keys():
        other = tied[name]
        if other in weights and not torch.equal(weights[name].read(), weights[other].read()):
            raise ConfigError(
                f"{folder}: the configuration ties {name} to {other}, but they differ; set tie_word_embeddings to false"
            )
        if other not in out:
            out[other] = weights[name]
    if missing := [name for name in shapes if name not in out]:
        raise ConfigError(
            f"{folder} lacks {len(missing)} weights of the model, the first: {missing[0]}"
        )
    for name, weight in out.items():
        if weight.shape != shapes[name]:
            raise ConfigError(
                f"{folder}: {name} is {weight.shape}, the configuration says {shapes[name]}"
            )
    return {name: out[name] for name in shapes}
