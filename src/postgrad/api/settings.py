"""Keyword arguments of the Python API become `key=value` settings of the command line."""

import dataclasses
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from postgrad.config.overrides import SHORT_FORMS
from postgrad.config.suggestions import foreign_names
from postgrad.errors import Conflict, UnknownName, did_you_mean
from postgrad.user_code import PythonObject

# Short names besides the last parts of the settings' names.
ALIASES = {
    "steps": "training.steps",
    "batch_size": "training.problems_per_step",
    "group_size": "rollout.samples",
    "max_tokens": "rollout.max_response_tokens",
    "temperature": "rollout.temperature",
    "lr": "optimizer.lr",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "device": "model.device",
    "dtype": "model.dtype",
    "threads": "model.threads",
    "environment": "environment.name",
}


@dataclasses.dataclass
class Settings:
    """Settings as (full name, value), and those whose values are objects of this process."""

    overrides: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)  # by dotted key
    values: dict[str, Any] = dataclasses.field(default_factory=dict)  # all of them, by dotted key

    def add(self, key: str, value: Any) -> None:
        """Add one setting by its full name; a dict sets the keys below it.

        Raises ConfigError if the setting was added before with another value.
        """
        if isinstance(value, Mapping):
            if "." in key:  # the recipe's dict is replaced; a section keeps its other settings
                self.overrides.append((key, {}))
            for name, item in value.items():
                self.add(f"{key}.{name}", item)
            return
        plain = _plain(value)
        full = SHORT_FORMS.get(key, key)
        if self.values.setdefault(full, plain) != plain:
            raise Conflict(
                f"{full} is given twice, as {self.values[full]} and {plain}; give it once", at=full
            )
        if _has_objects(plain):
            self.objects[key] = plain
        self.overrides.append((full, plain))

    def attach(self, config: Any) -> None:
        """Put the objects in the place of their texts in a composed configuration."""
        for key, value in self.objects.items():
            section, _, leaf = key.rpartition(".")
            target = config
            for name in section.split(".") if section else ():
                target = getattr(target, name)
            setattr(target, leaf, value)


def _plain(value: Any) -> Any:
    """Return a value with paths as text and objects as settings."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item") and not isinstance(value, type):  # a number of NumPy or torch
        return _plain(value.item())
    return as_setting(value)


def _has_objects(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, PythonObject) for item in items)


def full_key(name: str, known: Sequence[str]) -> str:
    """Return the full name of a setting given by a short name, e.g. optimizer.lr for lr.

    `known` are the full names of all settings. A short name is an alias, or the last part of a
    full name if only one section has it.

    Raises:
        ConfigError: no setting has this name, or several have.
    """
    if "." in name:  # the composition checks full names
        return name
    if name in ALIASES:
        return ALIASES[name]
    if name in known:
        return name
    matches = [key for key in known if key.rpartition(".")[2] == name]
    outer = [key for key in matches if key.count(".") == 1]  # data.template, not ...judge.template
    matches = outer or matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UnknownName(
            f'{name}= is ambiguous: {" or ".join(matches)}; write settings={{"{matches[0]}": ...}}'
        )
    raise UnknownName(f"unknown setting {name}; {_suggest(name, known)}", at=name)


def _suggest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown short name."""
    hints = foreign_names()
    foreign = hints.names.get(name, "")
    if foreign:
        return f"the nearest here is {short_name(foreign)}"
    if name in hints.not_needed:
        return f"leave it out: {hints.not_needed[name]}"
    if name in ("args", "config"):
        return "write its settings as arguments, such as lr=1e-6, steps=100"
    leaves = {key.rpartition(".")[2] for key in known}
    similar = difflib.get_close_matches(name, [*ALIASES, *leaves], n=1)
    if similar:
        return f"did you mean {similar[0]}?"
    return f"{did_you_mean(name, ALIASES)} (postgrad recipes NAME --all shows every setting)"


def short_name(key: str) -> str:
    """Return a full name with its short form: `lr (optimizer.lr)`."""
    arguments = {
        "model.path": "model",
        "data.train": "data",
        "data.validation": "validation",
        "reward.verifier": "reward",
    }
    short = {full: alias for alias, full in ALIASES.items()} | arguments
    return f"{short[key]}= ({key})" if key in short else key


# ---- functions, classes and other Python objects as values


def as_setting(value: Any) -> str:
    """Return the text of a setting for an object: its import path, or a PythonObject.

    An object that other processes can import is given by its path, as on the command line. Another
    one, such as a function of a notebook, is a PythonObject.
    """
    return importable_path(value) or PythonObject(object_name(value), value)


def importable_path(value: Any) -> str:
    """Return `module:name` of a function or class that another process can import, else ""."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        return ""
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}:{name}" if found is value else ""


def object_name(value: Any) -> str:
    """Return the name of a function or a class, or of an object's class."""
    return getattr(value, "__name__", type(value).__name__).strip("<>")
