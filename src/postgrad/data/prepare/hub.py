"""Files of a data set from the Hugging Face hub, or from its cache when there is no network."""

from fnmatch import fnmatchcase
from pathlib import Path

from postgrad.data.readers import extension, one_line
from postgrad.errors import ConfigError


def fetch(repo: str, patterns: tuple[str, ...], revision: str = "") -> tuple[Path, list[Path], str]:
    """Download the files of a repository that match, or find them in the cache.

    Returns:
        (folder, files in it by name, the commit they are of).

    Raises:
        ConfigError: no such repository, no access, no network and nothing in the cache, or no file that matches.
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
            f"from=hub needs the package huggingface_hub ({one_line(error)}); pip install huggingface_hub, or give from=FOLDER"
        ) from error
    try:
        found = snapshot_download(
            repo, repo_type="dataset", revision=revision or None, allow_patterns=list(patterns)
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"{repo} is gated: accept its terms on huggingface.co/datasets/{repo} and set HF_TOKEN, or give from=FOLDER"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"{repo} has no revision {revision}; leave revision= out for the newest"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{repo}: no such data set on the hub, or it is private; check repo= or set HF_TOKEN"
        ) from error
    except (
        OSError,
        ValueError,
        HfHubHTTPError,
    ) as error:  # its many errors of the network are of these kinds
        raise ConfigError(
            f"{repo} cannot be reached and is not in the cache ({one_line(error)[:120]}); connect, set HF_ENDPOINT to a mirror, "
            "or download its files elsewhere and give from=FOLDER"
        ) from error
    folder = Path(found)
    files = matching(folder, patterns)
    if not files:
        there = (
            ", ".join(path.relative_to(folder).as_posix() for path in data_files(folder)[:6])
            or "none"
        )
        raise ConfigError(
            f"{repo} has no file like {' or '.join(patterns)} (data files there: {there}); name one with files=PATTERN"
        )
    return folder, files, folder.name


def data_files(folder: Path) -> list[Path]:
    """All data files below a folder, by name."""
    found = (path for path in folder.rglob("*") if path.is_file() and extension(path))
    return sorted(
        path
        for path in found
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The data files whose path below the folder fits the first pattern that any file fits."""
    files = data_files(folder)
    for pattern in patterns:
        if fitting := [
            path for path in files if fnmatchcase(path.relative_to(folder).as_posix(), pattern)
        ]:
            return fitting
    return []
