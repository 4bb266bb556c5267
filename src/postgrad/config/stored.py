"""Reads the configuration that a run has stored in its folder."""

from pathlib import Path
from typing import Any

from yaml import YAMLError

from postgrad.config.values import read_yaml
from postgrad.errors import Damaged, Unreadable

CONFIG_FILE = "config.yaml"


def read_stored_config(folder: Path) -> dict[str, Any]:
    """Return the settings in the config.yaml of a run folder, as nested dicts.

    Raises ConfigError if the file is missing or is no table of YAML.
    """
    file = folder / CONFIG_FILE
    try:
        stored: Any = read_yaml(file.read_text())
    except (OSError, ValueError, RecursionError, YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Unreadable(f"{file} cannot be read: {reason}") from error
    if not isinstance(stored, dict):
        raise Damaged(f"{file} is not the configuration of a run")
    return stored


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key of a stored configuration; None if it is not there."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
