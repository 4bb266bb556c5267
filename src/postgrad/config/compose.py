"""From a recipe and key=value words to a checked Config, or one clear line.

Hydra composes the recipes (their defaults lists) and parses the words; the typed dataclasses decide what is a setting.
"""

import dataclasses
import difflib
import hashlib
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

# Last words of settings as TRL, verl and transformers have them -> ours, to help those who come from there.
ELSEWHERE = {
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
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def compose(
    recipe: str, overrides: list[str], find_settings: Callable[[str], type], complete: bool = True
) -> Config:
    """The checked configuration of `postgrad train RECIPE key=value ...`.

    `find_settings` gives the settings dataclass of a method's name; it is called only once all other keys are known to be right.
    `complete=False` lets settings without a default stay open, to show a recipe.
    Raises ConfigError that names the key, the value and the nearest right one.
    """
    config = _checked(_compose_raw(recipe, overrides), recipe, find_settings, complete)
    if recipe in recipe_names():
        mark_written(config, overrides)
    return config


def mark_written(part: Any, overrides: list[str], prefix: str = "") -> None:
    """Note in a configuration and its sections which of their settings the words name, for `written`: the others are the recipe's."""
    keys = {word.lstrip("+").partition("=")[0] for word in overrides}
    fields = [field.name for field in dataclasses.fields(part)]
    part.__dict__["_written"] = {name for name in fields if f"{prefix}{name}" in keys}
    for name in fields:
        if dataclasses.is_dataclass(getattr(part, name)):
            mark_written(getattr(part, name), overrides, f"{prefix}{name}.")


def written(settings: Any, name: str) -> bool:
    """Whether somebody wrote this setting beside a recipe of the package; True where that is not known."""
    return name in getattr(settings, "_written", {name})


def from_yaml(text: str, find_settings: Callable[[str], type]) -> Config:
    """The configuration that to_yaml() wrote, checked again: for a process that got it from another one, without a file in between."""
    raw = OmegaConf.create(text)
    assert isinstance(raw, DictConfig), "to_yaml writes a mapping"
    return _checked(raw, "config.yaml", find_settings)


def _checked(
    raw: DictConfig, recipe: str, find_settings: Callable[[str], type], complete: bool = True
) -> Config:
    method = raw.pop("method", None)
    if not isinstance(method, DictConfig) or not method.get("name"):
        raise ConfigError(
            f"recipe {recipe} names no method; write method=NAME or method=package.module:Class"
        )
    if not complete:
        for key in ("model.path", "data.train"):
            if OmegaConf.is_missing(raw, key) or OmegaConf.select(raw, key) is None:
                OmegaConf.update(raw, key, "???(you say)")
    checked = _merge(
        OmegaConf.structured(Config),
        raw,
        "",
        [*_keys(Config), *(f"method.{key}" for key in method)],
    )
    settings_class = find_settings(str(method.name))
    settings = _merge(
        OmegaConf.structured(settings_class),
        method,
        "method.",
        [f"method.{key}" for key in _keys(settings_class)],
    )
    config = _to_object(checked)
    config.method = _to_object(settings)
    _check_limits(config, "")
    if not config.name:
        label = recipe if recipe in recipe_names() else Path(recipe).stem
        config.name = f"{label}-{fingerprint(config)[:8]}"
    return config


def read_words(schema: type, overrides: list[str], base: dict[str, Any] | None = None) -> Any:
    """A checked settings dataclass from key=value words alone, over the values of `base`; for commands that run no recipe."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    values = OmegaConf.create(base or {})
    for word in overrides:
        parsed = OverridesParser.create().parse_override(_override(word))
        OmegaConf.update(values, parsed.key_or_group, parsed.value())
    settings = _to_object(_merge(OmegaConf.structured(schema), values, "", _keys(schema)))
    _check_limits(settings, "")
    return settings


def to_yaml(config: Config | EngineConfig) -> str:
    """The resolved configuration as YAML that compose() reads again."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def fingerprint(config: Config) -> str:
    """A hash of every setting but the run's name, place and mirrors."""
    values = dataclasses.asdict(config)
    del values["name"], values["runs"], values["track"]
    return hashlib.blake2b(
        OmegaConf.to_yaml(OmegaConf.create(values), sort_keys=True).encode(), digest_size=16
    ).hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two plain configurations."""
    out: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out.extend(differences(a, b, f"{prefix}{key}."))
        elif a != b:
            out.append(f"{prefix}{key}")
    return out


def _compose_raw(recipe: str, overrides: list[str]) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir, initialize_config_module
    from hydra.errors import HydraException
    from yaml import YAMLError

    overrides = [_override(word) for word in overrides]
    path = Path(recipe)
    is_file = path.suffix == ".yaml"
    if is_file and not path.is_file():
        raise ConfigError(
            f"no recipe file {recipe}; give its path, or a built-in one by name: postgrad recipes lists them"
        )
    if not is_file and recipe not in recipe_names():
        raise ConfigError(f"unknown recipe {recipe}; {did_you_mean(recipe, recipe_names())}")
    try:
        if is_file:
            with initialize_config_dir(str(path.parent.resolve()), version_base="1.3"):
                search = ["hydra.searchpath=[pkg://postgrad.config.recipes]"]
                composed = hydra_compose(path.stem, overrides=[*search, *overrides])
        else:
            with initialize_config_module("postgrad.config.recipes", version_base="1.3"):
                composed = hydra_compose(recipe, overrides=overrides)
        OmegaConf.resolve(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe {recipe}: {_first_line(error)}") from error
    except YAMLError as error:
        raise ConfigError(
            f"recipe {recipe} is not YAML: {' '.join(str(error).split())[:300]}"
        ) from error
    OmegaConf.set_struct(composed, False)
    return composed


def _override(word: str) -> str:
    """One key=value word in Hydra's grammar, always as 'set, whether or not the recipe mentions it'."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = word.lstrip("+").partition("=")
    if not equals or not key or word.startswith("~"):
        hint = (
            "settings have no dashes" if word.startswith("--") else "to unset a key write key=null"
        )
        raise ConfigError(f"expected key=value, got {word!r}; {hint}")
    if key.split(".")[0] == "hydra":  # Hydra would take it silently
        raise ConfigError(f"unknown key {key}; Hydra's own settings have no effect here")
    if key == "method":
        key, value = "method.name", f"'{value}'"
    if key == "cluster":
        key = "cluster.backend"
    if (
        value.startswith(("http://", "https://")) and "'" not in value
    ):  # an address with its # is one value, quoted or not
        value = f"'{value}'"
    try:
        parsed = OverridesParser.create().parse_override(f"++{key}={value}")
    except HydraException as error:
        if (text := _as_text(value)) is None:
            raise ConfigError(
                f"{key}={value}: {_first_line(error)}; put the value into quotes: '{key}=\"...\"'"
            ) from error
        value, parsed = text, OverridesParser.create().parse_override(f"++{key}={text}")
    if parsed.is_sweep_override():
        hint = "start one run for each value, or quote a value with commas: key='\"a,b\"'"
        raise ConfigError(f"{key}={value}: one value is needed, this is a sweep; {hint}")
    return f"++{key}={value}"


def _as_text(value: str) -> str | None:
    """A value that Hydra's grammar cannot read, such as brief(limit=100), file.json#name or [training.steps=3], in quotes.

    The type of the setting then decides whether it may be a text. None where the value has quotes, braces or inner brackets of its own.
    """
    is_list = value.startswith("[") and value.endswith("]")
    inner = value[1:-1] if is_list else value
    if any(mark in inner for mark in "'\"[]{}\\"):
        return None
    return (
        "[" + ",".join(f"'{part.strip()}'" for part in inner.split(",")) + "]"
        if is_list
        else f"'{inner}'"
    )


def _merge(schema: DictConfig, values: DictConfig, prefix: str, known: list[str]) -> DictConfig:
    for key in _dotted(values):
        if isinstance(schema.get(key), DictConfig):
            value = values.get(key) if isinstance(values.get(key), str) else "..."
            raise ConfigError(
                f"{prefix}{key} is a section, not a value; set one of its keys, e.g. {prefix}{key}.{next(iter(schema[key]))}={value}"
            )
        if (
            not _is_free(schema, key)
            and f"{prefix}{key}" not in known
            and not any(name.startswith(f"{prefix}{key}.") for name in known)
        ):
            raise ConfigError(f"unknown key {prefix}{key}; {_nearest(f'{prefix}{key}', known)}")
    try:
        merged = OmegaConf.merge(schema, values)
    except (ValidationError, ConfigKeyError, OmegaConfBaseException) as error:
        key = (
            f"{prefix}{error.full_key}"
            if error.full_key
            else (prefix.rstrip(".") or "configuration")
        )
        raise ConfigError(f"{key}: {_first_line(error)}") from error
    assert isinstance(merged, DictConfig)
    kind: Any = OmegaConf.get_type(schema)
    if missing := [key for key in _keys(kind) if key in OmegaConf.missing_keys(merged)]:
        told = "; ".join(
            f"{prefix}{key} is not set; add {prefix}{key}=VALUE ({_help_of(schema, key)})"
            for key in missing
        )
        raise ConfigError(told)
    return merged


def _to_object(config: DictConfig) -> Any:
    try:
        return OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is not set") from error


def _is_free(schema: DictConfig, key: str) -> bool:
    """Whether the key lies in a setting that is a dictionary of the user's own names."""
    parent = OmegaConf.select(schema, key.rpartition(".")[0]) if "." in key else None
    return isinstance(parent, DictConfig) and OmegaConf.get_type(parent) is dict


def _nearest(key: str, known: list[str]) -> str:
    """The nearest known key: first one with the same last word, then what other trainers call so, then one spelled alike."""
    leaf = key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == leaf]
    if same:
        return f"did you mean {same[0]}?"
    if (ours := ELSEWHERE.get(leaf, "")) in known or ours.startswith("method."):
        return f"the nearest here is {ours}"
    section = key.rpartition(".")[0]
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    if near := difflib.get_close_matches(leaf, siblings, n=1):
        return f"did you mean {section}.{near[0]}?" if section else f"did you mean {near[0]}?"
    return (
        f"known in {section}: {', '.join(siblings)}"
        if section and siblings
        else did_you_mean(key, known)
    )


def _keys(schema: type, prefix: str = "") -> list[str]:
    out: list[str] = []
    for spec in dataclasses.fields(schema):
        out.append(f"{prefix}{spec.name}")
        if dataclasses.is_dataclass(spec.type):
            out.extend(_keys(spec.type, f"{prefix}{spec.name}."))  # type: ignore[arg-type]
    return out


def _dotted(values: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in values:
        node = values._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from _dotted(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _help_of(schema: DictConfig, key: str) -> str:
    kind: Any = OmegaConf.get_type(schema)
    text = ""
    for part in key.split("."):
        spec = {f.name: f for f in dataclasses.fields(kind)}[part]
        kind, text = spec.type, spec.metadata.get("help", "")
    return text


def _check_limits(section: Any, prefix: str) -> None:
    for spec in dataclasses.fields(section):
        value, key = getattr(section, spec.name), f"{prefix}{spec.name}"
        if dataclasses.is_dataclass(value):
            _check_limits(value, f"{key}.")
            continue
        limits = spec.metadata
        is_path = limits.get("or_path") and ":" in str(value)
        if limits.get("choices") and value not in limits["choices"] and not is_path:
            raise ConfigError(
                f"{key}={value} is not one of its values; {did_you_mean(str(value), limits['choices'])}"
            )
        for bound, wrong, word in (
            ("at_least", lambda v, b: v < b, "at least"),
            ("above", lambda v, b: v <= b, "above"),
            ("at_most", lambda v, b: v > b, "at most"),
        ):
            limit = limits.get(bound)
            numbers = (
                []
                if limit is None or value is None
                else value
                if isinstance(value, list)
                else [value]
            )
            if any(number != number or wrong(number, limit) for number in numbers):
                raise ConfigError(f"{key}={value} is out of range; it must be {word} {limit:g}")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
