"""Reads the configuration that a run has stored in its folder."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from postgrad.errors import ConfigError

CONFIG_FILE = "config.yaml"


def read_stored_config(folder: Path) -> dict[str, Any]:
    """Returns the settings in the config.yaml of a run folder, as nested dicts.

    Raises ConfigError if the file is missing or is no table of YAML.
    """
    file = folder / CONFIG_FILE
    try:
        stored: Any = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{file} cannot be read: {reason}") from error
    if not isinstance(stored, dict):
        raise ConfigError(f"{file} is not the configuration of a run")
    return stored
