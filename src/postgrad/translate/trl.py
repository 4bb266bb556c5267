"""Configs of TRL: the table has what each argument is by itself; here is what depends on several.

Formulas were compared with TRL 1.16.
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
_SAMPLED = ("grpo", "rloo")
# The arguments that make the number of problems and updates per step. TRL takes one of GENERATION.
_GENERATION = ("steps_per_generation", "generation_batch_size")
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", *_GENERATION)
# TRL counts them in updates.
_IN_UPDATES = ("max_steps", "save_steps", "eval_steps", "warmup_steps", "ref_model_sync_steps")
# Sizes that are translated together: without one of them the others have no meaning.
SIZES = (*_BATCH, "num_generations", "num_iterations")
COUNTS = (*_BATCH, *_IN_UPDATES)
_DPO_LOSSES = ("sigmoid", "ipo", "hinge", "sigmoid_norm")
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
    _read_intervals(result)
    _read_data(result)
    if result.recipe == "grpo":
        _read_grpo(result, table)
    elif result.recipe == "dpo":
        _read_dpo(result, given)
    elif result.recipe == "sft" and result.settings.get("loss_type") == "dft":
        result.overrides["method.loss"] = result.take("loss_type")
    elif result.recipe == "rloo":
        _read_rloo(result)
    _read_beta(result)
    _read_synced_reference(result)
    _read_lora(result)
    _read_trackers(result, table)
    table.translate(result)
    if "rollout.max_response_tokens" in result.overrides and "max_length" in given:
        limit = given["max_length"]
        result.overrides.setdefault("data.max_prompt_tokens", limit)
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


# ---- sizes and steps


def _read_sizes(result: Translation) -> None:
    """Read the problems and updates per step of one process, and what counts updates.

    A step here is one generation there.
    """
    settings = result.settings
    sizes = [settings.get(name, "1") for name in (*_BATCH, "num_generations", "num_iterations")]
    passes = int(settings.get("num_iterations", "1")) if sizes[-1].isdecimal() else 1
    updates = 1
    if all(size.isdecimal() and int(size) for size in sizes[:-1]):
        updates = _read_batch(result)
    updates *= max(1, passes)
    for name in _IN_UPDATES:
        value = settings.get(name, "")
        if value.isdecimal():
            steps = -(-int(value) // updates)
            settings[name] = str(steps)
            if name == "max_steps" and steps * updates != int(value):
                result.miss(name, value, f"{steps} steps of {updates} updates are more")
    steps = result.take("max_steps")
    if steps and not steps.startswith("-"):
        result.overrides["training.steps"] = steps


def _read_batch(result: Translation) -> int:
    """Set the problems and updates per step; return the updates."""
    settings = result.settings
    given = [name for name in _GENERATION if name in settings]
    if not any(name in settings for name in _BATCH):
        return 1
    rows = int(settings.get("per_device_train_batch_size", "8"))
    accumulated = int(settings.get("gradient_accumulation_steps", "1"))
    if result.recipe not in _SAMPLED:
        result.overrides["training.problems_per_step"] = str(rows * accumulated)
        result.take("per_device_train_batch_size")
        result.take("gradient_accumulation_steps")
        return 1
    if len(given) > 1 or int(settings.get("generation_batch_size", rows)) % rows:
        return 1  # TRL refuses them
    samples = int(settings.get("num_generations", "8" if result.recipe == "grpo" else "2"))
    generated = _micro_batches_per_generation(settings, rows, accumulated)
    problems = max(1, rows * generated // samples)
    updates = min(problems, max(1, generated // accumulated))
    result.overrides["training.problems_per_step"] = str(problems)
    if updates > 1:
        result.overrides["training.updates_per_step"] = str(updates)
    values = {name: result.take(name) for name in _BATCH}
    if given and updates * accumulated != generated:
        reason = f"its updates take parts of generations or of groups; here {updates} per step"
        result.miss(given[0], values[given[0]], reason)
    elif given == ["generation_batch_size"] and updates > 1:
        reason = (
            f"{updates} updates per step are those of one process; with N processes 1/N of them"
        )
        result.miss(given[0], values[given[0]], reason)
    return updates


def _micro_batches_per_generation(settings: Mapping[str, str], rows: int, accumulated: int) -> int:
    """Return the micro-batches of one step: those between two generations, or of one update.

    An update of several generations equals one of a larger generation, since the policy is the same
    for all of them. With num_iterations it is not: TRL repeats each generation within the update.
    """
    if "generation_batch_size" in settings:
        generated = int(settings["generation_batch_size"]) // rows
    else:
        generated = int(settings.get("steps_per_generation", accumulated))
    is_part = accumulated % generated == 0 and settings.get("num_iterations", "1") == "1"
    return accumulated if is_part else generated


def _read_schedule(result: Translation) -> None:
    """Read the warm-up, which may be a share of all steps, and Adam's moments."""
    settings = result.settings
    if settings.get("lr_scheduler_type") == "constant":
        result.overrides["optimizer.warmup_steps"] = "0"  # a recipe here may have a warm-up
        for name in ("warmup_steps", "warmup_ratio"):
            value = result.take(name)
            if value and value not in _OFF:
                result.miss(name, value, "transformers' schedule constant has no warm-up")
    if _is_share(settings.get("warmup_steps", "")):
        settings["warmup_ratio"] = result.take("warmup_steps")
    if "adam_beta1" in settings or "adam_beta2" in settings:
        betas = result.take("adam_beta1", "0.9"), result.take("adam_beta2", "0.999")
        result.overrides["optimizer.betas"] = f"[{','.join(betas)}]"


def _is_share(value: str) -> bool:
    """Return whether a number of steps is a share of all steps."""
    try:
        return 0 < float(value) < 1
    except ValueError:
        return False


def _read_intervals(result: Translation) -> None:
    """Read intervals of checkpoints and validations, which may be shares of all steps there."""
    settings = result.settings
    for name in ("save", "eval"):
        value = settings.get(f"{name}_steps", "")
        if settings.get(f"{name}_strategy", "steps") != "steps":
            result.take(f"{name}_steps")
        elif _is_share(value):
            result.take(f"{name}_steps")
            result.miss(f"{name}_steps", value, "an interval is a number of steps here")


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
    if shuffle and result.recipe in _SAMPLED:  # the others' order of the rows is random anyway
        result.overrides["data.shuffle"] = lower_bool(shuffle)


# ---- losses


def _read_grpo(result: Translation, table: Table) -> None:
    """Read the loss, which is one choice here, and several arguments there."""
    settings, overrides = result.settings, result.overrides
    aggregations = table.choices["method.aggregation"]
    given = result.take("loss_type")
    kind = given or "dapo"
    level = result.take("importance_sampling_level", "token")
    if kind in ("cispo", "sapo"):
        _read_bounded(result, kind, level)
    elif kind in aggregations:
        if given:
            overrides["method.aggregation"] = aggregations[kind]
        if kind == "bnpo" and settings.get("gradient_accumulation_steps", "1") != "1":
            reason = "TRL's mean is one per micro-batch, here one per update"
            result.miss("loss_type", kind, reason)
        _read_clips(result, level)
    else:
        result.miss("loss_type", kind, f"known are {', '.join(aggregations)}, cispo and sapo")
    _read_kl(result, level)
    coefficient = settings.get("entropy_coef", "0.0")
    if settings.get("use_adaptive_entropy", "False").lower() != "true":
        result.take("entropy_coef")
        if coefficient not in _OFF:
            overrides["method.entropy_coef"] = coefficient
            if overrides.get("method.aggregation", "token-mean") != "token-mean":
                reason = "TRL's entropy is a mean over tokens; here it has the weights of the loss"
                result.miss("entropy_coef", coefficient, reason)
    scale = result.take("scale_rewards")
    if scale == "batch":
        overrides["method.advantage"] = "lite_ppo"
    elif scale:
        is_on = scale.lower() not in ("false", "none")
        overrides["method.normalize_by_std"] = str(is_on).lower()


def _read_bounded(result: Translation, kind: str, level: str) -> None:
    """Read CISPO and SAPO, whose ratios are bounded without a clip."""
    result.overrides["method.loss"] = kind
    if level != "token":
        result.miss("importance_sampling_level", level, f"{kind} here has one ratio per token")
    low = result.take("epsilon", "0.2")
    high = result.take("epsilon_high", low)
    result.take("delta")
    if kind == "sapo":
        result.overrides["method.aggregation"] = "seq-mean-token-mean"
        return
    result.overrides["method.aggregation"] = "token-mean"
    if _number(high) >= 1:
        result.overrides["method.clip_high"] = f"{_number(high) - 1:.10g}"
    else:
        reason = (
            "TRL's epsilon_high is the largest weight, 1 + method.clip_high; below 1 (its default "
            "is epsilon) it has no equivalent"
        )
        result.miss("loss_type", kind, reason)


def _read_clips(result: Translation, level: str) -> None:
    """Read the bounds of the ratio; one argument sets both, unless there is another."""
    overrides = result.overrides
    low, high = result.take("epsilon"), result.take("epsilon_high")
    if level == "sequence":
        overrides["method.loss"] = "gspo"  # whose defaults are others
        low = low or "0.2"
        dual_clip = result.take("delta")
        if dual_clip:
            reason = "no bound of the ratio of a response besides method.clip_high"
            result.miss("delta", dual_clip, reason)
    elif level != "token":
        result.miss("importance_sampling_level", level)
    if low:
        overrides["method.clip_low"] = low
    if low or high:
        overrides["method.clip_high"] = high or low


def _read_kl(result: Translation, level: str) -> None:
    """Read the KL penalty in the loss, which TRL multiplies by the ratio."""
    beta = result.settings.get("beta", "0")
    is_corrected = result.take("use_bias_correction_kl", "True").lower() != "false"
    if not _number(beta):
        return
    result.take("beta")
    result.overrides |= {"method.kl": "loss", "method.kl_coef": beta}
    if is_corrected:
        result.overrides["method.kl_ratio"] = "true"
    if is_corrected and level == "sequence":
        reason = (
            "TRL multiplies the KL by the ratio of the response, method.kl_ratio by that of the "
            "token"
        )
        result.miss("beta", beta, reason)


def _read_rloo(result: Translation) -> None:
    """List the clip of a response's ratio, which is 1 at the first update after a generation."""
    clips = [(name, result.take(name)) for name in ("epsilon", "epsilon_high")]
    given = [(name, value) for name, value in clips if value] or [("epsilon", "0.2")]
    updates = result.overrides.get("training.updates_per_step", "1")
    if updates != "1" or result.settings.get("num_iterations", "1") != "1":
        reason = "TRL clips the ratio of a response; the recipe rloo has no ratio"
        result.miss(*given[0], reason)


def _read_dpo(result: Translation, given: Mapping[str, str]) -> None:
    """Read one preference loss, and the SFT term of rpo_alpha."""
    loss = result.take("loss_type")
    if loss in _DPO_LOSSES:
        result.overrides["method.loss"] = loss.removesuffix("_norm")
    elif loss:
        reason = f"a run has one loss of {', '.join(_DPO_LOSSES)}; method.sft_coef adds an SFT term"
        result.miss("loss_type", loss, reason)
    if loss == "sigmoid_norm":
        result.overrides["method.length_normalized"] = "true"
    coefficient = result.take("rpo_alpha")
    if coefficient:
        result.overrides["method.sft_coef"] = coefficient
        if given.get("per_device_train_batch_size") != "1":
            reason = (
                "TRL's SFT term is a mean over all chosen tokens of a micro-batch, that of "
                "method.sft_coef a mean per response; with per_device_train_batch_size=1 they are "
                "equal"
            )
            result.miss("rpo_alpha", coefficient, reason)
    if loss in ("ipo", "hinge"):
        result.take("label_smoothing")  # TRL does not read it either


def _read_beta(result: Translation) -> None:
    """Read the strength of a preference loss, or the coefficient of the KL in the reward."""
    beta = result.settings.get("beta", "")
    if not beta or (result.recipe == "grpo" and _number(beta)):
        return
    if result.recipe in ("dpo", "kto"):
        result.overrides["method.beta"] = result.take("beta")
    elif result.recipe in _SAMPLED and beta in _OFF:
        result.take("beta")
        if result.recipe == "rloo":
            result.overrides["method.kl"] = "none"
    elif result.recipe == "rloo":  # TRL subtracts the KL from the reward
        kl = {"method.kl": "reward", "method.kl_estimator": "k1"}
        result.overrides |= kl | {"method.kl_coef": result.take("beta")}


def _read_synced_reference(result: Translation) -> None:
    """Read a reference that follows the policy: every 512 updates with 0.6 of it, unless set."""
    if result.recipe not in (*_SAMPLED, "dpo"):
        return
    every = result.take("ref_model_sync_steps", "512")
    mixup = result.take("ref_model_mixup_alpha", "0.6")
    if result.take_bool("sync_ref_model"):
        result.overrides["method.reference_sync_every"] = every
        result.overrides["method.reference_mixup"] = mixup


def _read_lora(result: Translation) -> None:
    targets = result.settings.get("lora_target_modules", "")
    if targets and not re.search(r"[*|(\\]", targets):  # a pattern
        result.take("lora_target_modules")
        result.overrides["model.lora.targets"] = ",".join(words(targets))


def _read_trackers(result: Translation, table: Table) -> None:
    names = [name for name in words(result.take("report_to")) if name != "none"]
    result.track(names)
    others = [name for name in names if name not in ("wandb", "tensorboard")]
    if others:
        result.miss("report_to", ",".join(others), table.reason("report_to"))


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
