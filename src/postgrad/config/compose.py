"""From a recipe and key=value overrides to a checked Config, or to one clear error line.

Hydra composes the recipes (their defaults lists) and parses the overrides. The typed dataclasses
of schema.py and of the methods decide which settings exist.
"""

import copy
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from postgrad.config.limits import check_limits
from postgrad.config.overrides import apply_overrides, explain_wrong_type, read_lists
from postgrad.config.schema import Config, EngineConfig
from postgrad.config.suggestions import suggest, suggest_recipe
from postgrad.errors import ConfigError, first_line

RECIPES = Path(__file__).parent / "recipes"
_HYDRA_LOCK = threading.Lock()


def recipe_names() -> list[str]:
    """Returns the names of the built-in recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def compose(
    recipe: str, overrides: list[str], find_settings: Callable[[str], type], complete: bool = True
) -> Config:
    """Returns the checked configuration of `postgrad train RECIPE key=value ...`.

    Args:
        recipe: name of a built-in recipe, or path of a YAML file.
        overrides: `key=value` settings; later ones win.
        find_settings: returns the settings dataclass of a method's name. It is called after all
            other keys were checked.
        complete: False allows that required settings are missing, to show a recipe.

    Raises:
        ConfigError: names the wrong key, its value and the nearest valid one.
    """
    config = _validate(_compose_raw(recipe, overrides), recipe, find_settings, complete)
    if recipe in recipe_names():
        record_overrides(config, overrides)
        training = config.training
        if is_overridden(training, "steps") and not is_overridden(training, "epochs"):
            training.epochs = 0.0  # the user's number of steps replaces the recipe's epochs
    return config


def known_keys(method_settings: type) -> list[str]:
    """Returns the full names of all settings, those of the method's settings class included."""
    return [*_all_keys(Config), *(f"method.{key}" for key in _all_keys(method_settings))]


def record_overrides(section: Any, overrides: list[str], prefix: str = "") -> None:
    """Records in a configuration and its sections which settings the user overrode."""
    keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    names = [field.name for field in dataclasses.fields(section)]
    section.__dict__["_overridden"] = {name for name in names if f"{prefix}{name}" in keys}
    for name in names:
        if dataclasses.is_dataclass(getattr(section, name)):
            record_overrides(getattr(section, name), overrides, f"{prefix}{name}.")


def is_overridden(section: Any, name: str) -> bool:
    """Returns whether the user overrode this setting of a built-in recipe; True if unknown."""
    return name in getattr(section, "_overridden", {name})


def from_yaml(text: str, find_settings: Callable[[str], type]) -> Config:
    """Returns the configuration that to_yaml() wrote in another process, checked again."""
    raw = OmegaConf.create(text)
    assert isinstance(raw, DictConfig), "to_yaml writes a mapping"
    return _validate(raw, "config.yaml", find_settings)


def _validate(
    raw: DictConfig, recipe: str, find_settings: Callable[[str], type], complete: bool = True
) -> Config:
    """Returns the typed configuration of raw values. Raises ConfigError."""
    method = raw.pop("method", None)
    if isinstance(method, str) and method:  # as on the command line, where a setting is a text
        raise ConfigError(
            f"recipe {recipe} has method: {method}, which is a section in a file; "
            f"write method: {{name: {method}}}"
        )
    if not isinstance(method, DictConfig) or not method.get("name"):
        raise ConfigError(
            f"recipe {recipe} names no method; write method=NAME or method=package.module:Class, "
            "or begin a file with defaults: [grpo, _self_] to build on a recipe"
        )
    if not complete:
        _fill_required(raw)
    read_lists(raw)
    known = [*_all_keys(Config), *(f"method.{key}" for key in method)]
    checked = _merge(_typed(Config), raw, "", known)
    settings_class = find_settings(str(method.name))
    known = [f"method.{key}" for key in _all_keys(settings_class)]
    settings = _merge(_typed(settings_class), method, "method.", known)
    config = _to_object(checked)
    config.method = _to_object(settings)
    check_limits(config, "")
    if not config.name:
        label = recipe if recipe in recipe_names() else Path(recipe).stem
        config.name = f"{label}-{fingerprint(config)[:8]}"
    if ".." in Path(config.name).parts or Path(config.name).is_absolute():
        raise ConfigError(f"name={config.name} is outside of runs={config.runs}; set runs= instead")
    return config


def _fill_required(raw: DictConfig) -> None:
    """Puts a placeholder where a required setting is missing."""
    for key in ("model.path", "data.train"):
        if OmegaConf.is_missing(raw, key) or OmegaConf.select(raw, key) is None:
            OmegaConf.update(raw, key, "(required)")


def compose_section(schema: type, overrides: list[str], base: dict[str, Any] | None = None) -> Any:
    """Returns a checked instance of `schema` from `base` and overrides, without a recipe.

    Raises ConfigError.
    """
    values = OmegaConf.create(base or {})
    apply_overrides(values, overrides, _section_keys(schema))
    settings = _to_object(_merge(_typed(schema), values, "", _all_keys(schema)))
    check_limits(settings, "")
    return settings


def to_yaml(config: Config | EngineConfig) -> str:
    """Returns the resolved configuration as YAML that compose() and from_yaml() read."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def fingerprint(config: Config) -> str:
    """Returns a hash of every setting except the run's name, folder and tracker."""
    values = dataclasses.asdict(config)
    for key in ("name", "runs", "track"):
        del values[key]
    text = OmegaConf.to_yaml(OmegaConf.create(values), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns the dotted keys whose values differ between two nested dictionaries."""
    keys: list[str] = []
    for key in sorted(old.keys() | new.keys(), key=str):  # a dictionary may have number keys
        old_value = old.get(key)
        new_value = new.get(key)
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            keys.extend(differences(old_value, new_value, f"{prefix}{key}."))
        elif old_value != new_value:
            keys.append(f"{prefix}{key}")
    return keys


def _compose_raw(recipe: str, overrides: list[str]) -> DictConfig:
    """Returns the untyped values of a recipe with overrides, composed by Hydra."""
    from hydra.errors import HydraException
    from yaml import YAMLError

    try:
        if Path(recipe).suffix == ".yaml":
            composed = _compose_file(Path(recipe))
        else:
            composed = copy.deepcopy(_compose_built_in(recipe))
        apply_overrides(composed, overrides, _section_keys(Config))
        OmegaConf.resolve(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe {recipe}: {first_line(error)}") from error
    except YAMLError as error:
        reason = " ".join(str(error).replace(f'in "{recipe}", ', "").split())[:200]
        raise ConfigError(f"recipe {recipe} is not YAML: {reason}") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:  # what OmegaConf lets through
        reason = first_line(error, max_chars=200)
        raise ConfigError(f"recipe {recipe} is not a YAML file of settings: {reason}") from error
    OmegaConf.set_struct(composed, False)
    return composed


@functools.cache  # Hydra takes 0.1 s per recipe
def _compose_built_in(recipe: str) -> DictConfig:
    """Returns the values of a built-in recipe. Callers must copy them before they change them."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    if recipe not in recipe_names():
        raise ConfigError(f"unknown recipe {recipe}; {suggest_recipe(recipe, recipe_names())}")
    with _own_hydra(), initialize_config_module("postgrad.config.recipes", version_base="1.3"):
        return hydra_compose(recipe)


def _compose_file(path: Path) -> DictConfig:
    """Returns the values of a user's YAML file, which may build on built-in recipes."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    if not path.is_file():
        raise ConfigError(
            f"no recipe file {path}; give the path of a YAML file or the name of a built-in "
            "recipe; postgrad recipes lists them"
        )
    search_path = "hydra.searchpath=[pkg://postgrad.config.recipes]"
    with _own_hydra(), initialize_config_dir(str(path.parent.resolve()), version_base="1.3"):
        return hydra_compose(path.stem, overrides=[search_path])


@functools.lru_cache(maxsize=64)
def _typed(schema: type) -> DictConfig:
    """Returns the typed defaults of a dataclass. Callers must not change them.

    Raises ConfigError for a field of a type that a setting cannot have.
    """
    try:
        return OmegaConf.structured(schema)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"a field of {schema.__name__} cannot be a setting: {first_line(error)}; settings are "
            "bool, int, float, str, None, and lists and dicts of these"
        ) from error


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Uses Hydra alone: its state is global, and a user's program may use Hydra itself."""
    from hydra.core.global_hydra import GlobalHydra

    with _HYDRA_LOCK:
        state = GlobalHydra.instance()
        users = state.hydra
        state.hydra = None
        try:
            yield
        finally:
            GlobalHydra.instance().hydra = users


def _merge(schema: DictConfig, values: DictConfig, prefix: str, known: list[str]) -> DictConfig:
    """Returns `schema` with `values`. Raises ConfigError for unknown, wrong or missing keys."""
    for key in _value_keys(values):
        _check_key(schema, values, key, prefix, known)
    try:
        merged = OmegaConf.merge(schema, values)
    except (ValidationError, ConfigKeyError, OmegaConfBaseException) as error:
        key = f"{prefix}{error.full_key}" if error.full_key else prefix.rstrip(".")
        raise ConfigError(explain_wrong_type(key, error)) from error
    assert isinstance(merged, DictConfig)
    schema_class: Any = OmegaConf.get_type(schema)
    missing_keys = OmegaConf.missing_keys(merged)
    missing = [
        f"{prefix}{key} is not set; add {prefix}{key}=VALUE ({_help_of(schema_class, key)})"
        for key in _all_keys(schema_class)
        if key in missing_keys
    ]
    if missing:
        raise ConfigError("; ".join(missing))
    return merged


def _check_key(
    schema: DictConfig, values: DictConfig, key: str, prefix: str, known: list[str]
) -> None:
    """Raises ConfigError if the key is a section or does not exist."""
    full_key = f"{prefix}{key}"
    if isinstance(schema.get(key), DictConfig):
        value = values.get(key) if isinstance(values.get(key), str) else "..."
        example = f"{full_key}.{next(iter(schema[key]), 'NAME')}={value}"
        raise ConfigError(
            f"{full_key} is a section, not a value; set one of its keys, e.g. {example}"
        )
    if _is_in_dictionary(schema, key) or full_key in known:
        return
    if not any(name.startswith(f"{full_key}.") for name in known):
        raise ConfigError(f"unknown key {full_key}; {suggest(full_key, known)}")


def _to_object(config: DictConfig) -> Any:
    try:
        return OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is not set; add {error.full_key}=VALUE") from error


def _is_in_dictionary(schema: DictConfig, key: str) -> bool:
    """Returns whether the key is inside a setting that is a dictionary with free names."""
    parent = OmegaConf.select(schema, key.rpartition(".")[0]) if "." in key else None
    return isinstance(parent, DictConfig) and OmegaConf.get_type(parent) is dict


def _all_keys(schema: type, prefix: str = "") -> list[str]:
    """Returns the dotted keys of a dataclass: its sections and all settings in them."""
    keys: list[str] = []
    for spec in dataclasses.fields(schema):
        keys.append(f"{prefix}{spec.name}")
        if dataclasses.is_dataclass(spec.type):
            keys.extend(_all_keys(spec.type, f"{prefix}{spec.name}."))  # type: ignore[arg-type]
    return keys


def _section_keys(schema: type) -> list[str]:
    """Returns the dotted keys of a dataclass that have settings below them."""
    keys = _all_keys(schema)
    return [key for key in keys if any(other.startswith(f"{key}.") for other in keys)]


def _value_keys(values: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yields the dotted key of each value that is not a section."""
    for key in values:
        node = values._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from _value_keys(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _help_of(schema: type, key: str) -> str:
    """Returns the help text of a dotted key."""
    section, _, rest = key.partition(".")
    specs = {spec.name: spec for spec in dataclasses.fields(schema)}
    if rest:
        return _help_of(specs[section].type, rest)  # type: ignore[arg-type]
    return specs[section].metadata.get("help", "")
