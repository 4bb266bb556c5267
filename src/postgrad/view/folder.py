"""The one folder that the page may read: what it holds, and paths that cannot leave it."""

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from postgrad.data.rollout_folder import PICTURES
from postgrad.errors import Unreadable
from postgrad.pictures import FIRST_BYTES, Picture, PictureError, read_regular_file

MAX_DEPTH = 5  # levels below the folder that are searched for runs and evaluations
MAX_FOLDERS = 20_000
SKIPPED = {"rollouts", "checkpoints", PICTURES}
RESCAN_S = 2.0
KEY = re.compile("[0-9a-f]{16}")  # of a picture


class NotFound(Exception):
    """A name that does not exist or leads out of the folder; the server answers 404 to both."""


@dataclass
class FolderContents:
    """Names relative to the root, by what they hold."""

    runs: list[str] = field(default_factory=list)
    evaluations: list[str] = field(default_factory=list)
    entropies: list[str] = field(default_factory=list)  # files


class Folder:
    """Everything below `root`. Links that lead out of it are treated as missing."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise Unreadable(
                f"no folder {root}; give the folder that holds the runs: postgrad view RUNS"
            )
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._contents = FolderContents()
        self._scanned_at = 0.0

    def resolve(self, name: str) -> Path:
        """Return the real path of a name below the root.

        Raises:
            NotFound: the name is absolute, contains `..`, is a link that leads out of the root, or
                does not exist.
        """
        if "\0" in name or "\\" in name or name.startswith(("/", "~")) or ".." in name.split("/"):
            raise NotFound(name)
        return self.check(self.root / name)

    def check(self, path: Path) -> Path:
        """Return the real path of a path made by this package; a link in it may still lead out."""
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise NotFound(str(path)) from error
        if not real.is_relative_to(self.root):
            raise NotFound(str(path))
        return real

    def picture(self, name: str, key: str) -> Picture:
        """Return a picture of a run or evaluation.

        Raises NotFound for what no browser should decode.
        """
        for kind in FIRST_BYTES.values() if KEY.fullmatch(key) else ():
            with suppress(NotFound, PictureError):
                picture = Picture(
                    read_regular_file(self.resolve(f"{name}/{PICTURES}/{key}.{kind}"))
                )
                if picture.size and picture.key == key:
                    return picture
        raise NotFound(key)

    def contents(self) -> FolderContents:
        """Return the runs and evaluations; scan again if the last scan is older than RESCAN_S."""
        with self._lock:
            if time.monotonic() - self._scanned_at > RESCAN_S:
                self._contents = self._scan()
                self._scanned_at = time.monotonic()
            return self._contents

    def _scan(self) -> FolderContents:
        contents = FolderContents()
        for path, files, folders in walk(self.root, MAX_DEPTH):
            name = path.relative_to(self.root).as_posix()
            if "metrics.jsonl" in files or ("config.yaml" in files and "checkpoints" in folders):
                contents.runs.append(name)
            has_lines = any(file.endswith(".jsonl") for file in files)
            if "summary.json" in files or ("settings.json" in files and has_lines):
                contents.evaluations.append(name)
            if "entropy.json" in files:
                file = "entropy.json" if name == "." else f"{name}/entropy.json"
                contents.entropies.append(file)
        return contents


def walk(root: Path, max_depth: int) -> Iterator[tuple[Path, set[str], set[str]]]:
    """Yield (folder, file names, folder names), top down; do not follow links to folders."""
    queue = [(root, 0)]
    for _ in range(MAX_FOLDERS):
        if not queue:
            return
        path, depth = queue.pop(0)
        try:
            entries = list(os.scandir(path))
        except OSError:  # a folder that may not be read, or is gone
            continue
        files = {entry.name for entry in entries if _is_file(entry)}
        folders = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        yield path, files, folders
        if depth < max_depth:
            for name in sorted(folders - SKIPPED):
                if not name.startswith(".") and _is_text(name):
                    queue.append((path / name, depth + 1))


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself, or into a folder that may not be read
        return False


def _is_text(name: str) -> bool:
    """Whether a name is valid UTF-8; no address of the page can hold another one."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
