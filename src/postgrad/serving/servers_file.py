"""The JSON file of running servers; `servers.json#model` names a model behind one of them.

{"NAME": {"local_host", "outward_host", "port", "served_model_name", "model_index", "status",
"tokenizer"}}. Roles such as classmates and judges are given this way.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from postgrad.errors import Damaged, Unreadable, Unwritable
from postgrad.files import acquire_lock, atomic_write_text

LOCK_WAIT_S = 30.0
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # all addresses -> the loopback address


def read_servers(file: Path) -> dict[str, Any]:
    """Return the entries of the file; {} if it does not exist. Raises ConfigError."""
    try:
        entries = json.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise Unreadable(f"--servers {file} cannot be read: {error}") from error
    if not isinstance(entries, dict):
        raise Damaged(f"--servers {file} is not a JSON object; name another file")
    return entries


def local_host(host: str) -> str:
    """Return the host part of a URL that reaches a server from this machine."""
    local = WILDCARDS.get(host, host)
    return f"[{local}]" if ":" in local else local


def make_entry(host: str, port: int, name: str, index: int, tokenizer: str) -> dict[str, Any]:
    """Return the entry of one model."""
    return {
        "local_host": local_host(host),
        "outward_host": socket.gethostname() if host in WILDCARDS else host,
        "port": port,
        "served_model_name": name,
        "model_index": index,
        "status": "running",
        "tokenizer": tokenizer,
    }


@contextmanager
def list_servers(file: Path | None, entries: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Keep entries in the file while the context lasts; other servers' entries stay."""
    if file is None:
        yield
        return
    with _edit(file) as known:
        known.update(entries)
    try:
        yield
    finally:
        with _edit(file) as known:
            for name, entry in entries.items():
                if known.get(name) == entry:  # another server may use the name by now
                    del known[name]


@contextmanager
def _edit(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries to change; then write them atomically. One process at a time."""
    lock = file.with_name(f".{file.name}.lock")
    try:
        with acquire_lock(lock, LOCK_WAIT_S):
            known = read_servers(file)
            yield known
            atomic_write_text(file, json.dumps(known, indent=1) + "\n")
    except BlockingIOError as error:
        raise Unwritable(
            f"--servers {file} was locked by another process for {LOCK_WAIT_S:g} s; try again"
        ) from error
    except OSError as error:
        raise Unwritable(f"--servers {file} cannot be written: {error.strerror}") from error
