"""Finds a model: run folder, checkpoint, model folder, GGUF file, hub id, tiny or smollm2."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.config.stored import CONFIG_FILE, read_stored_config
from postgrad.errors import Missing
from postgrad.files import sample_files
from postgrad.model.load.load import resolve_path
from postgrad.training import checkpoint

SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 16  # per file
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
# Beside the weights: the configuration, the tokenizer and the chat template.
MODEL_SUFFIXES = (*WEIGHT_SUFFIXES, ".json", ".jinja", ".model", ".txt")


@dataclass(frozen=True)
class Target:
    """A model to evaluate. `run` is its run folder, `config` that run's configuration."""

    path: str
    label: str
    run: Path | None = None
    config: dict[str, Any] | None = None


def find_model(text: str) -> Target:
    """Return the model that a command-line argument names.

    A run folder means its latest checkpoint; checkpoints/best and checkpoints/latest mean the
    checkpoint they point to.

    Raises:
        ConfigError: a run folder without a checkpoint.
    """
    path = Path(text).expanduser()
    if path.is_file() and path.name in ("latest", "best") and path.parent.name == "checkpoints":
        path = path.parent / path.read_text().strip()
    if (path / CONFIG_FILE).is_file() and (path / "checkpoints").is_dir():
        latest = checkpoint.latest(path)
        if latest is None:
            raise Missing(
                f"{path} is a run without a checkpoint; train it first, "
                "or give the model it starts from"
            )
        return _checkpoint_target(latest)
    if (path / "state.json").is_file() and (path / "policy").is_dir():
        return _checkpoint_target(path)
    if path.name == "policy" and (path.parent / "state.json").is_file():
        return _checkpoint_target(path.parent)
    if text.endswith(".gguf"):
        return Target(text, Path(text).stem)
    return Target(text, Path(text).name or text)


def _checkpoint_target(folder: Path) -> Target:
    folder = folder.absolute()
    run = folder.parent.parent
    if not (run / CONFIG_FILE).is_file():
        return Target(f"{folder}/policy", folder.name)
    config = read_stored_config(run)
    return Target(f"{folder}/policy", f"{run.name}-{folder.name}", run, config)


def weights_fingerprint(path: str, seed: int) -> str:
    """Return `folder_fingerprint` of the model at a path or name; "" for a hub id."""
    return folder_fingerprint(Path(resolve_path(path, seed)))


def folder_fingerprint(folder: Path) -> str:
    """Return a hash of a model folder or GGUF file; "" if there is none.

    It covers names, sizes and samples of the bytes of the weights, the configuration, the tokenizer
    and the chat template. Training changes every weight a little, so samples are enough, and they
    are fast to read.
    """
    files = sorted(file for file in folder.glob("*") if file.suffix in MODEL_SUFFIXES)
    if folder.is_file():
        files = [folder]
    if not any(file.suffix in WEIGHT_SUFFIXES for file in files):
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for sample in sample_files(files, NUM_SAMPLES, SAMPLE_BYTES):
        digest.update(sample)
    return digest.hexdigest()
