"""`key=value` overrides: the keys, and their values in nested settings."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from postgrad.config.values import parse, part_of
from postgrad.errors import ConfigError, WrongValue

# Sections that may be written for one of their settings: method=NAME.
SHORT_FORMS = {
    "method": "method.name",
    "environment": "environment.name",
    "agent": "agent.command",
    "cluster": "cluster.backend",
}


# A setting as text, `key=value`, or as (key, value) with a value of Python.
Override = str | tuple[str, Any]


def split_override(override: Override) -> tuple[str, Any, bool]:
    """Return (full key, value, whether the value is a text to read). Raises ConfigError.

    `+key` and `++key`, as in Hydra, mean the same as `key`.
    """
    if isinstance(override, tuple):
        return SHORT_FORMS.get(override[0], override[0]), override[1], False
    key, equals, value = override.lstrip("+").partition("=")
    if not equals or not key or override.startswith("~"):
        hint = "to unset a key write key=null"
        if override.startswith("--"):
            hint = "settings have no dashes"
        elif key and not equals and not override.startswith("~"):
            hint = f"write {key}=VALUE, without spaces"
            if key in ("tiny", "smollm2") or "/" in key or Path(key).exists():
                hint = f"a model is model.path={key}, a file of problems data.train={key}"
        raise WrongValue(f"expected key=value, got {override!r}; {hint}", at=override)
    return SHORT_FORMS.get(key, key), value, True


def rename(override: Override, full_key: Callable[[str], str]) -> Override:
    """Return the override with the full name of its setting."""
    if isinstance(override, tuple):
        return full_key(override[0]), override[1]
    key, equals, value = override.partition("=")
    return f"{full_key(key)}{equals}{value}"


def put(
    values: dict[str, Any],
    schema: type,
    override: tuple[str, Any, bool],
    refuse: Callable[[str], ConfigError],
    prefix: str = "",
) -> None:
    """Set an overridden key in nested values.

    A dict replaces the dict that the recipe has; a dict for a section is merged.

    Args:
        schema: the dataclass of `values`.
        override: what `split_override` returned, without `prefix` in the key.
        refuse: return the error for a key that does not exist.
        prefix: the section of `values`, for error messages.
    """
    key, value, is_text = override
    *sections, last = key.split(".")
    kind: Any = schema
    for name in (*sections, last):
        kind = part_of(kind, name)
        if kind is None:
            raise refuse(f"{prefix}{key}")
    for name in sections:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    if is_text:
        value = parse(value, kind, f"{prefix}{key}")
    old = values.get(last)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict) and isinstance(old, dict):
        value = merge(old, value)
    values[last] = value


def merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return both; sections are merged, other values of `second` replace those of `first`."""
    merged = dict(first)
    for key, value in second.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            value = merge(old, value)
        merged[key] = value
    return merged


def keys_in(overrides: Iterable[Override]) -> set[str]:
    """Return the full keys that overrides set."""
    return {split_override(override)[0] for override in overrides}


def leaves_of(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested values by their dotted keys."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            leaves |= leaves_of(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves
