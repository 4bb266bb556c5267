"""The score head of a reward model's files: one vector, which critics and reward models start from.

transformers drops it when it reads such a folder as a language model.
"""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from postgrad.config.schema import ModelConfig
from postgrad.model.load import resolve_path

SCORE = "score.weight"  # the head's name in transformers' classifiers
BIAS = "score.bias"


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


def _local_folder(path: str) -> Path:
    if Path(path).exists():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:  # its files are not in the hub's cache
        return Path(path)
