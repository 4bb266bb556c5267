"""A table of another trainer's settings: names, values, reasons and defaults, from a YAML file."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import TypeVar

import yaml

from postgrad.translate.result import Translation, lower_bool

_SOURCES = ("data.train", "data.validation")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Table:
    """What one project's settings are here. All values are text.

    Attributes:
        names: the setting here by the full name there.
        choices: of settings here, the value here by the value there; "" needs no setting.
        neutral: values in lower case that need no setting, by the last parts of a name.
        not_needed: ends of names of settings that change no result here.
        not_needed_sections: parts of the names of such settings.
        reasons: why a setting has no equivalent, by the last parts of its name.
        objects: arguments that are objects of a script, and what to set instead.
        defaults: settings here that a script means by leaving others out, by its kind.
    """

    names: dict[str, str]
    choices: dict[str, dict[str, str]]
    neutral: dict[str, list[str]]
    not_needed: list[str]
    reasons: dict[str, str]
    defaults: dict[str, dict[str, str]]
    not_needed_sections: list[str] = field(default_factory=list)
    objects: dict[str, str] = field(default_factory=dict)

    def translate(self, result: Translation) -> None:
        """Move the settings that the table knows from `result.settings` to the overrides."""
        for key, value in list(result.settings.items()):
            if self._is_neutral(key, value):
                del result.settings[key]
            elif key in self.names:
                setting = self.names[key]
                here = self._value_of(setting, value)
                if here is not None:
                    del result.settings[key]
                    if here:
                        result.overrides[setting] = here
            elif self.is_not_needed(key):
                del result.settings[key]

    def _value_of(self, setting: str, value: str) -> str | None:
        """Return a value as it is written here; None if there is no such value."""
        if value.startswith("$'"):  # the shell's quotes for special characters are not read
            return None
        if setting in self.choices:
            return self.choices[setting].get(value, self.choices[setting].get(value.lower()))
        return ",".join(split_list(value)) if setting in _SOURCES else lower_bool(value)

    def _is_neutral(self, key: str, value: str) -> bool:
        return value.lower() in _by_last_parts(self.neutral, key, [])

    def is_not_needed(self, key: str) -> bool:
        """Return whether a setting changes no result here, whatever its value."""
        in_section = any(part in key for part in self.not_needed_sections)
        return in_section or key.endswith(tuple(self.not_needed))

    def list_missing(self, result: Translation) -> None:
        """List the settings that nothing has translated, with the reasons that are known."""
        for key, value in result.settings.items():
            result.miss(key, value, self.reason(key))
        result.settings.clear()

    def reason(self, key: str) -> str:
        """Return why a setting has no equivalent; "" if the table does not say."""
        return _by_last_parts(self.reasons, key, "")


def _by_last_parts(values: Mapping[str, _Value], key: str, default: _Value) -> _Value:
    """Return the value of a name's longest end, in whole parts, that is there."""
    parts = key.split(".")
    for i in range(len(parts)):
        end = ".".join(parts[i:])
        if end in values:
            return values[end]
    return default


def split_list(value: str) -> list[str]:
    """Return the items of a list of texts: `['a', "b"]`, `a,b` or `a`."""
    items = [item.strip().strip("\"'") for item in value.strip().strip("[]").split(",")]
    return [item for item in items if item]


@functools.cache
def read_table(project: str) -> Table:
    """Return the table of a project, `verl` or `trl`."""
    text = resources.files("postgrad.translate").joinpath(f"{project}.yaml").read_text("utf-8")
    return Table(**yaml.load(text, Loader=yaml.BaseLoader))  # all scalars are texts
