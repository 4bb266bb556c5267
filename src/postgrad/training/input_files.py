"""inputs.json of a run folder: hashes of the user's files and of the model that the settings name.

The settings of a resumed run hold names of files only. The hashes tell whether a reward function,
a method, a data file or the model folder was changed since the run began.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from postgrad.config.schema import Config
from postgrad.data.rows.files import READERS, data_files, exists
from postgrad.errors import RunError
from postgrad.files import atomic_write_text, sample_files
from postgrad.training.result import Result

FILE = "inputs.json"
ENDINGS = (".py", ".txt", ".md", *READERS)
SAMPLED_BYTES = 1 << 20  # of each end of a model's file, which may be too large to read
# What separates names within a setting: a command, a sum of verifiers, a list, NAME=FILE.
SEPARATORS = re.compile(r"[\s,*+=()\[\]]+")


def record(folder: Path, config: Config) -> None:
    """Write the hashes of a run's files, unless the run has recorded them or there are none.

    Raises RunError if they cannot be written.
    """
    file = folder / FILE
    hashes = {} if file.exists() else _hashes(config)
    if not hashes:
        return
    try:
        atomic_write_text(file, json.dumps(hashes, indent=1) + "\n")
    except OSError as error:
        raise RunError(f"{file} could not be written: {error.strerror}") from error


def changed(folder: Path, config: Config) -> list[str]:
    """Return the names of the files whose content differs from that at the start of the run."""
    try:
        before = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):  # a run of an older version has none
        return []
    now = _hashes(config)
    return [name for name in before if name in now and now[name] != before[name]]


def untrained_note(config: Config, result: Result) -> str:
    """Return the line about a call that found a run whose steps were finished.

    It says what changed, and what to do.
    """
    files = changed(result.folder, config)
    reason = f" ({', '.join(files)} changed since then)" if files else ""
    setting, value = "training.steps", f"{result.step}"
    if result.step < result.num_steps and config.training.stop_at is not None:
        setting, value = "training.stop_at", f"{config.training.stop_at:g}"
    return (
        f"nothing was trained now{reason}; for a new run add name=NEW, for more steps set "
        f"{setting} above {value}"
    )


def _hashes(config: Config) -> dict[str, str]:
    """Return the hash of each file that a setting names, by its name in the setting.

    The model folder has one hash, by its path.
    """
    settings = dataclasses.asdict(config)
    del settings["model"]
    names = names_in(settings)
    for text in _texts(settings["data"]):
        for word in SEPARATORS.split(text):
            path = Path(word).expanduser()
            if word and exists(path) and path.is_dir():
                names += [str(Path(word) / file.name) for file in sorted(path.iterdir())]
            elif word and not exists(path):  # FOLDER/train: the files of a split
                names += [str(Path(word).parent / file.name) for file in data_files(path)]
    hashes = hash_files(names)
    model = Path(config.model.path).expanduser()
    if exists(model) and model.is_dir():
        hashes[config.model.path] = _model_hash(model)
    return hashes


def names_in(settings: Any) -> list[str]:
    """Return the words of nested settings as names of files; most of them name none."""
    names: list[str] = []
    for text in _texts(settings):
        names += map(_file_name, SEPARATORS.split(text))
    return names


def hash_files(names: Iterable[str]) -> dict[str, str]:
    """Return the hash of each of these files of code, text or data that exists."""
    hashes: dict[str, str] = {}
    for name in names:
        if name.endswith(ENDINGS) and Path(name).expanduser().is_file():
            with Path(name).expanduser().open("rb") as file:
                hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _model_hash(folder: Path) -> str:
    """Return a hash of the sizes and of both ends of a model folder's files."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    digest = hashlib.sha256()
    for sample in sample_files(files, 2, SAMPLED_BYTES):
        digest.update(sample)
    return digest.hexdigest()


def _file_name(word: str) -> str:
    """Return the file that a word of a setting names: FILE, FILE:COLUMN, FILE:NAME, MODULE:NAME."""
    name, _, attribute = word.partition(":")
    if not attribute:
        return word
    return name if name.endswith(ENDINGS) else name.replace(".", "/") + ".py"


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of nested settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
