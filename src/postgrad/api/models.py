"""Models in memory: a transformers model and its tokenizer become a model folder."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from postgrad.errors import Conflict, Missing, Unsupported, WrongValue
from postgrad.model.load.formats import Loaded

SAMPLED_VALUES = 4096  # of each parameter, for the fingerprint
HINT = "give a path, a hub id, or model=(model, tokenizer)"


def as_model(model: Any, tokenizer: Any = None) -> str | Loaded:
    """Return a model's path or hub id as text, or a model in memory with its tokenizer.

    Raises ConfigError for anything else.
    """
    if isinstance(model, tuple) and len(model) == 2:
        model, tokenizer = model
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise Conflict(
                f"model={model} brings its own tokenizer; tokenizer= is for a model in memory"
            )
        return str(model)
    if not hasattr(model, "save_pretrained") or not hasattr(model, "named_parameters"):
        raise WrongValue(f"model is {type(model).__name__}; {HINT}", at="model")
    if hasattr(model, "peft_config"):
        raise Unsupported(
            "model has PEFT adapters; give model.merge_and_unload(), and lora_rank=N to train "
            "new adapters",
            at="model",
        )
    if tokenizer is None or not hasattr(tokenizer, "save_pretrained"):
        raise Missing(f"a model in memory needs its tokenizer; {HINT}", at="tokenizer")
    return Loaded(model, tokenizer)


def fingerprint(loaded: Loaded) -> str:
    """Return 16 hex digits of the names, shapes and samples of all weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in loaded.model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // SAMPLED_VALUES)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def save_once(loaded: Loaded, folder: Path) -> None:
    """Write the model as a stock Hugging Face folder unless the folder exists."""
    from postgrad.files import create_folder_once
    from postgrad.model.load.load import save

    folder.parent.mkdir(parents=True, exist_ok=True)
    create_folder_once(folder, lambda new_folder: save(loaded, new_folder))


@contextmanager
def model_path(model: str | Loaded) -> Iterator[str]:
    """Yield a path for the model; the folder of a model in memory is removed at the end.

    The folder is named after the weights, so that an evaluation of the same weights has the same
    settings.
    """
    if isinstance(model, str):
        yield model
        return
    from postgrad.model.load.load import cache_folder

    folder = cache_folder() / "memory" / fingerprint(model)
    save_once(model, folder)
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
