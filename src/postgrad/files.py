"""Atomic writes, file locks, files of strangers, and samples of large files to hash.

An atomic write fills a temporary path beside the target, syncs it to the disk and renames it.
A kill at any moment leaves the old file or the new one. Imports the standard library only.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

RETRY_S = 0.02  # pause between two attempts to get a lock
# safetensors reports a full disk or an exceeded quota in the text of its own error type.
IO_ERROR = re.compile(r"I/O error: (.+?) \(os error|(No space left on device)")


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file to read. Raises OSError for a pipe or device, which may block or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def temporary_path(path: Path) -> Path:
    """Return the path beside `path` that an atomic write fills; a kill may leave it behind."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def atomic_file(path: Path, fsync: bool = True) -> Iterator[Path]:
    """Yield the temporary path to write; rename it to `path` if the block succeeds.

    If the block raises, the temporary file is removed and `path` stays as it was.
    `fsync=False` skips the wait for the disk, for callers that sync later.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        if fsync:
            fsync_path(temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path` atomically. Raises OSError."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically. Raises OSError."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def append_bytes(path: Path, data: bytes) -> None:
    """Append `data` to `path` and wait for the disk. A kill may leave only a part of it."""
    with path.open("ab") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder to fill; rename it to `folder` if the block succeeds.

    If the block raises, the temporary folder is removed. `folder` must be absent or empty.
    """
    temporary = temporary_path(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        fsync_tree(temporary)
        if folder.is_dir():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def create_folder_once(folder: Path, fill: Callable[[Path], object]) -> Path:
    """Return `folder`; if it does not exist, `fill` fills a temporary folder that is then renamed.

    Several processes may call this at the same time: each fills its own, the first rename wins.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        fill(temporary)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first, with the same content
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder; a kill leaves all of it or, under a hidden name, a part."""
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    if folder.exists():
        folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Wait until the disk has the file or the folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Wait until the disk has every file and folder below `folder`, then `folder` itself."""
    for path in [*folder.rglob("*"), folder]:
        fsync_path(path)


def sample_files(files: Iterable[Path], num_samples: int, num_bytes: int) -> Iterator[bytes]:
    """Yield names, sizes and samples of files to hash that are too large to read whole.

    Each file has `num_samples` samples of `num_bytes` at equal distances: the first at its start,
    the last at its end. Raises OSError.
    """
    for file in files:
        size = file.stat().st_size
        yield f"{file.name} {size} ".encode()
        with file.open("rb") as stream:
            for i in range(num_samples):
                stream.seek(max(0, (size - num_bytes) * i // (num_samples - 1)))
                yield stream.read(num_bytes)


def acquire_lock(path: Path, timeout_s: float = 0.0) -> IO[str]:
    """Return `path` opened for writing and locked for this process alone.

    Closing the file frees the lock; the system frees it when the process ends, even by a kill.
    Opening the file empties it.

    Raises:
        BlockingIOError: another process still holds the lock after `timeout_s` seconds.
        OSError: the file cannot be opened.
    """
    deadline = time.monotonic() + timeout_s
    file = path.open("w")
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                raise
        except OSError:
            file.close()
            raise
        time.sleep(RETRY_S)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of `acquire_lock` on this file.

    The test itself holds a shared lock for a moment. Raises OSError if the file cannot be opened.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def disk_error(error: Exception) -> str:
    """Return why the disk refused a write, or "" if the error is of another kind."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = IO_ERROR.search(str(error))
    return (found[1] or found[2]) if found else ""
