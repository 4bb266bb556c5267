"""Translates the flags of OpenRLHF's programs: train_ppo_ray, train_sft, train_dpo and others.

Flags of its versions before April 2026, which had no sections, are read as the ones of today.
"""

from postgrad.config.import_openrlhf_names import (
    FLAT_NAMES,
    NAMES,
    NOT_NEEDED,
    PPO_NAMES,
    REASONS,
    SUPERVISED_NAMES,
)
from postgrad.config.import_result import (
    SCHEDULES,
    Translation,
    drop_lora,
    drop_warmup,
    source_of,
    split_list,
    track_of,
    undecayed,
)
from postgrad.errors import ConfigError

PPO = "train_ppo_ray"
# Programs, and the recipes here.
RECIPES = {
    PPO: "ppo",
    "train_ppo": "ppo",
    "train_sft": "sft",
    "train_dpo": "dpo",
    "train_rm": "reward_model",
    "train_kto": "kto",
}
# Estimators, with the recipe and the advantage here. All use PPO's clipped loss.
ESTIMATORS = {
    "gae": ("ppo", ""),
    "reinforce": ("grpo", "reinforce_pp"),
    "rloo": ("grpo", "rloo"),
    "reinforce_baseline": ("grpo", "reinforce_pp_baseline"),
    "group_norm": ("grpo", ""),
    "dr_grpo": ("grpo", "drgrpo"),
}
_NORMALIZED = ("gae", "reinforce", "reinforce_baseline")  # over the batch
UNBOUNDED = "1e9"  # above the largest weight, exp(20)
_CORRECTIONS = ("is_correction_enable", "is_correction_threshold", "is_correction_type")
_KL = ("algo.kl.use_loss", "algo.kl.estimator", "algo.kl.init_coef")
# Flags that _sources reads.
_OF_SOURCES = (
    *("data.prompt_dataset", "data.dataset", "data.prompt_split", "data.dataset_split"),
    *("data.input_key", "data.label_key", "data.output_key", "data.prompt_key"),
    *("data.chosen_key", "data.rejected_key", "eval.split", "data.multiturn"),
    *("model.pretrain_mode_enable", "eval.dataset"),
)


def translate_openrlhf(program: str, flags: dict[str, str]) -> Translation:
    """The recipe and overrides that equal the flags of a program, and what has no equivalent.

    Raises:
        ConfigError: the program is none that is known here.
    """
    if program not in RECIPES:
        known = ", ".join(name for name in RECIPES if name != "train_ppo")
        raise ConfigError(f"openrlhf.cli.{program} is not known here; known are {known}")
    is_ppo = RECIPES[program] == "ppo"
    flags = {_dotted(name, is_ppo): value for name, value in flags.items()}
    result = Translation(RECIPES[program])
    if is_ppo:
        _translate_ppo(result, flags)
    else:
        _translate_supervised(result, flags)
    _translate_shared(result, flags, is_ppo)
    drop_lora(result.overrides)
    if "model.path" not in result.overrides:
        name = "actor" if is_ppo else "model"
        raise ConfigError(
            f"openrlhf.cli.{program}: no --{name}.model_name_or_path among its flags; write all "
            "flags behind the program, or in arrays of this script"
        )
    return result


def _dotted(name: str, is_ppo: bool) -> str:
    """Today's name of a flag."""
    dotted = FLAT_NAMES.get(name, name) if "." not in name else name
    if dotted.startswith("MODEL."):
        return dotted.replace("MODEL", "actor" if is_ppo else "model")
    if dotted.startswith("OPTIMIZER."):
        return dotted.replace("OPTIMIZER.", "actor." if is_ppo else "")
    return dotted


def _translate_shared(result: Translation, flags: dict[str, str], is_ppo: bool) -> None:
    """The flags that are alike in all programs, and the list of what is left."""
    names = NAMES | (PPO_NAMES if is_ppo else SUPERVISED_NAMES)
    overrides = result.overrides
    prefix = "actor." if is_ppo else ""
    for key, value in flags.items():
        if key == "critic.freezing_steps" and value.startswith("-"):  # not set
            continue
        if key in names:
            if result.recipe == "ppo" or not names[key].startswith(("method.critic", "method.lam")):
                overrides[names[key]] = _listed(key, value)
        elif key.startswith("critic.") and result.recipe != "ppo":
            continue
        elif key == f"{prefix}adam.betas":
            overrides["optimizer.betas"] = f"[{','.join(value.split())}]"
        elif key == f"{prefix}lr_scheduler" and value in SCHEDULES:
            overrides["optimizer.schedule"] = SCHEDULES[value]
        elif key == f"{prefix}min_lr_ratio":
            overrides["optimizer.final_lr_ratio"] = value
        elif key == f"{prefix}optim" and value == "adam":
            continue
        elif key.endswith("gradient_checkpointing_enable"):
            overrides["model.activation_checkpointing"] = "true"
        elif key == "ds.load_in_4bit":
            overrides["model.quantization"] = "4bit"
        elif key in ("ckpt.save_steps", "eval.steps"):
            name = "checkpoint_every" if key == "ckpt.save_steps" else "validate_every"
            if value.isdecimal() and int(value) > 0:
                overrides[f"training.{name}"] = value
        elif key in ("logger.wandb.key", "logger.tensorboard_dir"):
            tracker = "wandb" if "wandb" in key else "tensorboard"
            overrides |= track_of([*split_list(overrides.get("track", "")), tracker])
        elif key not in _handled(is_ppo) and not key.startswith(NOT_NEEDED):
            _miss(result, key, value)
    if flags.get(f"{prefix}lr_scheduler", "cosine_with_min_lr") != "cosine_with_min_lr":
        overrides["optimizer.final_lr_ratio"] = "0.0"  # only that schedule reads min_lr_ratio
    if flags.get(f"{prefix}lr_scheduler") == "constant":
        result.missing += drop_warmup(overrides)
    decay = overrides.get("optimizer.weight_decay", "0")
    if decay.strip("0."):
        result.missing.append(undecayed(decay))
    if "data.apply_chat_template" not in flags and "model.pretrain_mode_enable" not in flags:
        overrides["data.template"] = "plain"
        if result.recipe in ("sft", "kto") and "data.input_template" not in flags:
            _miss(result, "data.input_template", r"'User: {}\nAssistant: ' (its default)")


def _listed(key: str, value: str) -> str:
    """A list of modules as YAML writes it."""
    if key == "ds.lora.target_modules" and " " in value:
        return f"[{','.join(value.split())}]"
    return value


def _miss(result: Translation, key: str, value: str) -> None:
    reason = REASONS.get(key, "no setting here, or no flag of OpenRLHF that is known here")
    result.missing.append(f"--{key} {value}".strip() + f": {reason}")


def _handled(is_ppo: bool) -> tuple[str, ...]:
    """Flags that the functions below translate together."""
    if not is_ppo:
        return (*_OF_SOURCES, "data.max_len", "model.ipo_enable", "model.loss_type")
    return (
        *_OF_SOURCES,
        *_KL,
        *(f"algo.advantage.{name}" for name in _CORRECTIONS),
        *("algo.kl.target", "algo.advantage.estimator", "algo.advantage.no_std_norm"),
        *("train.batch_size", "data.max_len", "rollout.max_new_tokens", "actor.policy_loss_type"),
        *("actor.eps_clip", "actor.eps_clip_low_high", "reward.model_name_or_path"),
        *("algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"),
        *("actor.num_nodes", "actor.num_gpus_per_node"),
    )


# ---- train_ppo_ray


def _translate_ppo(result: Translation, flags: dict[str, str]) -> None:
    estimator = flags.get("algo.advantage.estimator", "gae")
    if estimator not in ESTIMATORS:
        raise ConfigError(
            f"--algo.advantage.estimator {estimator} is not known here; "
            f"known are {', '.join(ESTIMATORS)}"
        )
    result.recipe, advantage = ESTIMATORS[estimator]
    overrides = result.overrides
    if advantage:
        overrides["method.advantage"] = advantage
    if "algo.advantage.no_std_norm" in flags and estimator in _NORMALIZED:
        _miss(result, "algo.advantage.no_std_norm", "")
    if estimator == "gae" and "critic.model_name_or_path" not in flags:
        reward_model = flags.get("reward.model_name_or_path", "").split(",")[0]
        if reward_model and "reward.remote_url" not in flags:
            overrides["method.critic_path"] = reward_model
    if flags.get("actor.policy_loss_type") == "gspo":  # always a mean over responses
        overrides |= {"method.loss": "gspo", "method.aggregation": "seq-mean-token-mean"}
    _add_sources(result, flags, "data.prompt_dataset", {"data.label_key": "ground_truth"})
    _translate_sizes(result, flags)
    _translate_kl(result, flags)
    _translate_clip(result, flags)
    _translate_reward_model(result, flags)
    _translate_correction(result, flags)
    if "algo.dynamic_filtering_enable" in flags:
        overrides["method.max_refills"] = "9"
        bounds = flags.get("algo.dynamic_filtering_range", "0 1").split()
        if [float(bound) for bound in bounds] != [0.0, 1.0]:
            _miss(result, "algo.dynamic_filtering_range", " ".join(bounds))


def _translate_sizes(result: Translation, flags: dict[str, str]) -> None:
    """Batches, lengths and workers. OpenRLHF counts responses in train.batch_size."""
    overrides = result.overrides
    problems = flags.get("rollout.batch_size", "1024")
    samples = flags.get("rollout.n_samples_per_prompt", "1")
    rows = flags.get("train.batch_size", "128")
    if all(number.isdecimal() and int(number) for number in (problems, samples, rows)):
        updates, rest = divmod(int(problems) * int(samples), int(rows))
        if rest == 0 and updates:
            overrides["training.updates_per_step"] = str(updates)
        else:
            result.missing.append(
                f"--train.batch_size {rows}: {problems} x {samples} responses of a step cannot be "
                "divided into updates of this size; set training.updates_per_step"
            )
    elif "train.batch_size" in flags:
        _miss(result, "train.batch_size", rows)
    longest = flags.get("data.max_len", "")
    new = flags.get("rollout.max_new_tokens", "")
    if new:
        overrides["rollout.max_response_tokens"] = new
    if longest.isdecimal() and new.isdecimal() and int(longest) > int(new):
        overrides["data.max_prompt_tokens"] = str(int(longest) - int(new))
    elif longest or not new:
        _miss(result, "data.max_len", longest or "2048 (its default)")
    gpus = (flags.get("actor.num_nodes", "1"), flags.get("actor.num_gpus_per_node", "8"))
    if all(number.isdecimal() for number in gpus) and int(gpus[0]) * int(gpus[1]) > 1:
        overrides |= {"cluster": "ray", "cluster.workers": str(int(gpus[0]) * int(gpus[1]))}


def _translate_kl(result: Translation, flags: dict[str, str]) -> None:
    """The KL penalty is in the reward unless algo.kl.use_loss; a coefficient of 0 is none."""
    overrides = result.overrides
    coefficient = flags.get("algo.kl.init_coef", "0.01")
    try:
        is_on = float(coefficient) != 0
    except ValueError:
        _miss(result, "algo.kl.init_coef", coefficient)
        return
    if not is_on:
        overrides["method.kl"] = "none"
        return
    overrides["method.kl"] = "loss" if "algo.kl.use_loss" in flags else "reward"
    overrides["method.kl_estimator"] = flags.get("algo.kl.estimator", "k1")
    overrides["method.kl_coef"] = coefficient
    if "algo.kl.target" in flags:
        overrides["method.kl_target"] = flags["algo.kl.target"]


def _translate_clip(result: Translation, flags: dict[str, str]) -> None:
    """OpenRLHF has no dual clip unless it is set."""
    both = flags.get("actor.eps_clip", "0.2")
    low, high = (flags.get("actor.eps_clip_low_high") or f"{both} {both}").split()[:2]
    result.overrides |= {"method.clip_low": low, "method.clip_high": high}
    if flags.get("actor.policy_loss_type", "ppo") == "ppo":
        result.overrides["method.dual_clip"] = "inf"


def _translate_reward_model(result: Translation, flags: dict[str, str]) -> None:
    path = flags.get("reward.model_name_or_path", "")
    if path and "," not in path:
        result.overrides["reward.verifier"] = f"model:{path}"
    elif path:
        _miss(result, "reward.model_name_or_path", path)


def _translate_correction(result: Translation, flags: dict[str, str]) -> None:
    """Importance weights between vLLM's and the trainer's log-probs; gspo's ratio is to vLLM's."""
    if "algo.advantage.is_correction_enable" not in flags:
        return
    if flags.get("actor.policy_loss_type") == "gspo":
        result.overrides["method.correction"] = "bypass"
        return
    kind = flags.get("algo.advantage.is_correction_type", "tis")
    bounds = flags.get("algo.advantage.is_correction_threshold", "0.5 5.0").split()
    high = bounds[-1]
    bound = f"{bounds[0]}_{high}" if kind == "icepop" and len(bounds) == 2 else high
    result.overrides |= {"method.correction": "token", "method.correction_bound": bound}
    if kind == "tis" and len(bounds) == 2:
        result.missing.append(
            f"--algo.advantage.is_correction_threshold {' '.join(bounds)}: weights are limited to "
            f"at most {high} here, not to at least {bounds[0]}"
        )
    elif kind == "seq-mask-tis" and len(bounds) == 2:  # weights without a bound
        result.overrides["method.correction_bound"] = UNBOUNDED
        result.overrides["method.rejection.seq_mean_k1"] = "_".join(str(float(x)) for x in bounds)


# ---- train_sft, train_dpo, train_rm, train_kto


def _translate_supervised(result: Translation, flags: dict[str, str]) -> None:
    overrides = result.overrides
    if "model.ipo_enable" in flags:
        overrides["method.loss"] = "ipo"
        result.missing.append(
            "--model.ipo_enable: OpenRLHF adds up the log-probs of a response, here IPO has their "
            "mean, as in TRL; method.beta has another scale"
        )
    if flags.get("model.loss_type", "sigmoid") != "sigmoid":
        _miss(result, "model.loss_type", flags["model.loss_type"])
    columns = {
        "data.output_key": "response",
        "data.chosen_key": "chosen",
        "data.rejected_key": "rejected",
    }
    if result.recipe == "kto":
        columns = {"data.output_key": "completion", "data.label_key": "label"}
    _add_sources(result, flags, "data.dataset", columns)
    longest = flags.get("data.max_len", "")
    if longest:
        overrides |= {"data.max_prompt_tokens": longest, "rollout.max_response_tokens": longest}
        result.missing.append(
            f"--data.max_len {longest}: it limits prompt and response together; here each has "
            "this limit"
        )


def _add_sources(
    result: Translation, flags: dict[str, str], dataset: str, columns: dict[str, str]
) -> None:
    """The data sets, with the columns that the flags name, by `columns` {flag: column here}."""
    renamed: dict[str, str] = {}
    prompt = "data.prompt_key" if result.recipe in ("dpo", "reward_model") else "data.input_key"
    is_text = "model.pretrain_mode_enable" in flags
    is_chat = result.recipe == "sft" and "data.output_key" not in flags and not is_text
    if is_text:
        renamed[flags.get("data.input_key", "input")] = "text"
    elif is_chat:  # one column with all messages
        renamed[flags.get("data.input_key", "input")] = "messages"
    else:
        if prompt in flags or prompt == "data.input_key":
            renamed[flags.get(prompt, "input")] = "prompt"
        renamed |= {flags[flag]: name for flag, name in columns.items() if flag in flags}
    if result.recipe == "sft" and not is_text and is_chat and "data.multiturn" not in flags:
        result.overrides["method.train_on"] = "last"
    split_flag = "data.prompt_split" if dataset == "data.prompt_dataset" else "data.dataset_split"
    sources = (
        (dataset, "data.train", split_flag),
        ("eval.dataset", "data.validation", "eval.split"),
    )
    for flag, name, split in sources:
        if flag in flags:
            files = [_source(one, flags.get(split, "train")) for one in split_list(flags[flag])]
            result.overrides[name] = source_of(files, renamed)


def _source(name: str, split: str) -> str:
    """`hub:OWNER/NAME:SPLIT` for a name of the hub, the path itself for a file or folder."""
    is_file = name.startswith((".", "/", "~", "$")) or name.endswith(
        (".jsonl", ".json", ".parquet")
    )
    return name if is_file or name.count("/") != 1 else f"hub:{name}:{split}"
