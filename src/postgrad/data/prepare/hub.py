"""Downloads data set files from the Hugging Face hub, or finds them in its cache."""

from fnmatch import fnmatchcase
from pathlib import Path

from postgrad.data.rows.files import extension
from postgrad.errors import ConfigError, first_line


def fetch(
    repo: str, patterns: tuple[str, ...], revision: str = "", instead: str = "give from=FOLDER"
) -> tuple[Path, list[Path], str]:
    """Downloads the files of a repository that match, or finds them in the cache.

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
        raise ConfigError(
            f"the hub needs the package huggingface_hub ({first_line(error)}); "
            f"pip install huggingface_hub, or {instead}"
        ) from error
    try:
        downloaded = snapshot_download(
            repo, repo_type="dataset", revision=revision or None, allow_patterns=list(patterns)
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"{repo} is gated; accept its terms on huggingface.co/datasets/{repo} "
            f"and set HF_TOKEN, or {instead}"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"{repo} has no revision {revision}; remove revision= for the newest"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{repo}: no such data set on the hub, or it is private; check repo= or set HF_TOKEN"
        ) from error
    except (OSError, ValueError, HfHubHTTPError) as error:  # all network errors are one of these
        reason = first_line(error, max_chars=120)
        raise ConfigError(
            f"{repo} cannot be reached and is not in the cache ({reason}); "
            "connect, set HF_ENDPOINT to a mirror, or download its files on another machine "
            f"and {instead}"
        ) from error
    folder = Path(downloaded)
    files = matching_files(folder, patterns)
    if not files:
        names = [path.relative_to(folder).as_posix() for path in data_files(folder)[:6]]
        raise ConfigError(
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
    """The data files below a folder that match the first pattern that any file matches."""
    files = data_files(folder)
    for pattern in patterns:
        matches = [
            path for path in files if fnmatchcase(path.relative_to(folder).as_posix(), pattern)
        ]
        if matches:
            return matches
    return []
