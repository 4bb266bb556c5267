"""Scripts of verl and of its forks LUFFY, ExGRPO, BuPO and Classmate-CoT.

The table has what each setting is by itself; here is what depends on several settings.
"""

import re
from collections.abc import Mapping

from postgrad.translate.result import SET_IT, Translation, lower_bool
from postgrad.translate.table import Table, read_table, split_list

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_UNSET = ("null", "None", "none", "", "-1")
_SOURCES = ("data.train", "data.validation")
# Settings that only a run with a critic reads.
_OF_CRITIC = ("critic.", "algorithm.lam", "trainer.critic_warmup")
# Settings that repeat another one, by their last parts.
_REPEATED = {
    "gen_batch_size": "data.train_batch_size",
    "max_resp_len": "data.max_response_length",
    "max_prefix_len": "data.max_response_length",
}
# Sizes by which verl divides a model or its rows among workers, and the settings here.
_PARALLEL_SIZES = {
    "tensor_model_parallel_size": "cluster.tensor_parallel",
    "expert_model_parallel_size": "cluster.expert_parallel",
    "ulysses_sequence_parallel_size": "cluster.sequence_parallel",
}

# Coefficients whose scale differs in the recipes of LUFFY and ExGRPO, with the scripts' values.
_SCALED = {
    f"{_ACTOR}.entropy_coeff": 0.001,
    f"{_ACTOR}.grad_clip": 1.0,
    f"{_ACTOR}.skip_grad_bound": 500,
}
_SCALED_RECIPES = ("luffy", "luffy_on_policy", "luffy_rl_sft", "exgrpo")
# Parts of names of Classmate-CoT's data sets: rated by a judge, and with a ground truth.
_JUDGED = ("sycophancy", "helpful_instructions", "anthropic_hh_rlhf")
_VERIFIED = ("gsm8k", "math", "mmlu", "code")
_CLASSMATE_ADVANTAGES = {
    "grpo_main_classmate_separated": "classmate_separated",
    "grpo_main_classmate_separated_non_neg_cl": "classmate_non_neg",
    "gdpo_wo_bn": "classmate_gdpo_wo_bn",
}

# Options of losses by the last part of verl's name: the losses that read them, the option here.
_LOSS_OPTIONS = {
    "tau_pos": (("sapo",), "temperature_positive"),
    "tau_neg": (("sapo",), "temperature_negative"),
    "clip_cov_ratio": (("clip_cov",), "cov_share"),
    "clip_cov_lb": (("clip_cov",), "cov_low"),
    "clip_cov_ub": (("clip_cov",), "cov_high"),
    "kl_cov_ratio": (("kl_cov",), "cov_share"),
    "ppo_kl_coef": (("kl_cov",), "coefficient"),
    "dro_beta": (("dro",), "beta"),
}
_DPPO = ("dppo_tv", "dppo_kl")
# verl clips all of them at 0.2, unless set; the losses have the bounds of their papers here.
_CLIPPED = ("gspo", "cispo", "geo_mean", "clip_cov", *_DPPO)
# verl ignores its loss_agg_mode for them, for gspo in all versions but 0.9.1.
_BY_ROW = ("gspo", "sapo", "geo_mean")
_MEAN_OF_ROWS = "seq-mean-token-mean"
_REINFORCE = (
    "method.loss=cispo with method.correction=bypass and method.clip_high=C-1 is its form with "
    "weights per token of at most C"
)


def translate_verl(settings: Mapping[str, str]) -> Translation:
    """Return the recipe and overrides that equal an RL script of verl or a fork."""
    table = read_table("verl")
    result = Translation(_recipe_of(settings), _given(settings))
    _drop_unread(result)
    _read_scaled(result)
    _read_parallel_sizes(result, table)
    _read_prompts(result)
    _read_reward(result, settings)
    _read_kl(result, table)
    _read_dapo(result)
    _read_advantage(result, table)
    _read_warmup(result)
    table.translate(result)
    _rename_columns(result)
    _read_steps(result)
    _read_clips(result)
    _read_loss(result)
    _read_correction(result)
    result.drop_idle()
    table.list_missing(result)
    return result


def translate_verl_sft(settings: Mapping[str, str]) -> Translation:
    """Return the recipe sft and the overrides that equal an SFT script of verl."""
    table = read_table("verl")
    result = Translation("sft", _given(settings))
    columns = _sft_columns(result)
    length = result.take_count("data.max_length")
    if length is not None:
        limit = str(length)
        result.overrides |= {"data.max_prompt_tokens": limit, "rollout.max_response_tokens": limit}
        reason = "verl limits prompt and response together; here each has this limit"
        result.miss("data.max_length", limit, reason)
    _read_parallel_sizes(result, table)
    _read_warmup(result)
    table.translate(result)
    _add_columns(result, columns)
    _read_steps(result)
    result.drop_idle()
    table.list_missing(result)
    return result


def _given(settings: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if value not in _UNSET}


def _recipe_of(settings: Mapping[str, str]) -> str:
    keys = " ".join(settings)
    if "internal_layer" in keys:
        return "bupo"
    if "exp_metric" in keys or "exp_bucket" in keys or "experience" in keys:
        return "exgrpo"
    if "off_policy_reshape" in keys or "use_off_policy_loss" in keys:
        if settings.get(f"{_ACTOR}.use_sft_multitask_loss") == "True":
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


def _is_judged(settings: Mapping[str, str]) -> bool:
    """Return whether a judge rates the responses of Classmate-CoT's data set for sycophancy."""
    files = settings.get("data.train_files", "")
    return any(name in files for name in _JUDGED) and "mmlu" not in files


def _drop_unread(result: Translation) -> None:
    """Drop settings that the original does not read, or that repeat another one."""
    for key, value in list(result.settings.items()):
        is_critics = key.startswith(_OF_CRITIC) and result.recipe != "ppo"
        other = _REPEATED.get(key.rpartition(".")[2], "")
        if is_critics or (other and value == result.settings.get(other)):
            del result.settings[key]


def _read_scaled(result: Translation) -> None:
    """Check what the recipes of LUFFY and ExGRPO have with another scale, or not at all."""
    if result.recipe not in _SCALED_RECIPES:
        return
    for key, original in _SCALED.items():
        value = result.take(key)
        if value and value not in (str(original), f"{original:g}"):
            reason = (
                f"the recipe {result.recipe} has the equal of {original:g}; its scale differs from "
                "the original's (see the comment of the recipe)"
            )
            result.miss(key, value, reason)
    shape = result.take("off_policy_reshape")
    if shape.startswith("p_div_p_"):
        result.overrides["method.off_shape"] = "p_div_p"
        result.overrides["method.off_options.gamma"] = shape.removeprefix("p_div_p_")
    elif shape:
        result.miss(f"{_ACTOR}.off_policy_reshape", shape)
    if result.recipe == "exgrpo":
        for key in [key for key in result.settings if "prefix" in key]:
            value = result.take(key)
            if value != "False":
                result.miss(key, value, "exgrpo has no prefixes of demonstrations")


def _read_parallel_sizes(result: Translation, table: Table) -> None:
    """Set the workers that divide a model, or list the size; 1 divides nothing.

    Engines of vLLM have sizes of their own, which change no result. The reference and the critic
    have the policy's sizes here.
    """
    sizes = {key: value for key, value in result.settings.items() if key.endswith("parallel_size")}
    for key, value in sizes.items():
        del result.settings[key]
        leaf = key.rpartition(".")[2]
        policys = key.replace(".ref.", ".actor.").replace("critic.", "actor_rollout_ref.actor.")
        if ".rollout." in key or value == "1" or leaf == "data_parallel_size":
            continue
        if leaf in _PARALLEL_SIZES and key == policys:
            result.overrides |= {"cluster": "ray", _PARALLEL_SIZES[leaf]: value}
        elif key == policys or sizes.get(policys) != value:
            reason = table.reason(leaf) or "all models of a run are divided as the policy is"
            result.miss(key, value, reason)


# ---- data and reward


def _read_prompts(result: Translation) -> None:
    """Read what becomes of long prompts, and variables of the chat template."""
    truncation = result.take("data.truncation")
    if result.take_bool("filter_overlong_prompts"):
        truncation = "drop"
    if truncation:
        result.overrides["data.overlong"] = truncation
    for key, value in result.take_section("apply_chat_template_kwargs").items():
        result.overrides[f"data.template_options.{key.rpartition('.')[2]}"] = lower_bool(value)


def _rename_columns(result: Translation) -> None:
    prompt = result.take("data.prompt_key", "prompt")
    source = result.take("data.reward_fn_key", "data_source")
    _add_columns(result, {prompt: "prompt", source: "data_source"})


def _add_columns(result: Translation, columns: Mapping[str, str]) -> None:
    """Add columns that are renamed to the sources, as FILE:OLD=NEW."""
    names = "".join(f":{old}={new}" for old, new in columns.items() if old != new)
    for key in _SOURCES:
        if key in result.overrides:
            files = split_list(result.overrides[key])
            result.overrides[key] = ",".join(f"{file}{names}" for file in files)


def _sft_columns(result: Translation) -> dict[str, str]:
    """Return the columns of data.prompt_key and data.response_key, or of data.messages_key.

    `prompt_dict_keys` lead into a nested column.
    """
    given = {
        name: result.take(f"data.{name}")
        for name in ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys")
    }
    messages = [result.take(f"data.{name}") for name in ("messages_key", "multiturn.messages_key")]
    is_chat = result.take_bool("data.multiturn.enable")
    result.take("tools_key")
    if is_chat or not (given["prompt_key"] or given["response_key"]):
        return {name: "messages" for name in messages if name}
    columns: dict[str, str] = {}
    for role, default in (("prompt", "question"), ("response", "answer")):
        path = [given[f"{role}_key"] or default, *split_list(given[f"{role}_dict_keys"])]
        columns[".".join(part for part in path if part not in _UNSET)] = role
    return columns


def _read_reward(result: Translation, settings: Mapping[str, str]) -> None:
    """Read a function, a reward model that scores alone, or the judge of Classmate-CoT."""
    path = result.take("custom_reward_function.path")
    name = result.take("custom_reward_function.name", "compute_score")
    model = result.take("reward_model.model.path")
    judge = settings.get("reward_model.llm_judge_model_name", "")
    verifier = f"{path}:{name}" if path else ""
    if result.take_bool("reward_model.enable"):
        if path or not model:
            reason = "a reward model scores alone: reward.verifier=model:FOLDER"
            result.miss("reward_model.enable", "True", reason)
        else:
            verifier = f"model:{model}"
    if settings.get("reward_model.llm_judge_backend_type") == "hf_scoring" and judge:
        verifier = f"model:{judge}"
        for key in [key for key in result.settings if key.startswith("reward_model.llm_judge_")]:
            result.take(key)
    if verifier:
        result.overrides["reward.verifier"] = verifier
    elif result.recipe.startswith("classmate"):
        _read_classmate_reward(result, settings)


def _read_classmate_reward(result: Translation, settings: Mapping[str, str]) -> None:
    """Set the reward by the data set, as Classmate-CoT does; the recipes have sycophancy's."""
    if _is_judged(settings):
        result.missing.append(f"{SET_IT}the judge (reward.judge.model=http://HOST:PORT/v1#NAME)")
    elif any(name in settings.get("data.train_files", "") for name in _VERIFIED):
        result.overrides["reward.verifier"] = "auto"
    else:
        result.missing.append(
            f"{SET_IT}the reward of this data set (reward.verifier; for a judge also "
            "reward.judge.model and reward.judge.template)"
        )


# ---- the algorithm


def _read_kl(result: Translation, table: Table) -> None:
    """Read the KL penalty: in the loss or in the reward, each with estimator and coefficient."""
    estimators = table.choices["method.kl_estimator"]
    in_loss = result.take(f"{_ACTOR}.use_kl_loss").lower()
    in_reward = result.take_bool("algorithm.use_kl_in_reward")
    of_loss = result.take(f"{_ACTOR}.kl_loss_type"), result.take(f"{_ACTOR}.kl_loss_coef")
    # verl's defaults are those of the reward, not of the loss
    of_reward = result.take("algorithm.kl_penalty", "kl"), result.take("kl_ctrl.kl_coef")
    is_adaptive = result.take("kl_ctrl.type") == "adaptive"
    target = result.take("kl_ctrl.target_kl", "0.1")
    if in_loss == "true":
        place, (kind, coefficient) = "loss", of_loss
        if in_reward:
            result.miss("algorithm.use_kl_in_reward", "True", "beside use_kl_loss=True")
    elif in_reward:
        place, (kind, coefficient) = "reward", of_reward
        if is_adaptive:
            result.overrides["method.kl_target"] = target
    else:
        if in_loss:
            result.overrides["method.kl"] = "none"
        return
    result.overrides["method.kl"] = place
    if coefficient:
        result.overrides["method.kl_coef"] = coefficient
    if kind in estimators:
        result.overrides["method.kl_estimator"] = estimators[kind]
    elif kind:
        result.miss("kl_loss_type" if place == "loss" else "kl_penalty", kind)


def _read_dapo(result: Translation) -> None:
    """Read DAPO's filter of groups and its penalty for overlong responses."""
    groups = _by_last_part(result.take_section("filter_groups"))
    if groups.get("enable", "").lower() == "true":
        times = groups.get("max_num_gen_batches", "10")
        if times.isdecimal():
            result.overrides["method.max_refills"] = str(max(1, int(times) - 1))
        else:
            result.miss("filter_groups.max_num_gen_batches", times)
        if groups.get("metric") == "seq_final_reward":
            result.overrides["method.refill_by"] = "reward"
    sections = [result.take_section(name) for name in ("overlong_buffer", "overlong_buffer_cfg")]
    penalty = _by_last_part(sections[0] | sections[1])
    if penalty.get("enable", "").lower() == "true":
        result.overrides["method.overlong_buffer"] = penalty.get("len", "0")
        factor = penalty.get("penalty_factor", "1.0")
        if factor not in ("1", "1.0"):
            result.miss("overlong_buffer.penalty_factor", factor)
        if "reward.verifier" not in result.overrides:
            result.missing.append(
                f"{SET_IT}reward.verifier='2*math_answer - 1' for math problems, which verl scores "
                "1 and -1 before the penalty; auto scores 1 and 0"
            )


def _by_last_part(section: Mapping[str, str]) -> dict[str, str]:
    return {key.rpartition(".")[2]: value for key, value in section.items()}


def _read_warmup(result: Translation) -> None:
    """Read the optimizer's warm-up: steps, or without steps a share of all."""
    for section in ("actor_rollout_ref.actor.optim.", "optim."):
        names = ("lr_warmup_steps", "lr_warmup_steps_ratio", "warmup_steps_ratio")
        values = {name: result.settings.pop(section + name, "") for name in names}
        given = {name: value for name, value in values.items() if value and value[0] != "-"}
        positive = {name: value for name, value in given.items() if value.strip("0.")}
        for name, value in positive.items():
            if name != "lr_warmup_steps" and value.startswith("1"):  # here a share is below 1
                result.miss(section + name, value)
            else:
                result.overrides["optimizer.warmup_steps"] = value
            break
        else:
            if given:
                result.overrides["optimizer.warmup_steps"] = "0"


def _read_advantage(result: Translation, table: Table) -> None:
    """Read the estimator of advantages, where it is not the recipe's."""
    key = "algorithm.adv_estimator"
    value = result.take(key)
    recipe = result.recipe
    here = table.choices["method.advantage"].get(value, "")
    has_classmates = recipe.startswith("classmate") and recipe != "classmate_baseline"
    if has_classmates and value in _CLASSMATE_ADVANTAGES:
        result.overrides["method.advantage"] = _CLASSMATE_ADVANTAGES[value]
    elif (has_classmates and value in ("grpo_w_classmate", "gdpo")) or (
        recipe == "luffy_rl_sft" and value == "grpo_split"
    ):
        return
    elif recipe == "grpo" and here:
        if here != "grpo":
            result.overrides["method.advantage"] = here
    elif value and here != ("gae" if recipe == "ppo" else "grpo"):
        result.miss(key, value)


def _read_steps(result: Translation) -> None:
    """Read what counts updates, layers, workers and trackers."""
    overrides = result.overrides
    problems = overrides.get("training.problems_per_step", "")
    if problems.isdecimal():
        rows = result.take_count("actor.ppo_mini_batch_size")
        if rows:
            overrides["training.updates_per_step"] = str(max(1, int(problems) // rows))
    layer = result.take_count("internal_layer")
    if layer is not None:
        overrides["method.num_blocks"] = str(layer + 1)
    if result.take("val_kwargs.do_sample").lower() == "false":
        overrides["training.validation_temperature"] = "0"
    nodes = result.take_count("trainer.nnodes")
    if "trainer.nnodes" not in result.settings:  # a variable is no number
        gpus = result.take_count("trainer.n_gpus_per_node") or 1
        if gpus * (nodes or 1) > 1:
            overrides |= {"cluster": "ray", "cluster.workers": str(gpus * (nodes or 1))}
    result.track(re.findall(r"\w+", result.take("trainer.logger")))


def _read_clips(result: Translation) -> None:
    """Read the bounds of the ratio where one setting is both of them, or removes them."""
    overrides = result.overrides
    sides = ("method.clip_low", "method.clip_high")
    bound = result.take(f"{_ACTOR}.clip_ratio")
    if bound:
        if bound != "0.2" and not any(side in overrides for side in sides):
            reason = (
                "verl clips at 0.2 unless clip_ratio_low and clip_ratio_high are set; here both "
                f"are {bound}"
            )
            result.miss(f"{_ACTOR}.clip_ratio", bound, reason)
        for side in sides:
            overrides.setdefault(side, bound)
    # The recipe exgrpo keeps the clip until its replay starts, as the original does.
    if result.take_bool("loss_remove_clip") and result.recipe != "exgrpo":
        overrides |= dict.fromkeys(sides, "inf")


def _read_loss(result: Translation) -> None:
    """Replace clips and aggregation of losses other than PPO's by what verl does with them."""
    overrides = result.overrides
    loss = overrides.get("method.loss", "ppo_clip")
    for name, (losses, option) in _LOSS_OPTIONS.items():
        value = result.take(name)
        if loss in losses and value:
            overrides[f"method.loss_options.{option}"] = value
    if loss == "ppo_clip":
        return
    dual_clip = overrides.pop("method.dual_clip", "3.0")
    if loss in _DPPO:
        overrides["method.loss_options.max_ratio"] = dual_clip
    for name in ("method.clip_low", "method.clip_high"):
        if loss in _CLIPPED:
            overrides.setdefault(name, "0.2")
        else:
            overrides.pop(name, None)
    if loss in _BY_ROW:
        given = overrides.get("method.aggregation", _MEAN_OF_ROWS)
        if given != _MEAN_OF_ROWS:
            reason = f"verl ignores it, its {loss} is {_MEAN_OF_ROWS}"
            result.miss("loss_agg_mode", given, reason)
        overrides["method.aggregation"] = _MEAN_OF_ROWS


def _read_correction(result: Translation) -> None:
    """Read the correction of the gap between engine and trainer: weights, rules and bypass."""
    section = _by_last_part(result.take_section(_CORRECTION))
    given = {name: value for name, value in section.items() if value.lower() != "false"}
    overrides = result.overrides
    level = given.pop("rollout_is", "")
    bound = given.pop("rollout_is_threshold", "2.0")
    is_bypass = bool(given.pop("bypass_mode", ""))
    loss = given.pop("loss_type", "ppo_clip")
    if is_bypass and loss != "ppo_clip":
        result.miss(f"{_CORRECTION}.loss_type", loss, _REINFORCE)
    if is_bypass:  # its ratio is that of policy and engine, so that weights would count twice
        overrides["method.correction"] = "bypass"
    elif level in ("token", "sequence"):
        overrides["method.correction"] = level
        overrides["method.correction_bound"] = bound
    elif level:
        result.miss(f"{_CORRECTION}.rollout_is", level)
    rules, bounds = given.pop("rollout_rs", ""), given.pop("rollout_rs_threshold", "")
    try:
        _read_rejection(result, split_list(rules), split_list(bounds))
    except (ValueError, ZeroDivisionError):
        reason = f"with rollout_rs_threshold={bounds}: each rule needs a bound, or all the same"
        result.miss(f"{_CORRECTION}.rollout_rs", rules, reason)
    for name, value in given.items():
        result.miss(f"{_CORRECTION}.{name}", value)


def _read_rejection(result: Translation, rules: list[str], bounds: list[str]) -> None:
    """Read rules of rejection with their bounds: one per rule, or one for all."""
    if len(bounds) == 1 or not rules:
        bounds = bounds[:1] * len(rules)
    found = {
        f"method.rejection.{rule}": _inverted(bound) if rule.endswith("k1") else bound
        for rule, bound in zip(rules, bounds, strict=True)
    }
    result.overrides |= found
    if found:
        result.overrides.setdefault("method.correction", "rejection")


def _inverted(bound: str) -> str:
    """Return bounds of 1 / rho, which verl compares, as bounds of rho."""
    low, separator, high = bound.partition("_")
    if not separator:  # u stands for 1/u to u
        return bound
    return "_".join(str(float(f"{1 / float(end):.6g}")) for end in (high, low))
