"""Values that are expensive to read from files, kept while their files do not change."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """The `size` values that were used last. Thread-safe: no value is made twice."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: dict[Key, tuple[Any, Value]] = {}
        self._lock = threading.Lock()

    def get(self, key: Key, make: Callable[[], Value], stamp: Any = None) -> Value:
        """Return the value of a key; make it if it is missing or was made for another stamp."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None or entry[0] != stamp:
                entry = (stamp, make())
            while len(self._entries) >= self.size:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = entry
        return entry[1]


def file_stamp(file: Path | None) -> tuple[int, int, int] | None:
    """Return what changes whenever a file does; None for no file."""
    if file is None:
        return None
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
