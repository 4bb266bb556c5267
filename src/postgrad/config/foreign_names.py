"""Settings of verl, TRL, OpenRLHF and transformers, and what to type here instead.

They are data (foreign_names.yaml, and the tables of translate/), read on an unknown name only.
"""

import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class ForeignNames:
    """Hints by what was typed. A hint starts with a setting, a value or a recipe.

    Attributes:
        keys: by full names or their last two parts.
        names: by the last part of a name.
        not_needed: by the last part of a name: why a run does not need the setting.
        values: of settings with choices, by the value there.
        recipes: by names of trainers and algorithms.
        verl: by full names of verl's settings.
    """

    keys: dict[str, str]
    names: dict[str, str]
    not_needed: dict[str, str]
    values: dict[str, dict[str, str]]
    recipes: dict[str, str]
    verl: dict[str, str]


@functools.cache
def foreign_names() -> ForeignNames:
    """Return all hints."""
    own = _read("config/foreign_names.yaml")
    verl, trl = _read("translate/verl.yaml"), _read("translate/trl.yaml")
    for key, hints in own["values"].items():
        choices = verl["choices"].get(key, {}) | trl["choices"].get(key, {})
        own["values"][key] = {name: here for name, here in choices.items() if here} | hints
    return ForeignNames(**own, verl=verl["names"])


def _read(path: str) -> dict[str, Any]:
    import yaml  # here, since every command imports this file

    text = resources.files("postgrad").joinpath(path).read_text("utf-8")
    return yaml.load(text, Loader=yaml.BaseLoader)  # all scalars are texts
