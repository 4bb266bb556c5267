"""Which settings have an effect: each says what it depends on, and one function checks them all.

    kl_coef: float = setting(0.001, "...", only_with="method.kl!=none")

A condition has one term, or several with " and " between them:

    rollout.tools               the setting is set: not 0, empty, false or null
    method.kl=loss,reward       it has one of these values
    method.kl!=none             it has none of these values
    reward.verifier~llm_judge   its text contains this

A tuple has alternatives. A section's condition holds for all settings in it. A subclass adds
conditions for settings that it inherits by the attribute `only_with`: a dict by their names.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator
from typing import Any

from postgrad.config.overrides import SHORT_FORMS
from postgrad.errors import ConfigError

Condition = str | tuple[str, ...]
SHORT_KEYS = {key: short for short, key in SHORT_FORMS.items()}
TERM = re.compile(r"([\w.]+)(?:(=|!=|~)(.*))?")


def check_effects(config: Any, given: Collection[str]) -> None:
    """Raise ConfigError for the first setting that a person gave and that nothing reads.

    Values that a recipe of the package sets are accepted, so that a recipe can be changed by one
    setting, such as reinforce_pp with method.kl=none.

    Args:
        config: all settings.
        given: the keys that a person set, those of sections and of entries of dicts included.
    """
    for key, value, default, conditions in conditions_of(config):
        is_off = not value and not default  # 0 and null
        if value == default or is_off or not _is_given(key, given):
            continue
        for condition in conditions:
            reason = unmet(condition, config)
            if reason:
                leave = f"leave it at {text_of(default)}" if text_of(default) else "leave it out"
                raise ConfigError(f"{key}={text_of(value)} has no effect {reason}, or {leave}")


def conditions_of(
    section: Any, prefix: str = "", outer: tuple[Condition, ...] = ()
) -> Iterator[tuple[str, Any, Any, tuple[Condition, ...]]]:
    """Yield (key, value, default, conditions that must all hold) of each setting."""
    for field in dataclasses.fields(section):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        conditions = [*outer, field.metadata.get("only_with", "")]
        conditions += [
            vars(kind).get("only_with", {}).get(field.name, "") for kind in type(section).__mro__
        ]
        needed = tuple(filter(None, conditions))
        if dataclasses.is_dataclass(value):
            yield from conditions_of(value, f"{key}.", needed)
        elif field.default_factory is not dataclasses.MISSING:
            yield key, value, field.default_factory(), needed
        else:
            yield key, value, field.default, needed


def unmet(condition: Condition, config: Any) -> str:
    """Return why a condition does not hold, with what to type instead; "" if it holds."""
    alternatives = (condition,) if isinstance(condition, str) else condition
    reasons = [_unmet_term(one, config) for one in alternatives]
    return "" if "" in reasons else reasons[0]


def _unmet_term(condition: str, config: Any) -> str:
    for term in condition.split(" and "):
        match = TERM.fullmatch(term)
        assert match, f"not a condition: {term}"
        key, sign, listed = match.groups()
        value, choices = _look_up(config, key)
        text = text_of(value)
        wanted = (listed or "").split(",")
        if sign is None:
            holds = bool(value)
            wanted = ["true"] if value is False else []
        elif sign == "~":
            holds = listed in text
        elif sign == "=":
            holds = text in wanted
        else:
            holds = text not in wanted
            wanted = [one for one in choices if one not in wanted]
        if not holds:
            now = f"with {key}={text}" if text else f"without {key}"
            short = SHORT_KEYS.get(key, key)
            if 0 < len(wanted) < 6:
                return f"{now}; use {short}={' or '.join(wanted)}"
            return f"{now}; add {short}=VALUE"
    return ""


def _look_up(config: Any, key: str) -> tuple[Any, tuple[str, ...]]:
    """Return the value of a dotted key, and the choices of its setting."""
    section, _, name = key.rpartition(".")
    for part in section.split("."):
        config = getattr(config, part)
    [field] = [one for one in dataclasses.fields(config) if one.name == name]
    return getattr(config, name), field.metadata.get("choices", ())


def text_of(value: Any) -> str:
    """Return a value as a user types it after `key=`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value or isinstance(value, int) else ""


def _is_given(key: str, given: Collection[str]) -> bool:
    return any(
        one == key or one.startswith(f"{key}.") or key.startswith(f"{one}.") for one in given
    )
