"""Hints for a key that does not exist, also for the settings of verl, TRL and OpenRLHF."""

import difflib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from postgrad.errors import did_you_mean

MAX_LISTED = 40  # keys in an error message
FOREIGN_SECTIONS = ("actor_rollout_ref", "algorithm", "critic", "reward_model", "trainer")


def suggest(key: str, known: list[str]) -> str:
    """Return a hint for an unknown key.

    In this order: the name in another trainer, all of it or its last two parts, a known key with
    the same last part, the last part in another trainer, a similar spelling, all keys of the
    section.
    """
    section, _, leaf = key.rpartition(".")
    two_parts = ".".join(key.split(".")[-2:])
    hints = foreign_names()
    foreign = hints.keys.get(key) or hints.keys.get(two_parts) or hints.verl.get(key, "")
    if _is_known(foreign, known):
        return f"the nearest here is {foreign}"
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if same_leaf:
        return f"did you mean {same_leaf[0]}?"
    foreign = hints.names.get(leaf, "")
    if _is_known(foreign, known):
        return f"the nearest here is {foreign}"
    if leaf in hints.not_needed:
        return f"leave it out: {hints.not_needed[leaf]}"
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    similar = difflib.get_close_matches(leaf, siblings, n=1)
    if similar:
        return f"did you mean {section}.{similar[0]}?" if section else f"did you mean {similar[0]}?"
    if section and siblings:
        return f"known in {section}: {', '.join(siblings)}"
    if key.split(".")[0] in FOREIGN_SECTIONS:
        return "it is verl's and has no equivalent here; postgrad import SCRIPT translates a script"
    return _similar_key(key, known)


def _is_known(setting: str, known: list[str]) -> bool:
    """Whether the setting that a hint starts with exists where the key was given."""
    name = setting.partition(" ")[0]
    if name.startswith("method."):
        return "method" in known or name in known
    return name in known or name.rpartition(".")[0] in known


def _similar_key(key: str, known: list[str]) -> str:
    """Return a key that is spelled much like this one; where there are few keys, all of them."""
    similar = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not similar and "." not in key:  # the section was left out
        names = {name.rpartition(".")[2]: name for name in known}
        similar = [names[s] for s in difflib.get_close_matches(key, names, n=1, cutoff=0.75)]
    if similar or len(known) <= MAX_LISTED:
        return did_you_mean(key, similar or known)
    if "training.steps" in known:
        return "postgrad recipes NAME --all lists the settings of a recipe"
    return "the command's --help lists its settings"


def suggest_value(key: str, value: str, choices: Sequence[str]) -> str:
    """Return a hint for a value that a setting does not have."""
    foreign = foreign_names().values.get(key, {}).get(value, "")
    if foreign and foreign.partition(" ")[0].rstrip(",") in choices:
        return f"the nearest here is {foreign}"
    named = [choice for choice in choices if choice]
    hint = did_you_mean(value, named)
    if len(named) == len(choices):
        return hint
    return f"{hint.removesuffix('?')}, or empty{'?' if hint.endswith('?') else ''}"


def suggest_recipe(name: str, recipes: Sequence[str]) -> str:
    """Return a hint for a recipe that does not exist."""
    plain = name.lower().replace("-", "_")
    if plain in recipes:
        return f"did you mean {plain}?"
    foreign = foreign_names().recipes.get(plain)
    if foreign:
        return f"the nearest here is {foreign}"
    swapped = [recipe for recipe in recipes if sorted(recipe) == sorted(plain)]
    similar = difflib.get_close_matches(plain, swapped or recipes, n=1, cutoff=0.7)
    return f"did you mean {similar[0]}?" if similar else "postgrad recipes lists them"


# ---- settings of other trainers, which are data: foreign_names.yaml, and the tables of translate/


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
