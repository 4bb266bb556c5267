"""The file that names running servers: `servers.json#model` is how a classmate or a judge is said to live behind one.

{"NAME": {"local_host", "outward_host", "port", "served_model_name", "model_index", "status", "tokenizer"}}
"""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from postgrad.errors import ConfigError
from postgrad.files import acquire_lock, atomic_write_text

LOCK_WAIT_S = 30.0
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def read(file: Path) -> dict[str, Any]:
    """The entries there are; none where there is no file. Raises ConfigError for what is no mapping."""
    try:
        found = json.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--servers {file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--servers {file} is not a mapping of servers; name another file")
    return found


def entry(host: str, port: int, name: str, index: int, tokenizer: str) -> dict[str, Any]:
    """What the file says of one model."""
    local = WILDCARDS.get(host, host)
    return {
        "local_host": f"[{local}]" if ":" in local else local,
        "outward_host": socket.gethostname() if host in WILDCARDS else host,
        "port": port,
        "served_model_name": name,
        "model_index": index,
        "status": "running",
        "tokenizer": tokenizer,
    }


@contextmanager
def named(file: Path | None, entries: dict[str, dict[str, Any]]) -> Iterator[None]:
    """These models stand in the file as long as the context lasts; other servers' entries stay as they are."""
    if file is None:
        yield
        return
    with _changed(file) as known:
        known.update(entries)
    try:
        yield
    finally:
        with _changed(file) as known:
            for name, own in entries.items():
                if known.get(name) == own:  # another server may have taken the name since
                    del known[name]


@contextmanager
def _changed(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the entries to change; one process at a time, written atomically."""
    lock = file.with_name(f".{file.name}.lock")
    try:
        with acquire_lock(lock, LOCK_WAIT_S):
            known = read(file)
            yield known
            atomic_write_text(file, json.dumps(known, indent=1) + "\n")
    except BlockingIOError as error:
        raise ConfigError(
            f"--servers {file} was locked by another process for {LOCK_WAIT_S:g} s; try again"
        ) from error
    except OSError as error:
        raise ConfigError(f"--servers {file} cannot be written: {error.strerror}") from error
