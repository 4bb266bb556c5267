"""Translates RL scripts of verl and of its forks LUFFY, ExGRPO, BuPO and Classmate-CoT."""

import re

from postgrad.config.import_fork_names import (
    CLASSMATE_ESTIMATORS,
    CLASSMATE_VALUES,
    FORK_NAMES,
    FORK_NOT_NEEDED,
    SCALED,
)
from postgrad.config.import_names import (
    ADVANTAGES,
    KL_TYPES,
    LOSSES,
    NAMES,
    NOT_NEEDED,
    NOT_NEEDED_SECTIONS,
    OF_CRITIC,
    REASONS,
)
from postgrad.config.import_result import (
    SCHEDULES,
    SET_IT,
    TRACKERS,
    Translation,
    drop_epochs,
    drop_lora,
    lower_bool,
    source_of,
    split_list,
    track_of,
    translate_parallel,
)
from postgrad.config.import_verl_losses import LOSS_OPTIONS, translate_correction, translate_loss

# Parts of names of Classmate-CoT's data sets: rated by a judge, and with a ground truth.
_JUDGED = ("sycophancy", "helpful_instructions", "anthropic_hh_rlhf")
_VERIFIED = ("gsm8k", "math", "mmlu", "code")
RESAMPLING = ("pow", "max_min", "max_random")  # verl's names and ours
_UNSET = ("null", "None", "none", "")
_SCALED_RECIPES = ("luffy", "luffy_on_policy", "luffy_rl_sft", "exgrpo")


def translate_verl(settings: dict[str, str]) -> Translation:
    """The recipe and overrides that equal the settings of a script of verl or a fork."""
    result = Translation(_recipe_of(settings))
    for key, value in settings.items():
        if key.startswith(OF_CRITIC) and result.recipe != "ppo":
            continue
        try:
            _translate(result, key, value, settings)
        except ValueError:  # not a number, such as a variable that the script does not set
            _miss(result, key, value)
    _rename_columns(result, settings)
    _note_reward(result, settings)
    drop_epochs(result.overrides)
    drop_lora(result.overrides)
    try:
        translate_loss(result, settings)
        translate_correction(result, settings)
    except ValueError as error:  # a bound that is no number
        result.missing.append(f"algorithm.rollout_correction: {error}")
    return result


def _note_reward(result: Translation, settings: dict[str, str]) -> None:
    """Classmate-CoT chooses the reward by the data set; the recipes have that of sycophancy."""
    if not result.recipe.startswith("classmate") or "reward.verifier" in result.overrides:
        return
    if _is_judged(settings):
        result.missing.append(f"{SET_IT}the judge (reward.judge.model=http://HOST:PORT/v1#NAME)")
    elif any(name in settings.get("data.train_files", "") for name in _VERIFIED):
        result.overrides["reward.verifier"] = "auto"
    else:
        result.missing.append(
            f"{SET_IT}the reward of this data set (reward.verifier; for a judge also "
            "reward.judge.model and reward.judge.template)"
        )


def _is_judged(settings: dict[str, str]) -> bool:
    """Whether the data set of Classmate-CoT is one whose responses a judge rates for sycophancy."""
    files = settings.get("data.train_files", "")
    return any(name in files for name in _JUDGED) and "mmlu" not in files


def _translate(result: Translation, key: str, value: str, settings: dict[str, str]) -> None:
    leaf = key.rpartition(".")[2]
    if result.recipe in _SCALED_RECIPES and key in SCALED:
        _translate_scaled(result, key, value)
    elif key in FORK_NOT_NEEDED:
        if value not in FORK_NOT_NEEDED[key]:
            _miss(result, key, value)
    elif key in FORK_NAMES and not value.startswith("$'"):
        if result.recipe != "exgrpo" or "prefix" not in key:
            _copy(result, FORK_NAMES[key], value)
        elif value != "False":
            result.missing.append(f"{key}={value}: exgrpo has no prefixes of demonstrations")
    elif key in CLASSMATE_VALUES:
        _translate_classmate(result, key, value)
    elif leaf.endswith("parallel_size"):
        translate_parallel(result, key, value, settings)
    elif key in NAMES:
        _copy(result, NAMES[key], value)
    elif key.endswith(NOT_NEEDED) or any(part in key for part in NOT_NEEDED_SECTIONS):
        return
    elif key.startswith(("data.", "reward_model.", "custom_reward_function.", "reward.")):
        _translate_input(result, key, leaf, value, settings)
    else:
        _translate_special(result, key, leaf, value, settings)


def _miss(result: Translation, key: str, value: str) -> None:
    """Lists a setting without an equivalent, with the reason if one is known."""
    reason = REASONS.get(key) or REASONS.get(key.rpartition(".")[2])
    result.missing.append(f"{key}={value}: {reason}" if reason else f"{key}={value}")


def _copy(result: Translation, name: str, value: str) -> None:
    """Sets the setting `name` to the value of verl's, written as it is written here."""
    if name in ("data.train", "data.validation"):
        value = ",".join(split_list(value))
    if name == "optimizer.warmup_steps" and value.startswith("-"):  # verl's -1 is "not set"
        return
    if value in _UNSET:
        return
    result.overrides[name] = lower_bool(value)


def _recipe_of(settings: dict[str, str]) -> str:
    keys = " ".join(settings)
    if "internal_layer" in keys:
        return "bupo"
    if "exp_metric" in keys or "exp_bucket" in keys or "experience" in keys:
        return "exgrpo"
    if "off_policy_reshape" in keys or "use_off_policy_loss" in keys:
        if settings.get("actor_rollout_ref.actor.use_sft_multitask_loss") == "True":
            return "luffy_rl_sft"
        ratio = settings.get("actor_rollout_ref.rollout.max_prefix_ratio", "1.0")
        return "luffy_on_policy" if re.fullmatch(r"0+(\.0*)?", ratio) else "luffy"
    estimator = settings.get("algorithm.adv_estimator", "gae")
    if "classmate" in keys:
        if estimator == "gdpo":
            return "classmate_gdpo"
        return "classmate_sycophancy" if _is_judged(settings) else "classmate_think"
    # Baselines and warm-ups: no standard deviation, and the recipe's aggregation.
    is_classmates = "classmate_cot" in settings.get("trainer.project_name", "")
    if "think_start_str" in keys or is_classmates:
        return "classmate_baseline"
    return "ppo" if estimator == "gae" else "grpo"


def _translate_scaled(result: Translation, key: str, value: str) -> None:
    """A coefficient of LUFFY, whose scale differs: the recipe has it for the scripts' value."""
    if float(value) != float(SCALED[key]):
        result.missing.append(
            f"{key}={value}: the recipe {result.recipe} has the equal of {SCALED[key]}; its scale "
            "differs from the original's (see the comment of the recipe)"
        )


def _translate_classmate(result: Translation, key: str, value: str) -> None:
    name, values = CLASSMATE_VALUES[key]
    if value not in values:
        _miss(result, key, value)
    else:
        result.overrides[name] = values[value]


def _translate_input(
    result: Translation, key: str, leaf: str, value: str, settings: dict[str, str]
) -> None:
    """Settings of the data and the reward."""
    overrides = result.overrides
    if key in ("data.prompt_key", "data.reward_fn_key"):
        return  # see _rename_columns
    if leaf == "filter_overlong_prompts":
        if value.lower() == "true":
            overrides["data.overlong"] = "drop"
    elif leaf == "truncation":
        overrides.setdefault("data.overlong", value)
    elif leaf == "prompt_template_type" and value == "qwen3_no_thinking":  # of BuPO
        overrides["data.template_options.enable_thinking"] = "false"
    elif leaf == "val_max_samples":
        if int(value) > 0:
            overrides["training.validation_problems"] = value
    elif _is_default(leaf, value, settings):
        return
    elif key.startswith("data.apply_chat_template_kwargs."):
        overrides[f"data.template_options.{leaf}"] = lower_bool(value)
    elif "overlong_buffer" in key:
        _translate_dapo(result, key, leaf, value, settings)
    elif "custom_reward_function" in key:
        section = key.rpartition(".")[0]
        path = settings.get(f"{section}.path", "null")
        if path != "null":
            name = settings.get(f"{section}.name", "compute_score")
            overrides["reward.verifier"] = f"{path}:{name}"
    elif key in ("reward_model.enable", "reward_model.model.path"):
        _translate_reward_model(result, key, value, settings)
    elif key.startswith("reward_model.llm_judge_"):
        _translate_judge(result, key, value, settings)
    elif value not in _UNSET:
        _miss(result, key, value)


def _is_default(leaf: str, value: str, settings: dict[str, str]) -> bool:
    """Whether a setting of the data or the reward changes nothing with this value."""
    if leaf == "train_max_samples":
        return int(value) <= 0
    if leaf == "gen_batch_size":
        return value == settings.get("data.train_batch_size")
    if leaf == "max_resp_len":
        return value == settings.get("data.max_response_length")
    # These managers call the same function per response.
    return leaf == "reward_manager" and value in ("naive", "dapo", "prime")


def _translate_reward_model(
    result: Translation, key: str, value: str, settings: dict[str, str]
) -> None:
    """A reward model that scores alone; with a function that asks it there is no equivalent."""
    is_on = settings.get("reward_model.enable", "").lower() == "true"
    path = settings.get("reward_model.model.path", "")
    if not is_on:
        return
    if any("custom_reward_function.path" in name for name in settings) or not path:
        _miss(result, key, value)
    else:
        result.overrides["reward.verifier"] = f"model:{path}"


def _translate_judge(result: Translation, key: str, value: str, settings: dict[str, str]) -> None:
    """The judge of Classmate-CoT: a reward model (hf_scoring), or a model behind a service."""
    name = settings.get("reward_model.llm_judge_model_name", "")
    backend = settings.get("reward_model.llm_judge_backend_type", "")
    if backend == "hf_scoring" and name:
        result.overrides["reward.verifier"] = f"model:{name}"
    else:
        _miss(result, key, value)


def _rename_columns(result: Translation, settings: dict[str, str]) -> None:
    """Adds the columns of data.prompt_key and data.reward_fn_key to the sources."""
    columns = {
        settings.get("data.prompt_key", "prompt"): "prompt",
        settings.get("data.reward_fn_key", "data_source"): "data_source",
    }
    for name in ("data.train", "data.validation"):
        if name in result.overrides:
            result.overrides[name] = source_of(split_list(result.overrides[name]), columns)


def _translate_special(
    result: Translation, key: str, leaf: str, value: str, settings: dict[str, str]
) -> None:
    """Settings whose value or name depends on others. Raises ValueError for a wrong number."""
    overrides = result.overrides
    batch = settings.get("data.train_batch_size", "")
    if "filter_groups" in key:
        _translate_dapo(result, key, leaf, value, settings)
    elif key.startswith("algorithm.rollout_correction.") or leaf in LOSS_OPTIONS:
        return  # see translate_correction and translate_loss
    elif "pf_ppo" in key:
        _translate_resampling(result, key, leaf, value, settings)
    elif "kl" in leaf or "kl_ctrl" in key:
        _translate_kl(result, key, leaf, value, settings)
    elif leaf == "ppo_mini_batch_size" and key.startswith("actor") and batch:
        overrides["training.updates_per_step"] = str(max(1, int(batch) // int(value)))
    elif leaf == "clip_ratio":
        overrides.setdefault("method.clip_low", value)
        overrides.setdefault("method.clip_high", value)
        sides = [f"{key}_{side}" for side in ("low", "high")]
        if float(value) != 0.2 and not any(side in settings for side in sides):
            result.missing.append(
                f"{key}={value}: verl clips at 0.2 unless clip_ratio_low and clip_ratio_high are "
                f"set; here both are {value}"
            )
    elif leaf == "adv_estimator":
        _translate_estimator(result, key, value)
    elif leaf == "loss_mode" and value in LOSSES:
        overrides["method.loss"] = LOSSES[value]
    elif leaf == "internal_layer":
        overrides["method.num_blocks"] = str(int(value) + 1)
    elif leaf in ("save_freq", "test_freq"):
        name = "checkpoint_every" if leaf == "save_freq" else "validate_every"
        if int(value) > 0:
            overrides[f"training.{name}"] = value
    elif leaf == "n_gpus_per_node":
        num_gpus = int(value) * int(settings.get("trainer.nnodes", "1"))
        if num_gpus > 1:
            overrides |= {"cluster": "ray", "cluster.workers": str(num_gpus)}
    elif leaf == "top_k":
        _translate_top_k(result, key, value)
    elif leaf == "do_sample" and "val_kwargs" in key:
        if value.lower() == "false":
            overrides["training.validation_temperature"] = "0"
    elif leaf in ("lr_scheduler_type", "warmup_style", "lr_decay_style") and value in SCHEDULES:
        overrides["optimizer.schedule"] = SCHEDULES[value]
    elif leaf == "logger":
        overrides |= track_of(name for name in TRACKERS if name in value)
    elif leaf == "off_policy_reshape" and value.startswith("p_div_p_"):
        overrides["method.off_shape"] = "p_div_p"
        overrides["method.off_options.gamma"] = value.removeprefix("p_div_p_")
    elif leaf == "max_prefix_len" and value == settings.get("data.max_response_length"):
        return  # demonstrations have the limit of responses
    elif leaf == "loss_remove_clip":
        # The recipe exgrpo keeps the clip until its replay starts, as the original does.
        if value.lower() == "true" and result.recipe != "exgrpo":
            overrides |= {"method.clip_low": "inf", "method.clip_high": "inf"}
    elif value not in _UNSET:
        _miss(result, key, value)


def _translate_top_k(result: Translation, key: str, value: str) -> None:
    """verl's -1 keeps all tokens. Validations have no such setting here."""
    if int(value) <= 0:
        return
    if "val_kwargs" in key:
        _miss(result, key, value)
    else:
        result.overrides["rollout.top_k"] = value


def _translate_estimator(result: Translation, key: str, value: str) -> None:
    overrides = result.overrides
    has_classmates = result.recipe.startswith("classmate") and "baseline" not in result.recipe
    if has_classmates and value in CLASSMATE_ESTIMATORS:
        if result.recipe != "classmate_gdpo" and value != "grpo_w_classmate":
            overrides["method.advantage"] = CLASSMATE_ESTIMATORS[value]
    elif value not in ADVANTAGES:
        _miss(result, key, value)
    elif result.recipe == "grpo" and ADVANTAGES[value] != "grpo":
        overrides["method.advantage"] = ADVANTAGES[value]
    elif result.recipe == "luffy_rl_sft" and value == "grpo_split":
        return  # as in the recipe
    elif result.recipe not in ("grpo", "ppo") and ADVANTAGES[value] != "grpo":
        _miss(result, key, value)


def _translate_resampling(
    result: Translation, key: str, leaf: str, value: str, settings: dict[str, str]
) -> None:
    """PF-PPO draws the rows of an update anew. verl reads its settings with GAE only."""
    is_on = settings.get("algorithm.use_pf_ppo", "").lower() == "true"
    if not is_on or result.recipe != "ppo":
        return
    if leaf == "use_pf_ppo":
        result.overrides.setdefault("method.resample", "pow")  # verl's default
    elif leaf == "reweight_method" and value in RESAMPLING:
        result.overrides["method.resample"] = value
    elif leaf == "weight_pow":
        if settings.get("algorithm.pf_ppo.reweight_method", "pow") == "pow":
            result.overrides["method.resample_power"] = value
    else:
        _miss(result, key, value)


def _translate_kl(
    result: Translation, key: str, leaf: str, value: str, settings: dict[str, str]
) -> None:
    """The KL penalty: in the loss or in the reward, each with an estimator and a coefficient."""
    overrides = result.overrides
    in_loss = settings.get("actor_rollout_ref.actor.use_kl_loss", "").lower() == "true"
    in_reward = settings.get("algorithm.use_kl_in_reward", "").lower() == "true"
    if leaf == "use_kl_loss":
        overrides["method.kl"] = "loss" if in_loss else overrides.get("method.kl", "none")
    elif leaf == "use_kl_in_reward":
        if in_reward and not in_loss:
            penalty = settings.get("algorithm.kl_penalty", "kl")  # verl's default
            estimator = KL_TYPES.get(penalty, "k1")
            overrides |= {"method.kl": "reward", "method.kl_estimator": estimator}
        elif in_reward:
            result.missing.append(f"{key}={value} beside use_kl_loss=True")
    elif leaf == "kl_loss_coef":
        if in_loss:
            overrides["method.kl_coef"] = value
    elif leaf == "kl_loss_type" and value in KL_TYPES:
        if in_loss:
            overrides["method.kl_estimator"] = KL_TYPES[value]
    elif leaf == "kl_coef":
        if in_reward and not in_loss:
            overrides["method.kl_coef"] = value
    elif leaf == "type":
        if value == "adaptive" and in_reward and not in_loss:
            target = settings.get("algorithm.kl_ctrl.target_kl", "0.1")
            overrides["method.kl_target"] = target
    elif leaf not in ("kl_penalty", "target_kl") and (leaf, value) != ("horizon", "10000"):
        _miss(result, key, value)


def _translate_dapo(
    result: Translation, key: str, leaf: str, value: str, settings: dict[str, str]
) -> None:
    """DAPO's filter of groups and its penalty for overlong responses."""
    section = key.rpartition(".")[0]
    if settings.get(f"{section}.enable", "").lower() != "true":
        return
    if leaf == "enable" and "filter_groups" in key:
        times = settings.get(f"{section}.max_num_gen_batches", "10")
        result.overrides["method.max_refills"] = str(max(1, int(times) - 1))
    elif leaf == "metric":
        if value == "seq_final_reward":
            result.overrides["method.refill_by"] = "reward"
    elif leaf == "len":
        result.overrides["method.overlong_buffer"] = value
    elif leaf != "enable" and (leaf != "penalty_factor" or float(value) != 1):
        result.missing.append(f"{key}={value}")
