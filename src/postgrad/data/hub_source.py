"""Data sets of the Hugging Face hub by name: `hub:OWNER/NAME[:SPLIT[:COLUMN=COLUMN]...]`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from postgrad.data.prepare.hub import data_files, fetch
from postgrad.data.rows import RowError
from postgrad.errors import ConfigError, did_you_mean

EXAMPLE = "hub:openai/gsm8k:train:question=prompt"


def hub_files(source: str) -> tuple[str, list[Path], dict[str, str]]:
    """(name of the data set, files of the split, new names of columns by their old ones).

    The files of a split are those whose path has the split's name as a word of its own, such as
    train-00000-of-00002.parquet or data/train.jsonl. Parquet files are preferred.

    Raises:
        ConfigError: the source is malformed, or the hub has no such data set or split.
    """
    _, repo, *rest = source.split(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ConfigError(f"data source {source!r} names no data set; type for example {EXAMPLE}")
    split = rest[0] if rest and "=" not in rest[0] else "train"
    columns = _read_columns(source, rest[1:] if rest and "=" not in rest[0] else rest)
    folder, _, _ = fetch(repo, ("*.parquet", "*.jsonl", "*.json", "*.csv"))
    files = _split_files(folder, split)
    if not files:
        names = [path.relative_to(folder).as_posix() for path in data_files(folder)]
        words = {word for name in names for word in _words(name)}
        raise ConfigError(
            f"{repo} has no files of the split {split}; {did_you_mean(split, words)} "
            f"Its files: {', '.join(names[:6])}"
        )
    return repo, files, columns


def rename_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with renamed columns. Raises RowError if one does not exist."""
    for name in columns:
        if name not in row:
            raise RowError(f"there is no column {name}; {did_you_mean(name, row)}")
    return {columns.get(name, name): value for name, value in row.items()}


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
    matching = [
        path for path in data_files(folder) if split in _words(path.relative_to(folder).as_posix())
    ]
    parquet = [path for path in matching if path.suffix == ".parquet"]
    return parquet or matching


def _words(path: str) -> list[str]:
    return re.split(r"[/._-]+", path)
