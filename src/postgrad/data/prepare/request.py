"""The arguments of `postgrad data prepare`, checked, and the files they name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from postgrad.data.encode.styles import Style, find_style
from postgrad.data.prepare.base import DataSet
from postgrad.data.prepare.catalog import COMMON, find_set
from postgrad.data.rows.files import exists, missing_file_message, split_columns
from postgrad.data.sources.hub import data_files, fetch, matching_files
from postgrad.errors import Conflict, Missing, UnknownName, Unreadable, did_you_mean


@dataclass(frozen=True)
class PrepareRequest:
    """What to prepare; every field is checked.

    Attributes:
        name: name of the data set.
        data_set: its entry in the catalog.
        split: the split to prepare.
        style_name: name of the prompt style.
        style: the prompt style.
        options: all options with their values.
        count_tokens: counts the tokens of a text, if a tokenizer was given.
        columns: new names of the files' columns by their old ones.
    """

    name: str
    data_set: DataSet
    split: str
    style_name: str
    style: Style
    options: dict[str, Any]
    count_tokens: Callable[[str], int] | None = None
    columns: dict[str, str] = field(default_factory=dict)


def parse_request(
    name: str, overrides: dict[str, str], count_tokens: Callable[[str], int] | None = None
) -> PrepareRequest:
    """Check the name of the data set, its split, its style and every option.

    Raises:
        ConfigError: names the wrong argument and the closest valid one.
    """
    data_set = find_set(name)
    known = COMMON | data_set.options
    options: dict[str, Any] = {key: option.default for key, option in known.items()}
    for key, value in overrides.items():
        if key not in known:
            candidates = [*known, "from", "out", "tokenizer"]
            raise UnknownName(
                f"{name} has no option {key}; {did_you_mean(key, candidates)}", at=key
            )
        options[key] = known[key].read(key, value)
    split = options.pop("split") or next(iter(data_set.splits))
    style_name = options.pop("style") or data_set.style
    if split not in data_set.splits and data_set.repo:
        raise UnknownName(
            f"{name} has no split {split}; {did_you_mean(split, data_set.splits)}", at="split"
        )
    style = find_style(style_name, "style")
    return PrepareRequest(name.lower(), data_set, split, style_name, style, options, count_tokens)


def source_columns(source: str) -> tuple[str, dict[str, str]]:
    """Return (the files of `from=`, new names of their columns by their old ones).

    Raises ConfigError if the columns of one file are renamed in another way than those of another.
    """
    parts = [split_columns(part) for part in _parts(source)]
    columns = parts[0][1]
    if any(others != columns for _, others in parts):
        raise Conflict("from=: rename the same columns (FILE:COLUMN=NEW_NAME) of every file")
    return ",".join(name for name, _ in parts), columns


def _parts(source: str) -> list[str]:
    if exists(Path(source).expanduser()):  # an existing path may hold a comma
        return [source]
    return [part.strip() for part in source.split(",")]


def find_files(
    request: PrepareRequest, source: str, patterns: str = "", repo: str = "", revision: str = ""
) -> tuple[list[tuple[str, Path]], str]:
    """(files to read as (name, path), commit on the hub or "").

    Args:
        request: what to prepare.
        source: `hub`, a folder, or files separated by commas.
        patterns: patterns of files in the folder or repository, separated by commas; default: the
            data set's own.
        repo: a repository on the hub; default: the data set's own.
        revision: a commit on the hub; default: the newest.

    Raises:
        ConfigError: a file or folder does not exist, or no file matches.
    """
    chosen_patterns = request.data_set.splits.get(request.split, ())
    if patterns:
        chosen_patterns = tuple(patterns.split(","))
    if source == "hub":
        repo = repo or request.data_set.repo
        if not repo:
            raise Missing(
                f"{request.name} is not on the hub; give from=FILE or from=FOLDER", at="from"
            )
        folder, paths, commit = fetch(repo, chosen_patterns, revision)
        return [(path.relative_to(folder).as_posix(), path) for path in paths], commit
    files: list[tuple[str, Path]] = []
    for part in _parts(source):
        path = Path(part).expanduser()
        if not exists(path):
            raise Unreadable(missing_file_message(path))
        if path.is_dir():
            files += _find_in_folder(request, path, chosen_patterns, exact=bool(patterns))
        else:
            files.append((path.name, path))
    return files, ""


def _find_in_folder(
    request: PrepareRequest, folder: Path, patterns: tuple[str, ...], exact: bool
) -> list[tuple[str, Path]]:
    """Return the data set's files in a folder.

    Tries in this order: the patterns, names with the data set, names with the split, all files.
    `exact` tries the patterns only.
    """
    files = matching_files(folder, patterns)
    if not files and not exact:
        files = _find_by_name(request, folder)
    if not files:
        names = ", ".join(path.name for path in data_files(folder)[:6]) or "none"
        raise Unreadable(
            f"{folder}: no file of {request.name} (its data files: {names}); give from=FILE"
        )
    return [(path.relative_to(folder).as_posix(), path) for path in files]


def _find_by_name(request: PrepareRequest, folder: Path) -> list[Path]:
    set_patterns = request.data_set.local or (f"*{request.name}*",)
    for pattern in (*set_patterns, f"*{request.split}*", "*"):
        matches = [path for path in data_files(folder) if fnmatchcase(path.name.lower(), pattern)]
        of_split = [path for path in matches if request.split in path.name.lower()]
        if of_split or matches:
            return of_split or matches
    return []
