"""Translates the arguments of a TRL config."""

import yaml

from postgrad.config.import_names import (
    TRL_NAMES,
    TRL_NOT_NEEDED,
    TRL_OPTIMIZERS,
    TRL_REASONS,
    TRL_RECIPES,
)
from postgrad.config.import_result import (
    SCHEDULES,
    TRACKERS,
    drop_epochs,
    track_of,
)
from postgrad.config.import_trl_arguments import prepare_arguments
from postgrad.config.import_trl_losses import translate_losses, words

# Arguments that only one of TRL's configs has.
KINDS = {
    "num_generations": "GRPOConfig",
    "reward_funcs": "GRPOConfig",
    "desirable_weight": "KTOConfig",
    "rpo_alpha": "DPOConfig",
    "loss_weights": "DPOConfig",
    "precompute_ref_log_probs": "DPOConfig",
    "beta": "DPOConfig",
}
GIVEN_RECIPES = ("sft", "dpo", "kto", "reward_model")
PAIR_RECIPES = ("dpo", "kto")
# The arguments that make the number of problems and updates per step. TRL takes one of GENERATION.
GENERATION = ("steps_per_generation", "generation_batch_size")
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", *GENERATION)
# Sizes that are translated together: without one of them the others have no meaning.
SIZES = (*BATCH, "num_generations", "num_iterations")
# TRL counts them in updates.
IN_UPDATES = ("max_steps", "save_steps", "eval_steps", "warmup_steps", "ref_model_sync_steps")
# Of a reference that follows the policy; the first switches it on.
SYNCED_REFERENCE = ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")


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
    settings = {key: value for key, value in settings.items() if value != "None"}
    settings = _with_lora(settings)
    settings, prepared, unprepared = prepare_arguments(recipe, settings)
    overrides, missing = _batch_sizes(recipe, settings)
    has_sizes = bool(overrides)
    settings, rounded = _count_in_steps(settings, overrides)
    losses = translate_losses(recipe, settings, overrides)
    overrides |= prepared | losses.overrides
    missing += [*rounded, *unprepared, *losses.missing, *_differences(recipe, settings)]
    for key, value in settings.items():
        if key in losses.read:
            continue
        if key in TRL_NAMES:
            overrides[TRL_NAMES[key]] = value.lower() if value in ("True", "False") else value
        elif key in TRL_NOT_NEEDED or (key in BATCH and has_sizes):
            continue
        else:
            found = _translate_special(recipe, key, value, settings)
            if found is None:
                reason = TRL_REASONS.get(key)
                missing.append(f"{key}={value}: {reason}" if reason else f"{key}={value}")
            else:
                overrides |= found
    if recipe in GIVEN_RECIPES and "max_length" in settings:
        overrides.setdefault("data.max_prompt_tokens", settings["max_length"])
    drop_epochs(overrides)
    return recipe, overrides, missing


def _with_lora(settings: dict[str, str]) -> dict[str, str]:
    """The settings with the defaults of TRL's ModelConfig for LoRA if use_peft switches it on."""
    is_on = settings.get("use_peft", "false").lower()
    if is_on in ("true", ""):
        return {"lora_r": "16", "lora_dropout": "0.05"} | settings
    if "use_peft" in settings:
        return {key: value for key, value in settings.items() if not key.startswith("lora_")}
    return settings


def _differences(recipe: str, settings: dict[str, str]) -> list[str]:
    """Lines about translated settings and TRL's defaults whose meaning differs here."""
    lines: list[str] = []
    own = ("assistant_only_loss", "completion_only_loss", "dataset_text_field")
    if recipe == "sft" and not any(name in settings for name in own):
        lines.append(
            "assistant_only_loss (False in TRL): of rows with messages TRL trains on all tokens, "
            "here on the assistant's only; other rows are trained on as in TRL"
        )
    if "lora_r" in settings and "lora_target_modules" not in settings:
        lines.append(
            "target_modules of LoRA: PEFT chooses the layers by the model, most often q_proj and "
            "v_proj; here all linear layers, unless model.lora.targets is set"
        )
    if settings.get("weight_decay", "").strip("0."):
        lines.append(
            f"weight_decay={settings['weight_decay']}: it leaves out biases and norms there; here "
            "all weights decay"
        )
    trackers = words(settings.get("report_to", ""))
    others = [name for name in trackers if name not in (*TRACKERS, "none")]
    if others and others != trackers:
        lines.append(f"report_to={','.join(others)}: {TRL_REASONS['report_to']}")
    if "packing" in settings:
        lines.append(
            f"packing={settings['packing']}: TRL's batch sizes then count packed rows of "
            "max_length tokens; training.problems_per_step counts rows of the data"
        )
    if recipe in GIVEN_RECIPES and "max_length" in settings:
        lines.append(
            f"max_length={settings['max_length']}: TRL truncates prompt and response together; "
            "here each has a limit and longer rows are refused, or dropped with data.overlong=drop"
        )
    return lines


def _batch_sizes(recipe: str, settings: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Problems and updates per step of one process, and lines about what they cannot equal.

    Without overrides if an argument is no plain number. A step here is one generation there.
    """
    given = [f"{name}={settings[name]}" for name in GENERATION if name in settings]
    rows = settings.get("per_device_train_batch_size", "8")
    accumulated = settings.get("gradient_accumulation_steps", "1")
    samples = settings.get("num_generations", "8" if recipe == "grpo" else "2")
    numbers = [rows, accumulated, samples, *(settings.get(name, "1") for name in GENERATION)]
    if not any(name in settings for name in BATCH):
        return {}, []
    if not all(number.isdecimal() and int(number) for number in numbers):
        return {}, []
    if recipe not in ("grpo", "rloo"):
        return {"training.problems_per_step": str(int(rows) * int(accumulated))}, []
    if len(given) > 1 or int(settings.get("generation_batch_size", rows)) % int(rows):
        return {}, []  # TRL refuses them
    generated = _micro_batches_per_generation(settings, int(rows), int(accumulated))
    problems = max(1, int(rows) * generated // int(samples))
    updates = min(problems, max(1, generated // int(accumulated)))
    sizes = {"training.problems_per_step": str(problems)}
    if updates > 1:
        sizes["training.updates_per_step"] = str(updates)
    reason = ""
    if updates * int(accumulated) != generated:
        reason = f"its updates take parts of generations or of groups; here {updates} per step"
    elif updates > 1 and "generation_batch_size" in settings:
        reason = (
            f"{updates} updates per step are those of one process; with N processes 1/N of them"
        )
    return sizes, [f"{given[0]}: {reason}"] if given and reason else []


def _micro_batches_per_generation(settings: dict[str, str], rows: int, accumulated: int) -> int:
    """The micro-batches of one step: those between two generations, or of one update.

    An update of several generations equals one of a larger generation, since the policy is the same
    for all of them. With num_iterations it is not: TRL repeats each generation within the update.
    """
    if "generation_batch_size" in settings:
        generated = int(settings["generation_batch_size"]) // rows
    else:
        generated = int(settings.get("steps_per_generation", accumulated))
    is_part = accumulated % generated == 0 and settings.get("num_iterations", "1") == "1"
    return accumulated if is_part else generated


def _count_in_steps(
    settings: dict[str, str], sizes: dict[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The arguments with numbers of updates as numbers of steps, rounded up, and lines about it."""
    passes = settings.get("num_iterations", "1")
    updates = int(sizes.get("training.updates_per_step", "1"))
    updates *= max(1, int(passes)) if passes.isdecimal() else 1
    counted = dict(settings)
    lines: list[str] = []
    for name in IN_UPDATES:
        value = settings.get(name, "")
        if value.isdecimal():
            steps = -(-int(value) // updates)
            counted[name] = str(steps)
            if name == "max_steps" and steps * updates != int(value):
                lines.append(f"{name}={value}: {steps} steps of {updates} updates are more")
    return counted, lines


def _translate_special(
    recipe: str, key: str, value: str, settings: dict[str, str]
) -> dict[str, str] | None:
    """The overrides of an argument whose meaning depends on the config; None if it has none."""
    if key == "beta":
        return _translate_beta(recipe, value)
    if key in ("adam_beta1", "adam_beta2"):
        betas = settings.get("adam_beta1", "0.9"), settings.get("adam_beta2", "0.999")
        return {"optimizer.betas": f"[{','.join(betas)}]"}
    if key == "max_steps":
        return {} if value.startswith("-") else {"training.steps": value}
    if key == "lr_scheduler_type" and value in SCHEDULES:
        return {"optimizer.schedule": SCHEDULES[value]}
    if key in ("completion_only_loss", "assistant_only_loss"):  # the loss never reads the prompt
        return {} if value in ("True", "") else None
    if (key, value) == ("dataset_text_field", "text") or key == "packing":  # see _differences
        return {}
    if key in SYNCED_REFERENCE and recipe in ("grpo", "rloo", "dpo"):
        return _translate_synced_reference(settings)
    if key == "optim" and value in TRL_OPTIMIZERS:
        kind = TRL_OPTIMIZERS[value]
        return {"optimizer.kind": kind} if kind else {}
    if key in ("lora_dropout", "lora_target_modules"):
        return _translate_lora(recipe, key, value)
    if key == "report_to":
        return _translate_report_to(value)
    return None


def _translate_synced_reference(settings: dict[str, str]) -> dict[str, str]:
    """TRL's defaults are its own: every 512 updates, with 0.6 of the policy."""
    if settings.get("sync_ref_model", "false").lower() not in ("true", ""):  # "": a flag alone
        return {}
    return {
        "method.reference_sync_every": settings.get("ref_model_sync_steps", "512"),
        "method.reference_mixup": settings.get("ref_model_mixup_alpha", "0.6"),
    }


def _translate_report_to(value: str) -> dict[str, str] | None:
    names = [name for name in words(value) if name != "none"]
    return track_of(names) or (None if names else {})


def _translate_lora(recipe: str, key: str, value: str) -> dict[str, str] | None:
    if key == "lora_target_modules":
        is_pattern = any(mark in value for mark in "*|(\\")
        return None if is_pattern else {"model.lora.targets": ",".join(words(value))}
    if value in ("0", "0.0"):
        return {}
    return {"model.lora.dropout": value} if recipe in GIVEN_RECIPES else None


def _translate_beta(recipe: str, value: str) -> dict[str, str] | None:
    """`beta` is the strength of a preference loss, or the coefficient of the KL penalty."""
    if recipe in PAIR_RECIPES:
        return {"method.beta": value}
    try:
        is_on = float(value) != 0
    except ValueError:
        return None
    if not is_on:
        return {"method.kl": "none"} if recipe == "rloo" else {}
    if recipe == "rloo":  # TRL subtracts the KL from the reward
        return {"method.kl": "reward", "method.kl_estimator": "k1", "method.kl_coef": value}
    return None
