"""Paths of models that are behind a server: a URL, or an entry of a file of servers."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from postgrad.errors import Damaged, UnknownName, Unreadable, did_you_mean

SCHEMES = ("http://", "https://")


def is_served(path: str) -> bool:
    """Return whether a role's path is a server's URL or an entry of a mapping file."""
    return path.startswith(SCHEMES) or path.partition("#")[0].endswith(".json")


def parse_served_path(path: str) -> tuple[str, str]:
    """Return the URL http://host:port/v1#model of a served model, and the path of its tokenizer.

    A URL names its tokenizer with `?tokenizer=PATH`; the default is the model's name.
    An entry of a mapping file is `servers.json#model`. The file has
    {"model": {"local_host": ..., "port": ..., "served_model_name": ..., "tokenizer": ...}};
    the default tokenizer is the entry's name.

    Raises: ConfigError for a file or an entry that cannot be used.
    """
    if path.startswith(SCHEMES):
        url = urlsplit(path)
        tokenizer = parse_qs(url.query).get("tokenizer", [url.fragment])[0]
        return f"{url.scheme}://{url.netloc}{url.path}#{url.fragment}", tokenizer
    file, _, name = path.partition("#")
    entry = _read_entry(file, name)
    try:
        host = entry["local_host"]
        port = int(entry["port"])
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(
            f"{file}: {name} needs local_host and a port that is a number ({error})"
        ) from error
    model = entry.get("served_model_name") or name
    return f"http://{host}:{port}/v1#{model}", str(entry.get("tokenizer") or name)


def _read_entry(file: str, name: str) -> dict[str, Any]:
    try:
        entries = json.loads(Path(file).expanduser().read_text())
    except OSError as error:
        raise Unreadable(
            f"{file}: {error.strerror}; give an existing mapping file of servers"
        ) from error
    except ValueError as error:
        raise Damaged(f"{file} is not JSON: {error}") from error
    if not isinstance(entries, dict):
        entries = {}
    if not isinstance(entries.get(name), dict):
        raise UnknownName(f"{file} has no model {name!r}; {did_you_mean(name, entries)}")
    return entries[name]
