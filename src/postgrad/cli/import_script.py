"""`postgrad import SCRIPT`"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from postgrad.errors import ConfigError, Unreadable

REQUIRED = {"model.path": "tiny", "data.train": "arithmetic:1"}


def import_script(script: str) -> int:
    """Print the postgrad train command that equals a launch script of verl, LUFFY, BuPO or
    Classmate-CoT, or the config of a TRL script, and list the settings without an equivalent.
    Nothing is executed.

    Args:
        script: shell script, or Python file with a config
    """
    from postgrad.methods import find_method
    from postgrad.translate import (
        SET_IT,
        defaults_of,
        has_argument,
        has_variable,
        read_settings,
        translate,
    )

    path = Path(script).expanduser()
    kind, settings, notes = read_settings(_read(path), path.suffix == ".py", path.parent)
    result = translate(kind, settings, notes)
    defaults = defaults_of(kind, result.recipe, result.overrides)
    added = _differing(result.recipe, defaults)
    result.overrides |= added
    for key in [key for key, value in result.overrides.items() if has_argument(value)]:
        result.missing.append(f"{SET_IT}{key}={result.overrides.pop(key)}")
    print(result.command)
    for line in result.missing:
        print(f"# {line}" if line.startswith(SET_IT) else f"# no equivalent: {line}")
    if added:
        print(f"# defaults that the script leaves out: {', '.join(added)}")
    elif not defaults:
        print(f"# settings that the script leaves out have the values of recipe {result.recipe}")
    known = {key: value for key, value in result.overrides.items() if not has_variable(value)}
    try:
        config = _compose(result.recipe, REQUIRED | known)
        find_method(config.method.name)(config).check()
    except ConfigError as error:
        print(f"# the command needs a change: {error}")
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path} is not a text file; give a shell script or a .py file") from error


def _compose(recipe: str, overrides: dict[str, str], complete: bool = True) -> Any:
    from postgrad.config.compose import compose
    from postgrad.methods import find_method

    words = [f"{key}={value}" for key, value in overrides.items()]
    return compose(recipe, words, lambda name: find_method(name).Settings, complete)


def _differing(recipe: str, defaults: dict[str, str]) -> dict[str, str]:
    """Those of the values that differ from the recipe's."""
    if not defaults:
        return {}
    from postgrad.config.compose import differences

    base, changed = (
        asdict(_compose(recipe, REQUIRED | values, False)) for values in ({}, defaults)
    )
    changed_keys = differences(base, changed)
    return {key: value for key, value in defaults.items() if key in changed_keys}
