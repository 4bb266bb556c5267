"""Roles that no host loads: the run's own engine, models behind servers, and fakes."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from postgrad.errors import ConfigError, did_you_mean
from postgrad.methods.base import LIVE

FAKE = "fake:"  # the path of a role that always says the text that follows


def is_elsewhere(path: str) -> bool:
    return path == LIVE or path.startswith(FAKE) or is_served(path)


def is_served(path: str) -> bool:
    return path.startswith(("http://", "https://")) or path.partition("#")[0].endswith(".json")


def served(path: str) -> tuple[str, str]:
    """The address http://host:port/v1#model of a served model, and where its tokenizer is: `?tokenizer=PATH`, else the model's name.

    A mapping file, `servers.json#model`, says {"model": {"local_host": ..., "port": ..., "served_model_name": ..., "tokenizer": ...}};
    without a tokenizer its names are where the tokenizers are. Raises ConfigError.
    """
    if path.startswith(("http://", "https://")):
        parts = urlsplit(path)
        named = parse_qs(parts.query).get("tokenizer", [parts.fragment])[0]
        return f"{parts.scheme}://{parts.netloc}{parts.path}#{parts.fragment}", named
    file, _, name = path.partition("#")
    entry = _entry(file, name)
    try:
        model = entry.get("served_model_name") or name
        return f"http://{entry['local_host']}:{int(entry['port'])}/v1#{model}", str(
            entry.get("tokenizer") or name
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file}: {name} needs local_host and a port that is a number ({error})"
        ) from error


def _entry(file: str, name: str) -> dict[str, Any]:
    try:
        known = json.loads(Path(file).expanduser().read_text())
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}; name a mapping file of servers that is there"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(known, dict) or not isinstance(known.get(name), dict):
        names = known if isinstance(known, dict) else {}
        raise ConfigError(f"{file} has no model {name!r}; {did_you_mean(name, names)}")
    return known[name]
