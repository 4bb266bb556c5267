"""Which model is meant: a run folder, a checkpoint, a model folder, a GGUF file, a hub id, tiny or smollm2."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from postgrad.errors import ConfigError
from postgrad.model.load import resolve_path
from postgrad.training import checkpoint

SAMPLE = 1 << 16  # bytes looked at, at each of
PLACES = 16  # so many places of a weight file


@dataclass(frozen=True)
class Target:
    """A model to evaluate. `run` is the folder of the run it comes from, `config` that run's configuration."""

    path: str
    label: str
    run: Path | None = None
    config: dict[str, Any] | None = None


def find_model(text: str) -> Target:
    """The model a word names; of a run folder its newest checkpoint, of checkpoints/best or /latest the one it points at.

    Raises:
        ConfigError: a run folder without a checkpoint.
    """
    path = Path(text).expanduser()
    if path.is_file() and path.name in ("latest", "best") and path.parent.name == "checkpoints":
        path = path.parent / path.read_text().strip()
    if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
        found = checkpoint.latest(path)
        if found is None:
            raise ConfigError(
                f"{path} is a run without a checkpoint; train it first, or evaluate the model it starts from"
            )
        return _of_checkpoint(found)
    if (path / "state.json").is_file() and (path / "policy").is_dir():
        return _of_checkpoint(path)
    if path.name == "policy" and (path.parent / "state.json").is_file():
        return _of_checkpoint(path.parent)
    return Target(text, Path(text).stem if text.endswith(".gguf") else Path(text).name or text)


def _of_checkpoint(folder: Path) -> Target:
    folder = folder.absolute()
    run = folder.parent.parent
    file = run / "config.yaml"
    if not file.is_file():
        return Target(f"{folder}/policy", folder.name)
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(file))
    except (OmegaConfBaseException, YAMLError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())[:200]}") from error
    return Target(f"{folder}/policy", f"{run.name}-{folder.name}", run, config)


def weights_fingerprint(path: str, seed: int) -> str:
    """A hash that tells weights apart: names and sizes of the files, and bytes from places all over them. "" for a hub id.

    Training changes every number of a model a little, so a sample of the bytes is enough, and costs no time.
    """
    place = Path(resolve_path(path, seed))
    files = (
        [place]
        if place.is_file()
        else sorted(p for p in place.glob("*") if p.suffix in (".safetensors", ".bin", ".gguf"))
    )
    if not files:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            for i in range(PLACES):
                stream.seek(max(0, (size - SAMPLE) * i // (PLACES - 1)))
                digest.update(stream.read(SAMPLE))
    return digest.hexdigest()
