"""From a recipe and key=value overrides to a checked Config, or to one clear error line.

A recipe is a YAML file; `defaults: [grpo, _self_]` builds on other recipes. The typed dataclasses
of schema.py and of the methods decide which settings exist, and how a text is read.
"""

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from yaml import YAMLError

from postgrad.config.check import check_effects, check_limits
from postgrad.config.overrides import Override, keys_in, leaves_of, merge, put, split_override
from postgrad.config.schema import Config, EngineConfig
from postgrad.config.setting import REQUIRED
from postgrad.config.stored import CONFIG_FILE
from postgrad.config.suggestions import suggest, suggest_recipe
from postgrad.config.values import convert, kinds_of, read_yaml, write_yaml
from postgrad.errors import (
    ConfigError,
    Damaged,
    Missing,
    TooLarge,
    UnknownName,
    Unreadable,
    WrongValue,
    first_line,
)

MAX_NAME = 200  # bytes of a run's name; a file system has 255, and some files get a suffix
RECIPES = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """Return the names of the built-in recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def compose(
    recipe: str,
    overrides: Sequence[Override],
    find_settings: Callable[[str], type],
    complete: bool = True,
    base: dict[str, Any] | None = None,
) -> Config:
    """Return the checked configuration of `postgrad train RECIPE key=value ...`.

    Args:
        recipe: name of a built-in recipe, or path of a YAML file.
        overrides: `key=value` settings, or (key, value) from Python; later ones win.
        find_settings: returns the settings dataclass of a method's name. It is called after all
            other keys were checked.
        complete: False allows that required settings are missing and that others have no effect,
            to show a recipe.
        base: values that replace the recipe's and that nobody gave; overrides replace them.

    Raises:
        ConfigError: names the wrong key, its value and the nearest valid one.
    """
    values, given = read_recipe(recipe)
    shared = {} if base is None else base
    config = _compose(merge(values, shared), overrides, recipe, find_settings, complete)
    given |= keys_in(overrides)
    if "training.steps" in given and "training.epochs" not in given:
        config.training.epochs = 0.0  # the user's number of steps replaces the recipe's epochs
    if complete:
        check_effects(config, given)
    return config


def from_yaml(text: str, find_settings: Callable[[str], type]) -> Config:
    """Return the configuration that to_yaml() wrote in another process, checked again."""
    return _compose(read_yaml(text), [], "config.yaml", find_settings)


def compose_section(
    schema: type, overrides: Sequence[Override], base: dict[str, Any] | None = None
) -> Any:
    """Return a checked instance of `schema` from `base` and overrides, without a recipe.

    Raises ConfigError.
    """
    values = copy.deepcopy(base or {})
    for override in overrides:
        put(values, schema, split_override(override), lambda key: _unknown(key, _all_keys(schema)))
    settings = _build(schema, values, "", _all_keys(schema))
    check_limits(settings)
    check_effects(settings, keys_in(overrides))
    return settings


def known_keys(method_settings: type) -> list[str]:
    """Return the full names of all settings, those of the method's settings class included."""
    return [*_all_keys(Config), *(f"method.{key}" for key in _all_keys(method_settings))]


def to_yaml(config: Config | EngineConfig) -> str:
    """Return the resolved configuration as YAML that compose() and from_yaml() read."""
    return write_yaml(dataclasses.asdict(config))


def fingerprint(config: Config) -> str:
    """Return a hash of every setting except the run's name, folder and tracker."""
    values: dict[str, Any] = dataclasses.asdict(config)
    for key in ("name", "runs", "track"):
        del values[key]
    text = write_yaml(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys whose values differ between two nested dictionaries."""
    keys: list[str] = []
    for key in sorted(old.keys() | new.keys(), key=str):  # a dictionary may have number keys
        old_value = old.get(key)
        new_value = new.get(key)
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            keys.extend(differences(old_value, new_value, f"{prefix}{key}."))
        elif old_value != new_value:
            keys.append(f"{prefix}{key}")
    return keys


# ---- recipes


def read_recipe(recipe: str) -> tuple[dict[str, Any], set[str]]:
    """Return the values of a built-in recipe or of a YAML file, and the keys that a person set.

    Those are the keys of files outside of this package. Raises ConfigError.
    """
    if Path(recipe).suffix != ".yaml":
        return copy.deepcopy(_read_built_in(recipe)), set()
    try:
        values, given = _read_file(Path(recipe))
    except RecursionError as error:
        raise WrongValue(
            f"recipe {recipe} is nested too deeply, or builds on itself", at="recipe"
        ) from error
    is_of_run = Path(recipe).name == CONFIG_FILE  # all settings, as a run wrote them
    return values, set() if is_of_run else given


@functools.cache
def _read_built_in(recipe: str) -> dict[str, Any]:
    if recipe not in recipe_names():
        raise UnknownName(
            f"unknown recipe {recipe}; {suggest_recipe(recipe, recipe_names())}", at="recipe"
        )
    return _read_file(RECIPES / f"{recipe}.yaml")[0]


def _read_file(path: Path) -> tuple[dict[str, Any], set[str]]:
    """Return the values of a file with those of the recipes that its `defaults` name, and its keys.

    These are files of its folder or built-in recipes; without `_self_` they come first.
    """
    if not path.is_file():
        raise Unreadable(
            f"no recipe file {path}; give the path of a YAML file or the name of a built-in "
            "recipe; postgrad recipes lists them",
            at="recipe",
        )
    try:
        own = read_yaml(path.read_text())
    except YAMLError as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "").split())[:200]
        raise Damaged(f"recipe {path} is not YAML: {reason}", at="recipe") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = first_line(error, max_chars=200)
        raise Damaged(
            f"recipe {path} is not a YAML file of settings: {reason}", at="recipe"
        ) from error
    if not isinstance(own, dict):
        raise Damaged(
            f"recipe {path} is not a table of settings, such as optimizer: {{lr: 1}}", at="recipe"
        )
    bases = own.pop("defaults", [])
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise Damaged(f"recipe {path}: write defaults: [RECIPE, _self_]", at="recipe")
    values: dict[str, Any] = {}
    given = set(leaves_of(own))
    for base in bases if "_self_" in bases else [*bases, "_self_"]:
        if base == "_self_":
            values = merge(values, own)
        else:
            of_base, given_there = _read_base(path, base)
            values = merge(values, of_base)
            given |= given_there
    return values, given


def _read_base(path: Path, base: str) -> tuple[dict[str, Any], set[str]]:
    beside = path.parent / f"{base.removesuffix('.yaml')}.yaml"
    if beside.is_file() and beside != path:
        return _read_file(beside)
    return read_recipe(base)


# ---- values


def _compose(
    values: Any,
    overrides: Sequence[Override],
    recipe: str,
    find_settings: Callable[[str], type],
    complete: bool = True,
) -> Config:
    """Return the typed configuration of a recipe's values. Raises ConfigError."""
    method = values.pop("method", None)
    if isinstance(method, str) and method:  # as on the command line, where a setting is a text
        raise WrongValue(
            f"recipe {recipe} has method: {method}, which is a section in a file; "
            f"write method: {{name: {method}}}",
            at="method",
        )
    method = method if isinstance(method, dict) else {}
    known = [*_all_keys(Config), *(f"method.{key}" for key in method)]
    of_method: list[tuple[str, Any, bool]] = []
    for key, value, is_text in map(split_override, overrides):
        if key == "method.name":
            method["name"] = value.strip("'\"") if is_text else value
        elif key.startswith("method."):
            of_method.append((key.removeprefix("method."), value, is_text))
        else:
            put(values, Config, (key, value, is_text), lambda key: _unknown(key, known))
    name = method.get("name")
    if not name:
        raise Missing(
            f"recipe {recipe} names no method; write method=NAME or method=package.module:Class, "
            "or begin a file with defaults: [grpo, _self_] to build on a recipe",
            at="method",
        )
    config = _build(Config, values, "", known, complete)
    schema = find_settings(str(name))
    known = [f"method.{key}" for key in _all_keys(schema)]
    for override in of_method:
        put(method, schema, override, lambda key: _unknown(key, known), "method.")
    config.method = _build(schema, method, "method.", known)
    config.track = list(dict.fromkeys(filter(None, config.track)))
    check_limits(config)
    if not config.name:
        label = recipe if recipe in recipe_names() else Path(recipe).stem
        config.name = f"{label}-{fingerprint(config)[:8]}"
    if ".." in Path(config.name).parts or Path(config.name).is_absolute():
        raise WrongValue(f"name={config.name} is outside of runs={config.runs}; set runs= instead")
    if any(len(part.encode()) > MAX_NAME for part in Path(config.name).parts):
        raise TooLarge(
            f"name={config.name[:20]}... has {len(config.name)} characters; "
            f"a folder's name has at most {MAX_NAME} bytes"
        )
    return config


def _build(
    schema: type, values: dict[str, Any], prefix: str, known: list[str], complete: bool = True
) -> Any:
    """Return an instance of a dataclass with these values.

    Raises ConfigError for an unknown key, a wrong type, and for required settings without a value.
    """
    missing: list[str] = []
    built = _section(schema, values, prefix, known, missing)
    if missing and complete:
        raise Missing("; ".join(missing))
    return built


def _section(
    schema: type, values: dict[str, Any], prefix: str, known: list[str], missing: list[str]
) -> Any:
    kinds = kinds_of(schema)
    for name in values:
        if name not in kinds:
            raise _unknown(f"{prefix}{name}", known)
    given: dict[str, Any] = {}
    for spec in dataclasses.fields(schema):
        key, kind = f"{prefix}{spec.name}", kinds[spec.name]
        if dataclasses.is_dataclass(kind):
            section = values.get(spec.name, {})
            if not isinstance(section, dict):
                raise _is_section(key, kind, section)  # type: ignore[arg-type]
            given[spec.name] = _section(kind, section, f"{key}.", known, missing)  # type: ignore[arg-type]
            continue
        is_given = spec.name in values
        value = values[spec.name] if is_given else _default(spec)
        if (isinstance(value, str) and value == REQUIRED) or (
            is_given and value is None and _default(spec) == REQUIRED
        ):
            missing.append(f"{key} is not set; add {key}=VALUE ({spec.metadata.get('help', '')})")
            value = "(required)"
        given[spec.name] = convert(value, kind, key)
    return schema(**given)


def _default(spec: dataclasses.Field) -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return REQUIRED if spec.default is dataclasses.MISSING else spec.default


def _is_section(key: str, kind: type, value: Any) -> ConfigError:
    text = value if isinstance(value, str) else "..."
    example = f"{key}.{dataclasses.fields(kind)[0].name}={text}"
    return WrongValue(
        f"{key} is a section, not a value; set one of its keys, e.g. {example}", at=key
    )


def _unknown(key: str, known: list[str]) -> ConfigError:
    return UnknownName(f"unknown key {key}; {suggest(key, known)}", at=key)


def _all_keys(schema: type, prefix: str = "") -> list[str]:
    """Return the dotted keys of a dataclass: its sections and all settings in them."""
    keys: list[str] = []
    for name, kind in kinds_of(schema).items():
        keys.append(f"{prefix}{name}")
        if dataclasses.is_dataclass(kind):
            keys.extend(_all_keys(kind, f"{prefix}{name}."))  # type: ignore[arg-type]
    return keys
