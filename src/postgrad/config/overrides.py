"""`key=value` overrides in Hydra's grammar."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from postgrad.errors import ConfigError, first_line

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

COMMAND_KEYS = ("agent", "agent.command")  # their value is a command, not Hydra's grammar
LIST_KEYS = ("track",)  # lists that may be written as texts: track=wandb, track=wandb,tensorboard

FILES_KEYS = ("data", "data.train", "data.validation")  # files, separated by commas

# Sections that may be written for one of their settings: method=NAME.
SHORT_FORMS = {
    "method": "method.name",
    "environment": "environment.name",
    "agent": "agent.command",
    "cluster": "cluster.backend",
}


def apply_overrides(
    values: DictConfig, overrides: Sequence[str], sections: Collection[str]
) -> None:
    """Sets the overridden keys of `values`, in order, as Hydra does. Raises ConfigError.

    A dict replaces the dict that the recipe has; only a dict for one of `sections` is merged.
    """
    for override in overrides:
        parsed = parse_override(override)
        key = parsed.key_or_group
        try:
            OmegaConf.update(values, key, parsed.value(), merge=key in sections, force_add=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{override}: {first_line(error)}") from error


def parse_override(override: str) -> "Override":
    """Returns a `key=value` override, parsed by Hydra as `++key=value`. Raises ConfigError.

    `++` sets the key whether or not the recipe has it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, value = _split_override(override)
    parser = OverridesParser.create()
    try:
        parsed = parser.parse_override(f"++{key}={value}")
    except HydraException as error:
        quoted = _quote(value)
        if quoted is None:
            raise ConfigError(
                f"{key}={value}: {first_line(error)}; put the value into quotes: '{key}=\"...\"'"
            ) from error
        value = quoted
        parsed = parser.parse_override(f"++{key}={value}")
    if parsed.is_sweep_override() and key in FILES_KEYS and (files := _quote(value)):
        parsed = parser.parse_override(f"++{key}={files}")
    if parsed.is_sweep_override():
        raise ConfigError(
            f"{key}={value}: one value is needed, this is a sweep; start one run per value, "
            "or quote a value with commas: key='\"a,b\"'"
        )
    if parsed.package is not None:
        raise ConfigError(f"unknown key {key}; a key has no @")
    return parsed


def read_lists(values: DictConfig) -> None:
    """Makes lists of those LIST_KEYS that are texts or null; drops empty and repeated names."""
    for key in LIST_KEYS:
        if key not in values:
            continue
        value = values[key]
        items = value.split(",") if isinstance(value, str) else value or []
        if isinstance(items, list | ListConfig) and all(isinstance(one, str) for one in items):
            names = [one.strip() for one in items]
            values[key] = list(dict.fromkeys(name for name in names if name))


def _split_override(override: str) -> tuple[str, str]:
    """Returns key and value, with short forms such as method=NAME expanded. Raises ConfigError."""
    key, equals, value = override.lstrip("+").partition("=")
    if not equals or not key or override.startswith("~"):
        hint = "to unset a key write key=null"
        if override.startswith("--"):
            hint = "settings have no dashes"
        elif key and not equals and not override.startswith("~"):
            hint = f"write {key}=VALUE, without spaces"
            if key in ("tiny", "smollm2") or "/" in key or Path(key).exists():
                hint = f"a model is model.path={key}, a file of problems data.train={key}"
        raise ConfigError(f"expected key=value, got {override!r}; {hint}")
    if key.split(".")[0] == "hydra":  # Hydra would accept it silently
        raise ConfigError(f"unknown key {key}; Hydra's own settings have no effect here")
    if key in ("method", "environment"):
        return SHORT_FORMS[key], f"'{value}'"
    if key in COMMAND_KEYS:
        escaped = value.replace("'", "\\'")
        return "agent.command", f"'{escaped}'"
    if key in LIST_KEYS and value != "null" and not value.startswith(("[", "'", '"')):
        return key, f"'{value}'"  # Hydra would read a,b as a sweep
    if key == "cluster":
        key = SHORT_FORMS[key]
    is_url = value.startswith(("http://", "https://"))
    if is_url and "'" not in value:  # Hydra would read "#" as the start of a comment
        value = f"'{value}'"
    return key, value


def _quote(value: str) -> str | None:
    """Returns a value that Hydra cannot parse as a quoted string, or as a list of them.

    Examples: brief(limit=100), file.json#name, [training.steps=3]. The type of the setting then
    decides whether a string is allowed. None if the value has quotes, braces or inner brackets.
    """
    is_list = value.startswith("[") and value.endswith("]")
    inner = value[1:-1] if is_list else value
    if any(character in inner for character in "'\"[]{}\\"):
        return None
    if not is_list:
        return f"'{inner}'"
    items = [f"'{item.strip()}'" for item in inner.split(",")]
    return f"[{','.join(items)}]"


# What OmegaConf says about a value of the wrong type, and what a user reads.
_WRONG_TYPES = (
    (r"Value '(.*)' of type '.*' could not be converted to Integer", "={} is not a whole number"),
    (r"Value '(.*)' of type '.*' could not be converted to Float", "={} is not a number"),
    (r"Value '(.*)' is not a valid bool.*", "={} is neither true nor false"),
    (r"Cannot convert '.*' to string: '(.*)'", "={} is not a text; put it in quotes"),
    (r"Incompatible value 'None' .*", "=null: it needs a value"),
    (r"Invalid value assigned: .* is not a ListConfig.*", " is a list; write {key}=[VALUE]"),
)


def explain_wrong_type(key: str, error: Exception) -> str:
    """Returns the line for a value that the setting `key` cannot have."""
    text = first_line(error, max_chars=10_000)
    for pattern, reason in _WRONG_TYPES:
        if match := re.fullmatch(pattern, text):
            return key + reason.format(*match.groups(), key=key)
    return f"{key or 'configuration'}: {text}"
