"""Arguments of TRL's configs whose values decide what becomes of them: schedules, intervals, data.

`prepare_arguments` leaves those out that change nothing, and translates what is no plain name.
"""

import math
from typing import Any

import yaml

from postgrad.config.import_result import lower_bool
from postgrad.config.import_trl_losses import plain

# Values that mean the same as no argument, in TRL 1.16 and here: its defaults, mostly.
NEUTRAL = {
    "repetition_penalty": ("1.0", "1"),
    "top_entropy_quantile": ("1.0", "1"),
    "use_adaptive_entropy": ("False",),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "f_divergence_type": ("reverse_kl",),
    "normalize_advantages": ("False",),
    "label_smoothing": ("0.0", "0"),
    "label_smoothing_factor": ("0.0", "0"),
    "neftune_noise_alpha": ("0", "0.0"),
    "truncation_mode": ("keep_start",),
    "model_revision": ("main",),
    "load_in_8bit": ("False",),
    "load_in_4bit": ("False",),
    "bnb_4bit_quant_type": ("nf4",),
    "use_bnb_nested_quant": ("False",),
    "use_rslora": ("False",),
    "use_dora": ("False",),
    "push_to_hub": ("False",),
    "load_best_model_at_end": ("False",),
    "dataloader_drop_last": ("False",),
    "full_determinism": ("False",),
    "auto_find_batch_size": ("False",),
    "eval_on_start": ("False",),
    "train_sampling_strategy": ("random",),
    "group_by_length": ("False",),
    "disable_dropout": ("True",),
    "packing": ("False",),
    "eval_packing": ("False",),
    "cast_lm_head_to_fp32": ("False",),
    "average_tokens_across_devices": ("True",),
    "vllm_importance_sampling_correction": ("True",),
    "dataset_streaming": ("False",),
    "dataset_train_split": ("train",),
    "resume_from_checkpoint": ("False",),
    "lr_scheduler_kwargs": ("{}",),
    "model_init_kwargs": ("{}",),
    "chat_template_kwargs": ("{}",),
}
_LR_KEYS = {"min_lr", "min_lr_rate"}
_SAMPLED = ("grpo", "rloo")


def prepare_arguments(
    recipe: str, settings: dict[str, str]
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """(arguments that are left, overrides, lines) of a config's arguments."""
    settings = dict(_without_negation(key, value) for key, value in settings.items())
    settings = {key: value for key, value in settings.items() if not _is_neutral(key, value)}
    overrides: dict[str, str] = {}
    lines: list[str] = []
    _open_model_kwargs(settings)
    _translate_schedule(settings, overrides, lines)
    _translate_intervals(settings, lines)
    _translate_data(recipe, settings, overrides)
    if settings.pop("load_in_4bit", None) is not None:
        overrides["model.quantization"] = "4bit"
    return settings, overrides, lines


def _without_negation(key: str, value: str) -> tuple[str, str]:
    """`--no_NAME` of a command line is NAME=False."""
    is_negated = key.startswith("no_") and value == ""
    return (key.removeprefix("no_"), "False") if is_negated else (key, value)


def _is_neutral(key: str, value: str) -> bool:
    values = NEUTRAL.get(key, ())
    return value in values or value.capitalize() in values


def _open_model_kwargs(settings: dict[str, str]) -> None:
    """Replaces `model_init_kwargs` by its entries, which are arguments of their own elsewhere."""
    entries = read_dict(settings.get("model_init_kwargs", ""))
    if entries is None:
        return
    del settings["model_init_kwargs"]
    for key, value in entries.items():
        name = {"revision": "model_revision"}.get(key, key)
        if not _is_neutral(name, str(value)):
            settings.setdefault(name, str(value))


def _translate_schedule(
    settings: dict[str, str], overrides: dict[str, str], lines: list[str]
) -> None:
    """The warm-up, which may be a share of all steps, and the end of the cosine."""
    kind = settings.get("lr_scheduler_type", "linear")
    for name in ("warmup_steps", "warmup_ratio"):
        if name in settings and kind == "constant" and settings[name] not in ("0", "0.0"):
            value = settings.pop(name)
            lines.append(f"{name}={value}: transformers' schedule constant has no warm-up")
    if kind == "constant":
        overrides["optimizer.warmup_steps"] = "0"  # a recipe here may have a warm-up
    if _is_share(settings.get("warmup_steps", "")):
        settings["warmup_ratio"] = settings.pop("warmup_steps")
    entries = read_dict(settings.get("lr_scheduler_kwargs", ""))
    if entries is None or kind != "cosine_with_min_lr" or not set(entries) <= _LR_KEYS:
        return
    try:
        ratio = float(entries.get("min_lr_rate") or 0)
        if entries.get("min_lr") is not None:
            ratio = float(entries["min_lr"]) / float(settings["learning_rate"])
    except (KeyError, ValueError, TypeError, ZeroDivisionError):
        return
    del settings["lr_scheduler_kwargs"]
    overrides["optimizer.final_lr_ratio"] = plain(ratio)


def _translate_intervals(settings: dict[str, str], lines: list[str]) -> None:
    """Intervals of checkpoints and validations, which may be shares of all steps or epochs."""
    if "evaluation_strategy" in settings:
        settings.setdefault("eval_strategy", settings.pop("evaluation_strategy"))
    steps = settings.get("max_steps", "")
    for name, here in (("save", "checkpoint_every"), ("eval", "validate_every")):
        strategy = settings.get(f"{name}_strategy", "steps")
        value = settings.get(f"{name}_steps", "")
        if strategy != "steps":
            settings.pop(f"{name}_steps", None)
        elif _is_share(value) and steps.isdecimal():
            settings[f"{name}_steps"] = str(math.ceil(int(steps) * float(value)))
        elif _is_share(value):
            del settings[f"{name}_steps"]
            lines.append(f"{name}_steps={value}: training.{here} is a number of steps")
        if strategy not in ("steps", "no"):
            lines.append(f"{name}_strategy={strategy}: training.{here} is a number of steps")


def _translate_data(recipe: str, settings: dict[str, str], overrides: dict[str, str]) -> None:
    """The data set's splits, its order, and variables of the chat template."""
    name = settings.pop("dataset_name", "")
    if name:
        is_hub = ":" not in name and "(" not in name
        split = settings.pop("dataset_train_split", "") if is_hub else ""
        overrides["data.train"] = f"hub:{name}:{split}" if split else f"hub:{name}"
        is_evaluated = settings.get("eval_strategy", "no") != "no"
        if is_hub and is_evaluated:
            split = settings.pop("dataset_test_split", "test")
            overrides["data.validation"] = f"hub:{name}:{split}"
    if settings.get("eval_strategy", "no") == "no":
        settings.pop("dataset_test_split", None)
    if recipe in _SAMPLED and "shuffle_dataset" in settings:
        overrides["data.shuffle"] = lower_bool(settings.pop("shuffle_dataset"))
    elif settings.get("shuffle_dataset"):
        del settings["shuffle_dataset"]  # the order of the rows is random anyway
    if settings.get("train_sampling_strategy") == "sequential":
        del settings["train_sampling_strategy"]
        overrides["data.shuffle"] = "false"
    entries = read_dict(settings.get("chat_template_kwargs", ""))
    if entries and all(isinstance(value, bool | int | str) for value in entries.values()):
        del settings["chat_template_kwargs"]
        for key, value in entries.items():
            overrides[f"data.template_options.{key}"] = lower_bool(str(value))


def read_dict(value: str) -> dict[str, Any] | None:
    """The entries of a dict in Python or JSON; None for anything else."""
    if not value.startswith("{"):
        return None
    try:
        found = yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError):
        return None
    is_dict = isinstance(found, dict) and all(isinstance(key, str) for key in found)
    return found if is_dict else None


def _is_share(value: str) -> bool:
    """Whether a number of steps is a share of all steps."""
    try:
        return 0 < float(value) < 1
    except ValueError:
        return False
