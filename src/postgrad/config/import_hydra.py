"""Reads the YAML files that commands name: verl's --config-name and TRL's --config."""

import re
from pathlib import Path
from typing import Any

import yaml

from postgrad.config.import_shell import THIS_FOLDER, Command, expand

NOT_READ = "the settings of this file are not read; add them by hand"
_OPTION = re.compile(
    r"(?<!\S)(--config-name|--config-path|--config-dir|-cn|-cp|-cd)[=\s]\s*(\"[^\"]*\"|'[^']*'|\S+)"
)
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
# Files of verl and its forks, which have the defaults of import_defaults.py or of the recipes.
OWN_FILES = (
    "ppo_trainer",
    "ppo_megatron_trainer",
    "dapo_trainer",
    "dapo_megatron_trainer",
    "mix_ppo_trainer",
    "sft_trainer",
    "sft_trainer_engine",
    "fully_async_ppo_trainer",
    "fully_async_ppo_megatron_trainer",
    "one_step_off_ppo_trainer",
    "one_step_off_ppo_megatron_trainer",
)


def read_hydra_file(
    command: Command, variables: dict[str, str], folder: Path | None
) -> tuple[dict[str, str], list[str]]:
    """(settings, notes) of the file that a command names; the notes say what is not read of it.

    Args:
        folder: where the script is. Paths are relative to it or to the working folder; without it
            no file is read.
    """
    options = {
        match[1].lstrip("-"): expand(match[2].strip("\"'"), variables)
        for match in _OPTION.finditer(command.arguments)
    }
    if not options:
        return {}, []
    name = options.get("config-name", options.get("cn", "ppo_trainer")).removesuffix(".yaml")
    if name in OWN_FILES and len(options) == 1:
        return {}, []
    places = [options[key] for key in ("config-path", "cp", "config-dir", "cd") if key in options]
    for place in places or ["."]:
        relative = Path(THIS_FOLDER.sub(".", place)) / f"{name}.yaml"
        for base in [Path.cwd(), folder] if folder else []:
            values = _load(base / relative)
            if values is not None:
                return _settings_of(values, str(relative))
    if name in OWN_FILES:
        return {}, []
    given = " ".join(f"--{key}={value}" for key, value in options.items() if len(key) > 2)
    return {}, [f"{given or name}: {NOT_READ}"]


def read_trl_file(flags: dict[str, str], folder: Path | None) -> tuple[dict[str, str], list[str]]:
    """(flags with the settings of the file of --config, notes); the command line's go first."""
    file = flags.get("config", "")
    if not file:
        return flags, []
    others = {key: value for key, value in flags.items() if key != "config"}
    for base in [Path.cwd(), folder] if folder else []:
        values = _load(base / file)
        if values is not None:
            given = {str(key): str(value) for key, value in values.items() if value is not None}
            return given | others, []
    return others, [f"--config={file}: {NOT_READ}"]


def _load(path: Path) -> dict[str, Any] | None:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _settings_of(values: dict[str, Any], file: str) -> tuple[dict[str, str], list[str]]:
    """(settings, notes) of a file's content, by their full names."""
    notes: list[str] = []
    defaults = values.pop("defaults", None)
    values.pop("hydra", None)
    others = [str(one) for one in defaults or [] if one not in ("_self_", *OWN_FILES)]
    if others:
        notes.append(f"defaults of {file}: {', '.join(others)}: these files are not read")
    settings = _flatten(values)
    for key, value in settings.items():
        settings[key] = _REFERENCE.sub(lambda match: settings.get(match[1], match[0]), value)
    return settings, notes


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            found[f"{prefix}{key}"] = f"[{','.join(str(one) for one in value)}]"
        else:
            found[f"{prefix}{key}"] = "null" if value is None else str(value)
    return found
