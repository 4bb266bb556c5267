"""Checks of the choices and bounds that `setting(...)` attaches to a field."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

from postgrad.config.suggestions import suggest_value
from postgrad.errors import ConfigError

# bound -> (test that a number breaks it, its text in the error)
BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "at_least": (operator.lt, "at least"),
    "above": (operator.le, "above"),
    "at_most": (operator.gt, "at most"),
}


# Largest magnitude of a number without an upper bound of its own. No coefficient, weight or time
# limit needs more; far larger ones overflow in the first update.
LARGEST = 1e6


def check_limits(section: Any, prefix: str) -> None:
    """Raises ConfigError for the first setting outside its choices or bounds."""
    for spec in dataclasses.fields(section):
        key = f"{prefix}{spec.name}"
        value = getattr(section, spec.name)
        if dataclasses.is_dataclass(value):
            check_limits(value, f"{key}.")
            continue
        _check_choice(key, value, spec.metadata)
        largest = LARGEST if spec.metadata.get("at_most") is None else math.inf
        _check_size(key, value, bool(spec.metadata.get("may_be_infinite")), largest)
        for bound in BOUNDS:
            if spec.metadata.get(bound) is not None:
                _check_bound(key, value, bound, spec.metadata[bound])


def _check_choice(key: str, value: Any, limits: Any) -> None:
    """Checks a value, or each value of a list."""
    choices = limits.get("choices")
    if not choices:
        return
    for item in value if isinstance(value, list) else [value]:
        if item in choices or (limits.get("or_path") and ":" in str(item)):
            continue
        raise ConfigError(
            f"{key}={item} is not one of its values; {suggest_value(key, str(item), choices)}"
        )


def _check_size(key: str, value: Any, may_be_infinite: bool, largest: float) -> None:
    """Checks that a real number, and each in a list or dictionary, is finite and not too large."""
    if isinstance(value, dict):
        for name, item in value.items():  # a user's own options have other sizes
            _check_size(f"{key}.{name}", item, may_be_infinite, math.inf)
    elif isinstance(value, list):
        for item in value:
            _check_size(key, item, may_be_infinite, largest)
    elif not isinstance(value, float) or (may_be_infinite and value > 0 and math.isinf(value)):
        return
    elif not math.isfinite(value):
        raise ConfigError(f"{key}={value} is out of range; it must be a finite number")
    elif abs(value) > largest:
        raise ConfigError(
            f"{key}={value} is out of range; it must be between {-largest:.0f} and {largest:.0f}"
        )


def _check_bound(key: str, value: Any, bound: str, limit: float) -> None:
    """Checks a number, each number of a list, or nothing if the value is None."""
    breaks, relation = BOUNDS[bound]
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if number is not None and breaks(number, limit):
            raise ConfigError(f"{key}={value} is out of range; it must be {relation} {limit:g}")
