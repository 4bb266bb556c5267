"""Translates the arguments of a TRL config."""

import yaml

from postgrad.config.import_names import (
    TRL_AGGREGATIONS,
    TRL_DPO_LOSSES,
    TRL_NAMES,
    TRL_NOT_NEEDED,
    TRL_RECIPES,
)

# Arguments that only one of TRL's configs has.
KINDS = {
    "num_generations": "GRPOConfig",
    "reward_funcs": "GRPOConfig",
    "desirable_weight": "KTOConfig",
    "rpo_alpha": "DPOConfig",
    "precompute_ref_log_probs": "DPOConfig",
    "beta": "DPOConfig",
}
PAIR_RECIPES = ("dpo", "kto", "orpo", "simpo", "online_dpo")
# The arguments that make the number of problems per step.
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


def read_trl_yaml(text: str) -> tuple[str, dict[str, str]] | None:
    """(config's class, arguments) of a file for `trl grpo --config FILE`; None for other texts.

    The arguments say which class it is: those that only one trainer has.
    """
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return None
    if not isinstance(values, dict) or not set(TRL_NAMES) & values.keys():
        return None
    kind = next((kind for key, kind in KINDS.items() if key in values), "SFTConfig")
    settings = {str(key): str(value) for key, value in values.items() if value is not None}
    return kind, settings


def translate_trl(kind: str, settings: dict[str, str]) -> tuple[str, dict[str, str], list[str]]:
    """(recipe, overrides, "key=value" lines without an equivalent) of a config's arguments.

    Args:
        kind: the name of the config's class, one of TRL_RECIPES.
        settings: its arguments as text.
    """
    recipe = TRL_RECIPES[kind]
    overrides = _problems_per_step(recipe, settings)
    missing: list[str] = []
    for key, value in settings.items():
        if key in TRL_NAMES:
            overrides[TRL_NAMES[key]] = value.lower() if value in ("True", "False") else value
        elif key in TRL_NOT_NEEDED or (key in BATCH and overrides):
            continue
        else:
            found = _translate_special(recipe, key, value)
            if found is None:
                missing.append(f"{key}={value}")
            else:
                overrides |= found
    return recipe, overrides, missing


def _problems_per_step(recipe: str, settings: dict[str, str]) -> dict[str, str]:
    """The problems per step of one process, if its parts are plain numbers."""
    parts = [settings.get(name, "1") for name in BATCH]
    samples = settings.get("num_generations", "8") if recipe in ("grpo", "rloo") else "1"
    is_set = any(name in settings for name in BATCH)
    if not is_set or not all(part.isdecimal() and int(part) for part in [*parts, samples]):
        return {}
    rows = int(parts[0]) * int(parts[1])
    return {"training.problems_per_step": str(max(1, rows // int(samples)))}


def _translate_special(recipe: str, key: str, value: str) -> dict[str, str] | None:
    """The overrides of an argument whose meaning depends on the config; None if it has none."""
    if key == "dataset_name":
        return {"data.train": f"hub:{value}"}
    if key == "beta":
        return _translate_beta(recipe, value)
    if key == "scale_rewards":
        return {"method.normalize_by_std": str(value not in ("False", "none")).lower()}
    if key == "loss_type" and recipe == "grpo" and value in TRL_AGGREGATIONS:
        return {"method.aggregation": TRL_AGGREGATIONS[value]}
    if key == "loss_type" and recipe == "dpo" and value in TRL_DPO_LOSSES:
        return {"method.loss": TRL_DPO_LOSSES[value]}
    if key == "loss_type" and recipe == "simpo" and value == "simpo":
        return {}
    if key == "importance_sampling_level":
        return {"token": {}, "sequence": {"method.loss": "gspo"}}.get(value)
    if key == "report_to" and value in ("none", "wandb", "tensorboard", "trackio"):
        return {} if value == "none" else {"track": value}
    return None


def _translate_beta(recipe: str, value: str) -> dict[str, str] | None:
    """`beta` is the strength of a preference loss, or the coefficient of the KL penalty."""
    if recipe in PAIR_RECIPES:
        return {"method.beta": value}
    if recipe == "gkd":
        return {"method.jsd_beta": value}
    try:
        is_on = float(value) != 0
    except ValueError:
        return None
    if not is_on:
        return {"method.kl": "none"} if recipe == "rloo" else {}
    if recipe == "rloo":  # TRL subtracts the KL from the reward
        return {"method.kl": "reward", "method.kl_estimator": "k1", "method.kl_coef": value}
    return {"method.kl": "loss", "method.kl_coef": value} if recipe == "grpo" else None
