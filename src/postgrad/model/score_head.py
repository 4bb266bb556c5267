"""The score head of a reward model's files: one vector, which critics and reward models start from.

transformers drops it when it reads such a folder as a language model. The value head of a critic
that training saved is in a file of its own.
"""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from postgrad.config.schema import ModelConfig
from postgrad.model.load.load import resolve_path

SCORE = "score.weight"  # the head's name in transformers' classifiers
BIAS = "score.bias"
VALUE_HEAD = "value_head.safetensors"  # with the tensors weight and bias


def read_score_head(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of the score head at config.path by name; {} if there is none.

    A hub id is read from the download of a model that was loaded before.
    """
    folder = _local_folder(resolve_path(config.path, seed))
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        opened: Any
        with safe_open(file, framework="pt") as opened:
            for name in {SCORE, BIAS}.intersection(opened.keys()):
                tensors[name] = opened.get_tensor(name)
    return tensors


def read_value_head(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return the weight, and the bias if there is one, that a critic at config.path starts from.

    They are those of a saved critic, or the score head of a reward model; {} for another model.
    """
    file = _local_folder(resolve_path(config.path, seed)) / VALUE_HEAD
    if file.is_file():
        return load_file(file)
    scores = read_score_head(config, seed)
    return {name.removeprefix("score."): tensor for name, tensor in scores.items()}


def _local_folder(path: str) -> Path:
    if Path(path).exists():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:  # its files are not in the hub's cache
        return Path(path)
