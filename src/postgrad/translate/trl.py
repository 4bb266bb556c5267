"""Configs of TRL: the table has what each argument is by itself; here is what depends on several.

An argument without an equal of its own is listed. Formulas were compared with TRL 1.16.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from postgrad.translate.result import Translation, lower_bool
from postgrad.translate.table import Table, read_table, split_list

# TRL's configs and the recipes here.
RECIPES = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "RLOOConfig": "rloo",
    "GRPOConfig": "grpo",
    "KTOConfig": "kto",
    "RewardConfig": "reward_model",
}
# Arguments that only one of TRL's configs has.
_KINDS = {
    "num_generations": "GRPOConfig",
    "reward_funcs": "GRPOConfig",
    "desirable_weight": "KTOConfig",
    "rpo_alpha": "DPOConfig",
    "loss_weights": "DPOConfig",
    "precompute_ref_log_probs": "DPOConfig",
    "beta": "DPOConfig",
}
# Responses per problem that TRL samples, where a script does not say.
_SAMPLES = {"grpo": "8", "rloo": "2"}
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
# With these an update of TRL is not a step here.
_GENERATION = ("steps_per_generation", "generation_batch_size")
# TRL counts them in updates.
_IN_UPDATES = ("max_steps", "save_steps", "eval_steps", "warmup_steps")
# Sizes that are translated together: without one of them the others have no meaning.
SIZES = (*_BATCH, *_GENERATION, "num_generations", "num_iterations")
COUNTS = (*_BATCH, *_GENERATION, *_IN_UPDATES)
_DPO_LOSSES = ("sigmoid", "ipo", "hinge")
_OFF = ("0", "0.0", "False", "false")
# Arguments that the table translates, and whose meaning differs; the table says how.
_DIFFERENT = ("packing", "weight_decay", "max_length")


def read_trl_yaml(text: str) -> tuple[str, dict[str, str]] | None:
    """Return (config's class, arguments) of a file for `trl NAME --config`; None for other texts.

    The arguments say which class it is: those that only one trainer has.
    """
    values = read_yaml(text)
    if values is None or not set(read_table("trl").names) & values.keys():
        return None
    kind = next((kind for key, kind in _KINDS.items() if key in values), "SFTConfig")
    return kind, texts(values)


def read_yaml(text: str) -> dict[str, Any] | None:
    """Return a mapping that a text in YAML is; None for anything else."""
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values that are given, as texts."""
    return {str(key): str(value) for key, value in values.items() if value is not None}


def translate_trl(kind: str, settings: Mapping[str, str]) -> Translation:
    """Return the recipe and overrides that equal a config's arguments.

    Args:
        kind: the name of the config's class, one of RECIPES.
        settings: its arguments as text.
    """
    table = read_table("trl")
    result = Translation(RECIPES[kind], _given(settings, table))
    given = dict(result.settings)
    _read_sizes(result)
    _read_schedule(result)
    _read_data(result)
    _read_loss(result, table)
    _read_beta(result)
    targets = result.settings.get("lora_target_modules", "")
    if targets and not re.search(r"[*|(\\]", targets):  # a pattern
        result.take("lora_target_modules")
        result.overrides["model.lora.targets"] = ",".join(words(targets))
    trackers = [name for name in words(result.take("report_to")) if name != "none"]
    if others := result.track(trackers):
        result.miss("report_to", others, table.reason("report_to"))
    table.translate(result)
    if "rollout.max_response_tokens" in result.overrides and "max_length" in given:
        result.overrides.setdefault("data.max_prompt_tokens", given["max_length"])
    result.drop_idle()
    table.list_missing(result)
    _list_differences(result, given, table)
    return result


def _given(settings: Mapping[str, str], table: Table) -> dict[str, str]:
    """Return the arguments that are set; `--no_NAME` is False, use_peft has TRL's LoRA."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if key.startswith("no_") and value == "True":
            found[key.removeprefix("no_")] = "False"
        elif value not in ("None", ""):
            found[key] = value
    is_lora = found.pop("use_peft", "").lower()
    if is_lora == "true":
        return table.defaults["lora"] | found
    if is_lora:
        return {key: value for key, value in found.items() if not key.startswith("lora_")}
    return found


def _read_sizes(result: Translation) -> None:
    """Read the problems per step of one process. A step here is one generation there."""
    settings = result.settings
    updates = [name for name in (*_GENERATION, "num_iterations") if settings.get(name, "1") != "1"]
    for name in _IN_UPDATES if updates else ():
        if 0 < _number(settings.get(name, "")) < 1:  # a share of all
            continue
        value = result.take(name)
        if value.isdecimal() or _number(value) >= 1:
            result.miss(name, value, f"TRL counts updates, here steps; see {updates[0]}")
    steps = result.take("max_steps")
    if steps and not steps.startswith("-"):
        result.overrides["training.steps"] = steps
    if not any(name in settings for name in _BATCH) or set(updates) & set(_GENERATION):
        return
    samples = "1"
    if result.recipe in _SAMPLES:
        samples = settings.get("num_generations", _SAMPLES[result.recipe])
    sizes = [settings.get(_BATCH[0], "8"), settings.get(_BATCH[1], "1"), samples]
    if all(size.isdecimal() and int(size) for size in sizes):
        rows, accumulated, per_problem = map(int, sizes)
        problems = max(1, rows * accumulated // per_problem)
        result.overrides["training.problems_per_step"] = str(problems)
        for name in _BATCH:
            result.take(name)


def _read_schedule(result: Translation) -> None:
    """Read the warm-up, Adam's moments, and intervals."""
    settings = result.settings
    if settings.get("lr_scheduler_type") == "constant":  # has no warm-up; a recipe may have one
        for name in ("warmup_steps", "warmup_ratio"):
            result.take(name)
        result.overrides["optimizer.warmup_steps"] = "0"
    if _number(settings.get("warmup_steps", "")) > 0:  # TRL reads the ratio without steps only
        result.take("warmup_ratio")
    elif "warmup_ratio" in settings:
        result.take("warmup_steps")
    if "adam_beta1" in settings or "adam_beta2" in settings:
        betas = result.take("adam_beta1", "0.9"), result.take("adam_beta2", "0.999")
        result.overrides["optimizer.betas"] = f"[{','.join(betas)}]"
    for name in ("save", "eval"):
        if settings.get(f"{name}_strategy", "steps") != "steps":
            result.take(f"{name}_steps")


def _read_data(result: Translation) -> None:
    """Read the data set, its splits and order, and variables of the chat template."""
    settings = result.settings
    is_evaluated = settings.get("eval_strategy", "no") != "no"
    name = result.take("dataset_name")
    if name:
        is_hub = ":" not in name and "(" not in name
        split = result.take("dataset_train_split") if is_hub else ""
        is_named = split not in ("", "train")
        result.overrides["data.train"] = f"hub:{name}:{split}" if is_named else f"hub:{name}"
        if is_hub and is_evaluated:
            split = result.take("dataset_test_split", "test")
            result.overrides["data.validation"] = f"hub:{name}:{split}"
    if not is_evaluated:
        result.take("dataset_test_split")
    options = read_yaml(settings.get("chat_template_kwargs", ""))
    if options is not None:
        result.take("chat_template_kwargs")
        for option, value in options.items():
            result.overrides[f"data.template_options.{option}"] = lower_bool(str(value))
    shuffle = result.take("shuffle_dataset")
    if shuffle and result.recipe in _SAMPLES:  # the others' order of the rows is random anyway
        result.overrides["data.shuffle"] = lower_bool(shuffle)


def _read_loss(result: Translation, table: Table) -> None:
    """Read loss_type, which the recipes have as other settings, and the bounds of the ratio."""
    overrides = result.overrides
    kind = result.settings.get("loss_type", "")
    if result.recipe == "sft" and kind == "dft":
        overrides["method.loss"] = result.take("loss_type")
    elif result.recipe == "dpo" and kind in _DPO_LOSSES:
        overrides["method.loss"] = result.take("loss_type")
        if kind != "sigmoid":
            result.take("label_smoothing")  # TRL does not read it either
    elif result.recipe == "rloo" and result.settings.get("num_iterations", "1") != "1":
        reason = "TRL clips the ratio of a response; the recipe rloo has no ratio"
        result.miss("epsilon", result.take("epsilon", "0.2"), reason)
    elif result.recipe == "grpo":
        aggregation = table.choices["method.aggregation"].get(kind)
        if aggregation:
            overrides["method.aggregation"] = aggregation
            result.take("loss_type")
        low, high = result.take("epsilon"), result.take("epsilon_high")
        if result.settings.get("importance_sampling_level") == "sequence":
            result.take("importance_sampling_level")
            overrides["method.loss"] = "gspo"
            low = low or "0.2"  # gspo's defaults are others
            if bound := result.take("delta"):
                result.miss("delta", bound, "gspo has no bound besides method.clip_high")
        if low:
            overrides["method.clip_low"] = low
        if low or high:
            overrides["method.clip_high"] = high or low


def _read_beta(result: Translation) -> None:
    """Read the strength of a preference loss, or of the KL penalty.

    That of GRPO is in the loss, where TRL multiplies it by the ratio; RLOO's is in the reward.
    """
    beta = result.take("beta")
    is_corrected = result.take("use_bias_correction_kl", "True").lower() != "false"
    if not beta:
        return
    if result.recipe in ("dpo", "kto"):
        result.overrides["method.beta"] = beta
    elif result.recipe == "grpo" and _number(beta):
        result.overrides |= {"method.kl": "loss", "method.kl_coef": beta}
        if is_corrected:
            result.overrides["method.kl_ratio"] = "true"
    elif result.recipe == "rloo":
        kl = {"method.kl": "reward", "method.kl_estimator": "k1", "method.kl_coef": beta}
        result.overrides |= kl if _number(beta) else {"method.kl": "none"}


def _list_differences(result: Translation, given: Mapping[str, str], table: Table) -> None:
    """List translated arguments and TRL's defaults whose meaning differs here."""
    missing = {line.partition("=")[0] for line in result.missing}
    of_tokens = ("assistant_only_loss", "completion_only_loss", "dataset_text_field")
    if result.recipe == "sft" and not any(name in given for name in of_tokens):
        result.missing.append(
            "assistant_only_loss (False in TRL): of rows with messages TRL trains on all tokens, "
            "here on the assistant's only; other rows are trained on as in TRL"
        )
    if "lora_r" in given and "lora_target_modules" not in given:
        result.missing.append(
            "target_modules of LoRA: PEFT chooses the layers by the model, most often q_proj and "
            "v_proj; here all linear layers, unless model.lora.targets is set"
        )
    for name in _DIFFERENT:
        value = given.get(name, "")
        is_idle = name == "weight_decay" and not value.strip("0.")
        if value and value != "False" and not is_idle and name not in missing:
            result.miss(name, value, table.reason(name))


def words(value: str) -> list[str]:
    """Return the items of a list in Python, or of words as the values of a flag."""
    return split_list(value.replace(" ", ","))


def _number(value: str) -> float:
    """Return a number; 0 for a text."""
    try:
        return float(value)
    except ValueError:
        return 0.0
