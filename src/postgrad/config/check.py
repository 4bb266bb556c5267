"""Checks of a settings tree: choices and bounds of each value, and whether anything reads it.

Settings say what they depend on, and one function checks them all:

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
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from postgrad.config.overrides import SHORT_FORMS
from postgrad.config.setting import Condition
from postgrad.config.suggestions import suggest_value
from postgrad.errors import NoEffect, UnknownName, WrongValue

# bound -> (test that a number breaks it, its text in the error)
BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "at_least": (operator.lt, "at least"),
    "above": (operator.le, "above"),
    "at_most": (operator.gt, "at most"),
}
# Largest magnitude of a number without an upper bound of its own. No coefficient, weight or time
# limit needs more; far larger ones overflow in the first update.
LARGEST = 1e6
SHORT_KEYS = {key: short for short, key in SHORT_FORMS.items()}
TERM = re.compile(r"([\w.]+)(?:(=|!=|~)(.*))?")


class Setting(NamedTuple):
    """A setting of a tree: its value, its declaration, and the conditions that must all hold."""

    key: str
    value: Any
    field: dataclasses.Field
    conditions: tuple[Condition, ...]

    @property
    def default(self) -> Any:
        factory = self.field.default_factory
        return self.field.default if factory is dataclasses.MISSING else factory()


def settings_of(
    section: Any, prefix: str = "", outer: tuple[Condition, ...] = ()
) -> Iterator[Setting]:
    """Yield each setting of a section and of the sections in it."""
    inherited = [vars(kind).get("only_with", {}) for kind in type(section).__mro__]
    for field in dataclasses.fields(section):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        declared = [field.metadata.get("only_with", ""), *(by.get(field.name) for by in inherited)]
        conditions = (*outer, *filter(None, declared))
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{key}.", conditions)
        else:
            yield Setting(key, value, field, conditions)


# ---- choices and bounds


def check_limits(config: Any) -> None:
    """Raise ConfigError for the first setting outside its choices or bounds."""
    for key, value, field, _ in settings_of(config):
        limits = field.metadata
        numbers = value if isinstance(value, list) else [value]
        if limits.get("choices"):
            for item in numbers:
                _check_choice(key, item, limits)
        largest = LARGEST if limits.get("at_most") is None else math.inf
        _check_size(key, value, bool(limits.get("may_be_infinite")), largest)
        for bound, (breaks, relation) in BOUNDS.items():
            limit = limits.get(bound)
            if limit is None:
                continue
            if any(number is not None and breaks(number, limit) for number in numbers):
                raise WrongValue(f"{key}={value} is out of range; it must be {relation} {limit:g}")


def _check_choice(key: str, item: Any, limits: Any) -> None:
    choices = limits["choices"]
    if item in choices or (limits.get("or_path") and ":" in str(item)):
        return
    hint = suggest_value(key, str(item), choices)
    raise UnknownName(f"{key}={item} is not one of its values; {hint}")


def _check_size(key: str, value: Any, may_be_infinite: bool, largest: float) -> None:
    """Check that a real number, and each in a list or dictionary, is finite and not too large."""
    if isinstance(value, dict):
        for name, item in value.items():  # a user's own options have other sizes
            _check_size(f"{key}.{name}", item, may_be_infinite, math.inf)
    elif isinstance(value, list):
        for item in value:
            _check_size(key, item, may_be_infinite, largest)
    elif not isinstance(value, float) or (may_be_infinite and value == math.inf):
        return
    elif not math.isfinite(value):
        raise WrongValue(f"{key}={value} is out of range; it must be a finite number")
    elif abs(value) > largest:
        raise WrongValue(
            f"{key}={value} is out of range; it must be between {-largest:.0f} and {largest:.0f}"
        )


# ---- settings that nothing reads


def check_effects(config: Any, given: Collection[str]) -> None:
    """Raise ConfigError for the first setting that a person gave and that nothing reads.

    Values that a recipe of the package sets are accepted, so that a recipe can be changed by one
    setting, such as reinforce_pp with method.kl=none.

    Args:
        config: all settings.
        given: the keys that a person set, those of sections and of entries of dicts included.
    """
    for setting in settings_of(config):
        key, value, default = setting.key, setting.value, setting.default
        is_off = not value and not default  # 0 and null
        if value == default or is_off or not _is_given(key, given):
            continue
        for condition in setting.conditions:
            reason = unmet(condition, config)
            if reason:
                leave = f"leave it at {text_of(default)}" if text_of(default) else "leave it out"
                raise NoEffect(f"{key}={text_of(value)} has no effect {reason}, or {leave}")


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
