"""Data sets of the Hugging Face hub by name: `hub:OWNER/NAME[:SPLIT[:COLUMN=COLUMN]...]`.

SPLIT may be FOLDER/SPLIT, for a data set that has the split in several folders.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from postgrad.data.rows.files import extension
from postgrad.errors import (
    Missing,
    NotInstalled,
    UnknownName,
    Unreachable,
    WrongValue,
    did_you_mean,
    first_line,
)

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
        raise WrongValue(f"data source {source!r} names no data set; type for example {EXAMPLE}")
    split = rest[0] if rest and "=" not in rest[0] else "train"
    columns = _read_columns(source, rest[1:] if rest and "=" not in rest[0] else rest)
    folder, _, _ = fetch(repo, PATTERNS, instead="name their folder instead of hub:")
    files = _split_files(folder, split)
    folders = sorted({file.parent.relative_to(folder).as_posix() for file in files})
    if len(folders) > 1:
        raise Missing(
            f"{repo} has files of the split {split} in {', '.join(folders)}; choose one, "
            f"for example {repo}:{folders[0]}/{split}"
        )
    if not files:
        names = [path.relative_to(folder).as_posix() for path in data_files(folder)]
        words = {word for name in names for word in _words(name)}
        raise UnknownName(
            f"{repo} has no files of the split {split}; {did_you_mean(split, words)} "
            f"Its files: {', '.join(names[:6])}"
        )
    return repo, files, columns


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a data set's name on the hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None


def hub_source(text: str, splits: Sequence[str]) -> str:
    """Return the source `hub:...` of `OWNER/NAME[:SPLIT[:COLUMN=COLUMN]]`.

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
            raise WrongValue(
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


# ---- files of a repository, and of a folder


def fetch(
    repo: str, patterns: tuple[str, ...], revision: str = "", instead: str = "give from=FOLDER"
) -> tuple[Path, list[Path], str]:
    """Download the files of a repository that match, or find them in the cache.

    Args:
        repo: name of the data set on the hub.
        patterns: patterns of file paths; the first that matches any file is used.
        revision: a commit or branch; "" for the newest.
        instead: what errors advise for files that are on the disk.

    Returns:
        (folder, its matching files in order of their names, commit).

    Raises:
        ConfigError: no such repository, no access, no network and nothing in the cache, or no
            matching file.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise NotInstalled(
            f"the hub needs the package huggingface_hub ({first_line(error)}); "
            f"pip install huggingface_hub, or {instead}",
            at="huggingface_hub",
        ) from error
    try:
        downloaded = snapshot_download(
            repo, repo_type="dataset", revision=revision or None, allow_patterns=list(patterns)
        )
    except GatedRepoError as error:
        raise Unreachable(
            f"{repo} is gated; accept its terms on huggingface.co/datasets/{repo} "
            f"and set HF_TOKEN, or {instead}"
        ) from error
    except RevisionNotFoundError as error:
        raise UnknownName(
            f"{repo} has no revision {revision}; remove revision= for the newest", at="revision"
        ) from error
    except RepositoryNotFoundError as error:
        raise Unreachable(
            f"{repo}: no such data set on the hub, or it is private; check repo= or set HF_TOKEN"
        ) from error
    except (OSError, ValueError, HfHubHTTPError) as error:  # all network errors are one of these
        reason = first_line(error, max_chars=120)
        raise Unreachable(
            f"{repo} cannot be reached and is not in the cache ({reason}); "
            "connect, set HF_ENDPOINT to a mirror, or download its files on another machine "
            f"and {instead}"
        ) from error
    folder = Path(downloaded)
    files = matching_files(folder, patterns)
    if not files:
        names = [path.relative_to(folder).as_posix() for path in data_files(folder)[:6]]
        raise UnknownName(
            f"{repo} has no file like {' or '.join(patterns)} "
            f"(its data files: {', '.join(names) or 'none'}); name one with files=PATTERN"
        )
    return folder, files, folder.name


def data_files(folder: Path) -> list[Path]:
    """All data files below a folder in order of their names, without hidden ones."""
    files: list[Path] = []
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and extension(path) and not is_hidden:
            files.append(path)
    return sorted(files)


def matching_files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return the data files below a folder that match the first pattern that any file matches."""
    files = data_files(folder)
    for pattern in patterns:
        matches = [
            path for path in files if fnmatchcase(path.relative_to(folder).as_posix(), pattern)
        ]
        if matches:
            return matches
    return []
