"""The files in a run's folder `rollouts`: step-NUMBER.parquet, one per step.

The number has six digits or more.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from postgrad.files import atomic_file
from postgrad.pictures import Picture

PICTURES = "pictures"  # the folder of a run's pictures, files KEY.png, beside `rollouts`
FILE_NAME = re.compile(r"step-([0-9]{6,})\.parquet")


def rollout_files(folder: Path) -> dict[int, Path]:
    """Return the file of each step in `folder`, in order of steps.

    Files with other names, such as step-mine.parquet, are the user's and are left out. `folder`
    may be missing.
    """
    files: dict[int, Path] = {}
    for path in folder.glob("step-*.parquet"):
        match = FILE_NAME.fullmatch(path.name)
        if match is not None:
            files[int(match[1])] = path
    return dict(sorted(files.items()))


def write_pictures(folder: Path, pictures: Iterable[Picture]) -> list[Path]:
    """Write the pictures that `folder/pictures` lacks; return their files, not yet synced."""
    written: list[Path] = []
    for picture in dict.fromkeys(pictures):
        file = folder / PICTURES / f"{picture.key}.{picture.kind}"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(file, fsync=False) as temporary:
                temporary.write_bytes(picture.data)
            written.append(file)
    return written
