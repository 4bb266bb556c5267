"""Data sets of the Hugging Face hub by name: `hub:OWNER/NAME[:SPLIT[:COLUMN=COLUMN]...]`.

SPLIT may be FOLDER/SPLIT, for a data set that has the split in several folders.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from postgrad.data.prepare.hub import data_files, fetch
from postgrad.errors import ConfigError, did_you_mean

EXAMPLE = "hub:openai/gsm8k:main/train:question=prompt"
PATTERNS = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv")


def hub_files(source: str) -> tuple[str, list[Path], dict[str, str]]:
    """(name of the data set, files of the split, new names of columns by their old ones).

    The files of a split are those whose path has the split's name as a word of its own, such as
    train-00000-of-00002.parquet or data/train.jsonl. Parquet files are preferred.

    Raises:
        ConfigError: the source is malformed, the hub has no such data set or split, or several
            folders have it.
    """
    _, repo, *rest = source.split(":")
    if not is_hub_id(repo):
        raise ConfigError(f"data source {source!r} names no data set; type for example {EXAMPLE}")
    split = rest[0] if rest and "=" not in rest[0] else "train"
    columns = _read_columns(source, rest[1:] if rest and "=" not in rest[0] else rest)
    folder, _, _ = fetch(repo, PATTERNS, instead="name their folder instead of hub:")
    files = _split_files(folder, split)
    folders = sorted({file.parent.relative_to(folder).as_posix() for file in files})
    if len(folders) > 1:
        raise ConfigError(
            f"{repo} has files of the split {split} in {', '.join(folders)}; choose one, "
            f"for example {repo}:{folders[0]}/{split}"
        )
    if not files:
        names = [path.relative_to(folder).as_posix() for path in data_files(folder)]
        words = {word for name in names for word in _words(name)}
        raise ConfigError(
            f"{repo} has no files of the split {split}; {did_you_mean(split, words)} "
            f"Its files: {', '.join(names[:6])}"
        )
    return repo, files, columns


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a data set's name on the hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None


def hub_source(text: str, splits: Sequence[str]) -> str:
    """The source `hub:...` of `OWNER/NAME[:SPLIT[:COLUMN=COLUMN]]`.

    Without a split it is the first of `splits` that the data set has.
    """
    repo, _, rest = text.partition(":")
    if rest and "=" not in rest.split(":")[0]:
        return f"hub:{text}"
    folder, _, _ = fetch(repo, PATTERNS)
    split = next((split for split in splits if _split_files(folder, split)), splits[0])
    return ":".join(part for part in ("hub", repo, split, rest) if part)


def _read_columns(source: str, parts: list[str]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for part in parts:
        old, equals, new = part.partition("=")
        if not equals or not old or not new:
            raise ConfigError(
                f"data source {source!r} is not hub:OWNER/NAME:SPLIT:COLUMN=NEW_NAME; "
                f"type for example {EXAMPLE}"
            )
        columns[old] = new
    return columns


def _split_files(folder: Path, split: str) -> list[Path]:
    parent, _, name = split.rpartition("/")
    matching = [
        path
        for path in data_files(folder / parent)
        if name in _words(path.relative_to(folder / parent).as_posix())
    ]
    parquet = [path for path in matching if path.suffix == ".parquet"]
    return parquet or matching


def _words(path: str) -> list[str]:
    return re.split(r"[/._-]+", path)
