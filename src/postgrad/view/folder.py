"""The one folder the page may read: what lies in it, and a door that nothing outside passes."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from postgrad.errors import ConfigError

DEPTH = 5  # how far below the given folder runs and evaluations are looked for
MOST_FOLDERS = 20_000
SKIPPED = {"rollouts", "checkpoints"}
RESCAN_S = 2.0


class NotFound(Exception):
    """A name that is not there, or that leads out of the folder; the page answers 404 to both alike."""


@dataclass
class Found:
    """Folders below the root by what they hold, as relative names."""

    runs: list[str] = field(default_factory=list)
    evaluations: list[str] = field(default_factory=list)
    entropies: list[str] = field(default_factory=list)  # files


class Folder:
    """Everything below `root`. Links that lead out of it are as if they were not there."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ConfigError(
                f"no folder {root}; give the folder that holds the runs: postgrad view RUNS"
            )
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._found, self._looked = Found(), 0.0

    def inside(self, name: str) -> Path:
        """The real path of a name below the root.

        Raises:
            Outside: the name is absolute, climbs, is a link to elsewhere, or is not there.
        """
        if "\0" in name or "\\" in name or name.startswith(("/", "~")) or ".." in name.split("/"):
            raise NotFound(name)
        return self.checked(self.root / name)

    def checked(self, path: Path) -> Path:
        """The same for a path that was put together here: a link in it may still lead out."""
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise NotFound(str(path)) from error
        if not real.is_relative_to(self.root):
            raise NotFound(str(path))
        return real

    def found(self) -> Found:
        """Runs and evaluations; the tree is walked again when the last walk is old."""
        with self._lock:
            if time.monotonic() - self._looked > RESCAN_S:
                self._found, self._looked = self._walk(), time.monotonic()
            return self._found

    def _walk(self) -> Found:
        out = Found()
        for path, files, folders in walk(self.root, DEPTH):
            name = path.relative_to(self.root).as_posix()
            if "metrics.jsonl" in files or ("config.yaml" in files and "checkpoints" in folders):
                out.runs.append(name)
            if "summary.json" in files or (
                "settings.json" in files and any(file.endswith(".jsonl") for file in files)
            ):
                out.evaluations.append(name)
            if "entropy.json" in files:
                out.entropies.append(f"{name}/entropy.json" if name != "." else "entropy.json")
        return out


def walk(root: Path, depth: int) -> Iterator[tuple[Path, set[str], set[str]]]:
    """(folder, file names, folder names), top down, without following links to folders."""
    waiting = [(root, 0)]
    for _ in range(MOST_FOLDERS):
        if not waiting:
            return
        path, level = waiting.pop(0)
        try:
            entries = list(os.scandir(path))
        except OSError:
            continue
        folders = {e.name for e in entries if e.is_dir(follow_symlinks=False)}
        yield path, {e.name for e in entries if e.is_file()}, folders
        if level < depth:
            waiting += [
                (path / name, level + 1)
                for name in sorted(folders - SKIPPED)
                if not name.startswith(".")
            ]
