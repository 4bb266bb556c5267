"""From a recipe and key=value overrides to a checked Config, or to one clear error line.

Hydra composes the recipes (their defaults lists) and parses the overrides. The typed dataclasses
of schema.py and of the methods decide which settings exist.
"""

import dataclasses
import difflib
import hashlib
import math
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import ConfigError, did_you_mean

RECIPES = Path(__file__).parent / "recipes"

# The last part of a setting's name in TRL, verl or transformers -> the setting here.
FOREIGN_NAMES = {
    "learning_rate": "optimizer.lr",
    "grad_clip": "optimizer.max_grad_norm",
    "clip_grad": "optimizer.max_grad_norm",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "n": "rollout.samples",
    "num_generations": "rollout.samples",
    "max_completion_length": "rollout.max_response_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "truncation": "data.overlong",
    "filter_overlong_prompts": "data.overlong",
    "train_files": "data.train",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "val_files": "data.validation",
    "batch_size": "training.problems_per_step",
    "train_batch_size": "training.problems_per_step",
    "per_device_train_batch_size": "training.problems_per_step",
    "ppo_micro_batch_size_per_gpu": "training.token_budget",
    "gradient_accumulation_steps": "training.token_budget",
    "num_iterations": "training.updates_per_step",
    "ppo_mini_batch_size": "training.updates_per_step",
    "max_steps": "training.steps",
    "total_training_steps": "training.steps",
    "epochs": "training.steps",
    "num_train_epochs": "training.steps",
    "total_epochs": "training.steps",
    "save_steps": "training.checkpoint_every",
    "save_freq": "training.checkpoint_every",
    "eval_steps": "training.validate_every",
    "test_freq": "training.validate_every",
    "output_dir": "runs",
    "default_local_dir": "runs",
    "run_name": "name",
    "experiment_name": "name",
    "report_to": "track",
    "logger": "track",
    "model_name_or_path": "model.path",
    "gradient_checkpointing": "model.activation_checkpointing",
    "enable_gradient_checkpointing": "model.activation_checkpointing",
    "reward_funcs": "reward.verifier",
    "beta": "method.kl_coef (of dpo: method.beta)",
    "epsilon": "method.clip_low",
    "epsilon_high": "method.clip_high",
    "clip_ratio_low": "method.clip_low",
    "clip_ratio_high": "method.clip_high",
    "kl_loss_coef": "method.kl_coef",
    "entropy_coeff": "method.entropy_coef",
    "adv_estimator": "method.advantage",
    "loss_type": "method.aggregation",
    "loss_agg_mode": "method.aggregation",
}


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
    return config


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
    if not isinstance(method, DictConfig) or not method.get("name"):
        raise ConfigError(
            f"recipe {recipe} names no method; write method=NAME or method=package.module:Class"
        )
    if not complete:
        _fill_required(raw)
    known = [*_all_keys(Config), *(f"method.{key}" for key in method)]
    checked = _merge(OmegaConf.structured(Config), raw, "", known)
    settings_class = find_settings(str(method.name))
    known = [f"method.{key}" for key in _all_keys(settings_class)]
    settings = _merge(OmegaConf.structured(settings_class), method, "method.", known)
    config = _to_object(checked)
    config.method = _to_object(settings)
    _check_limits(config, "")
    if not config.name:
        label = recipe if recipe in recipe_names() else Path(recipe).stem
        config.name = f"{label}-{fingerprint(config)[:8]}"
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
    from hydra.core.override_parser.overrides_parser import OverridesParser

    values = OmegaConf.create(base or {})
    for override in overrides:
        parsed = OverridesParser.create().parse_override(_to_hydra(override))
        OmegaConf.update(values, parsed.key_or_group, parsed.value())
    settings = _to_object(_merge(OmegaConf.structured(schema), values, "", _all_keys(schema)))
    _check_limits(settings, "")
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
    for key in sorted(old.keys() | new.keys()):
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

    hydra_overrides = [_to_hydra(override) for override in overrides]
    try:
        composed = _run_hydra(recipe, hydra_overrides)
        OmegaConf.resolve(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe {recipe}: {_first_line(error)}") from error
    except YAMLError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"recipe {recipe} is not YAML: {reason}") from error
    OmegaConf.set_struct(composed, False)
    return composed


def _run_hydra(recipe: str, overrides: list[str]) -> DictConfig:
    """Composes a built-in recipe, or a YAML file that may build on built-in recipes."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir, initialize_config_module

    path = Path(recipe)
    if path.suffix != ".yaml":
        if recipe not in recipe_names():
            raise ConfigError(f"unknown recipe {recipe}; {did_you_mean(recipe, recipe_names())}")
        with initialize_config_module("postgrad.config.recipes", version_base="1.3"):
            return hydra_compose(recipe, overrides=overrides)
    if not path.is_file():
        raise ConfigError(
            f"no recipe file {recipe}; give the path of a YAML file or the name of a built-in "
            "recipe; postgrad recipes lists them"
        )
    search_path = "hydra.searchpath=[pkg://postgrad.config.recipes]"
    with initialize_config_dir(str(path.parent.resolve()), version_base="1.3"):
        return hydra_compose(path.stem, overrides=[search_path, *overrides])


def _to_hydra(override: str) -> str:
    """Returns a `key=value` override in Hydra's grammar, as `++key=value`. Raises ConfigError.

    `++` sets the key whether or not the recipe has it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, value = _split_override(override)
    parser = OverridesParser.create()
    try:
        parsed = parser.parse_override(f"++{key}={value}")
    except HydraException as error:
        quoted = _quote(value)
        if quoted is None:
            raise ConfigError(
                f"{key}={value}: {_first_line(error)}; put the value into quotes: '{key}=\"...\"'"
            ) from error
        value = quoted
        parsed = parser.parse_override(f"++{key}={value}")
    if parsed.is_sweep_override():
        raise ConfigError(
            f"{key}={value}: one value is needed, this is a sweep; start one run per value, "
            "or quote a value with commas: key='\"a,b\"'"
        )
    return f"++{key}={value}"


def _split_override(override: str) -> tuple[str, str]:
    """Returns key and value, with short forms such as method=NAME expanded. Raises ConfigError."""
    key, equals, value = override.lstrip("+").partition("=")
    if not equals or not key or override.startswith("~"):
        hint = "to unset a key write key=null"
        if override.startswith("--"):
            hint = "settings have no dashes"
        raise ConfigError(f"expected key=value, got {override!r}; {hint}")
    if key.split(".")[0] == "hydra":  # Hydra would accept it silently
        raise ConfigError(f"unknown key {key}; Hydra's own settings have no effect here")
    if key == "method":
        return "method.name", f"'{value}'"
    if key == "cluster":
        key = "cluster.backend"
    is_url = value.startswith(("http://", "https://"))
    if is_url and "'" not in value:  # Hydra would read "#" as the start of a comment
        value = f"'{value}'"
    return key, value


def _quote(value: str) -> str | None:
    """Returns a value that Hydra cannot parse as a quoted string, or as a list of them.

    Examples: brief(limit=100), file.json#name, [training.steps=3]. The type of the setting then
    decides whether a string is allowed. None if the value has quotes, braces or inner brackets.
    """
    is_list = value.startswith("[") and value.endswith("]")
    inner = value[1:-1] if is_list else value
    if any(character in inner for character in "'\"[]{}\\"):
        return None
    if not is_list:
        return f"'{inner}'"
    items = [f"'{item.strip()}'" for item in inner.split(",")]
    return f"[{','.join(items)}]"


def _merge(schema: DictConfig, values: DictConfig, prefix: str, known: list[str]) -> DictConfig:
    """Returns `schema` with `values`. Raises ConfigError for unknown, wrong or missing keys."""
    for key in _value_keys(values):
        _check_key(schema, values, key, prefix, known)
    try:
        merged = OmegaConf.merge(schema, values)
    except (ValidationError, ConfigKeyError, OmegaConfBaseException) as error:
        key = f"{prefix}{error.full_key}" if error.full_key else prefix.rstrip(".")
        raise ConfigError(f"{key or 'configuration'}: {_first_line(error)}") from error
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
        example = f"{full_key}.{next(iter(schema[key]))}={value}"
        raise ConfigError(
            f"{full_key} is a section, not a value; set one of its keys, e.g. {example}"
        )
    if _is_in_dictionary(schema, key) or full_key in known:
        return
    if not any(name.startswith(f"{full_key}.") for name in known):
        raise ConfigError(f"unknown key {full_key}; {_suggest(full_key, known)}")


def _to_object(config: DictConfig) -> Any:
    try:
        return OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is not set; add {error.full_key}=VALUE") from error


def _is_in_dictionary(schema: DictConfig, key: str) -> bool:
    """Returns whether the key is inside a setting that is a dictionary with free names."""
    parent = OmegaConf.select(schema, key.rpartition(".")[0]) if "." in key else None
    return isinstance(parent, DictConfig) and OmegaConf.get_type(parent) is dict


def _suggest(key: str, known: list[str]) -> str:
    """Returns a hint for an unknown key.

    In this order: a known key with the same last part, the name of another trainer, a similar
    spelling, all keys of the section.
    """
    section, _, leaf = key.rpartition(".")
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if same_leaf:
        return f"did you mean {same_leaf[0]}?"
    foreign = FOREIGN_NAMES.get(leaf, "")
    if foreign in known or foreign.startswith("method."):
        return f"the nearest here is {foreign}"
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    similar = difflib.get_close_matches(leaf, siblings, n=1)
    if similar:
        return f"did you mean {section}.{similar[0]}?" if section else f"did you mean {similar[0]}?"
    if section and siblings:
        return f"known in {section}: {', '.join(siblings)}"
    return did_you_mean(key, known)


def _all_keys(schema: type, prefix: str = "") -> list[str]:
    """Returns the dotted keys of a dataclass: its sections and all settings in them."""
    keys: list[str] = []
    for spec in dataclasses.fields(schema):
        keys.append(f"{prefix}{spec.name}")
        if dataclasses.is_dataclass(spec.type):
            keys.extend(_all_keys(spec.type, f"{prefix}{spec.name}."))  # type: ignore[arg-type]
    return keys


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


# bound -> (test that a number breaks it, words of the error)
BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "at_least": (operator.lt, "at least"),
    "above": (operator.le, "above"),
    "at_most": (operator.gt, "at most"),
}


def _check_limits(section: Any, prefix: str) -> None:
    """Raises ConfigError for the first setting outside its choices or bounds."""
    for spec in dataclasses.fields(section):
        key = f"{prefix}{spec.name}"
        value = getattr(section, spec.name)
        if dataclasses.is_dataclass(value):
            _check_limits(value, f"{key}.")
            continue
        _check_choice(key, value, spec.metadata)
        for bound in BOUNDS:
            if spec.metadata.get(bound) is not None:
                _check_bound(key, value, bound, spec.metadata[bound])


def _check_choice(key: str, value: Any, limits: Any) -> None:
    choices = limits.get("choices")
    if not choices or value in choices:
        return
    if limits.get("or_path") and ":" in str(value):
        return
    raise ConfigError(
        f"{key}={value} is not one of its values; {did_you_mean(str(value), choices)}"
    )


def _check_bound(key: str, value: Any, bound: str, limit: float) -> None:
    """Checks a number, each number of a list, or nothing if the value is None."""
    breaks, words = BOUNDS[bound]
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if number is not None and (math.isnan(number) or breaks(number, limit)):
            raise ConfigError(f"{key}={value} is out of range; it must be {words} {limit:g}")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
