"""A setting: a dataclass field with a help text and limits."""

from collections.abc import Callable
from dataclasses import field
from typing import Any

REQUIRED = "???"  # the default of a setting that must be given
Condition = str | tuple[str, ...]  # when a setting is read; check.py has the format


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    or_path: bool = False,
    may_be_infinite: bool = False,
    only_with: Condition = "",
) -> Any:
    """Return a dataclass field with a help text and limits.

    In a list, the limits hold for each number. Each instance gets its own copy of a list or dict.
    Numbers are finite, unless the setting `may_be_infinite`.
    """
    limits = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "may_be_infinite": may_be_infinite,
        "or_path": or_path,  # besides the choices, file.py:NAME or package.module:NAME
        "only_with": only_with,  # when the setting is read
    }
    if isinstance(default, list | dict):
        copy_default: Callable[[], Any] = default.copy
        return field(default_factory=copy_default, metadata=limits)
    return field(default=default, metadata=limits)
