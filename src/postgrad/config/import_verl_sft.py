"""Translates SFT scripts of verl: fsdp_sft_trainer and sft_trainer."""

from postgrad.config.import_names import NOT_NEEDED, NOT_NEEDED_SECTIONS, REASONS
from postgrad.config.import_result import (
    SCHEDULES,
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

# Settings with the same value here.
SFT_NAMES = {
    "data.train_batch_size": "training.problems_per_step",
    "data.max_token_len_per_gpu": "training.token_budget",
    "data.seed": "seed",
    "data.val_max_samples": "training.validation_problems",
    "model.partial_pretrain": "model.path",
    "model.path": "model.path",
    "model.enable_gradient_checkpointing": "model.activation_checkpointing",
    "model.trust_remote_code": "model.trust_remote_code",
    "model.lora_rank": "model.lora.rank",
    "model.lora_alpha": "model.lora.alpha",
    "model.target_modules": "model.lora.targets",
    "optim.lr": "optimizer.lr",
    "optim.betas": "optimizer.betas",
    "optim.weight_decay": "optimizer.weight_decay",
    "optim.clip_grad": "optimizer.max_grad_norm",
    "optim.min_lr_ratio": "optimizer.final_lr_ratio",
    "optim.lr_warmup_steps": "optimizer.warmup_steps",
    "optim.lr_warmup_steps_ratio": "optimizer.warmup_ratio",
    "optim.warmup_steps_ratio": "optimizer.warmup_ratio",
    "trainer.total_epochs": "training.epochs",
    "trainer.total_training_steps": "training.steps",
    "trainer.experiment_name": "name",
    "trainer.default_local_dir": "runs",
    "trainer.max_ckpt_to_keep": "training.keep_checkpoints",
    "trainer.seed": "seed",
}
# Settings that are read together; see _sources.
_COLUMNS = (
    *("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys"),
    *("messages_key", "tools_key", "train_files", "val_files"),
)
_NOT_NEEDED = (
    *("pad_mode", "cpu_offload", "offload_params", "nnodes", "project_name", "balance_dp_token"),
    *("enable_thinking_key", "default_hdfs_dir", "ignore_input_ids_mismatch"),
)
_UNSET = ("null", "None", "-1")


def translate_verl_sft(settings: dict[str, str]) -> Translation:
    """The recipe sft and the overrides that equal the settings of an SFT script of verl."""
    result = Translation("sft")
    overrides = result.overrides
    _add_sources(result, settings)
    for key, value in settings.items():
        leaf = key.rpartition(".")[2]
        if key in SFT_NAMES:
            if value not in _UNSET:
                overrides[SFT_NAMES[key]] = lower_bool(value)
        elif leaf.endswith("parallel_size"):
            translate_parallel(result, key, value)
        elif not _is_not_needed(key, leaf):
            _translate_special(result, key, leaf, value, settings)
    drop_epochs(overrides)
    drop_lora(overrides)
    return result


def _is_not_needed(key: str, leaf: str) -> bool:
    """Whether a setting changes no result here, or is read with others."""
    if leaf in _COLUMNS or leaf in _NOT_NEEDED or key == "data.multiturn.enable":
        return True
    return key.endswith(NOT_NEEDED) or any(part in key for part in NOT_NEEDED_SECTIONS)


def _add_sources(result: Translation, settings: dict[str, str]) -> None:
    """The files with the columns of data.prompt_key and data.response_key, or data.messages_key.

    `prompt_dict_keys` lead into a nested column.
    """
    is_chat = settings.get("data.multiturn.enable", "").lower() == "true"
    has_pairs = any(f"data.{name}" in settings for name in ("prompt_key", "response_key"))
    columns: dict[str, str] = {}
    if has_pairs and not is_chat:
        for role, default in (("prompt", "question"), ("response", "answer")):
            key = settings.get(f"data.{role}_key", default)
            path = [key, *split_list(settings.get(f"data.{role}_dict_keys", ""))]
            columns[".".join(part for part in path if part not in _UNSET)] = role
    else:
        for name in ("data.messages_key", "data.multiturn.messages_key"):
            if name in settings:
                columns[settings[name]] = "messages"
    for key, name in (("data.train_files", "data.train"), ("data.val_files", "data.validation")):
        if settings.get(key, "null") not in _UNSET:
            result.overrides[name] = source_of(split_list(settings[key]), columns)


def _translate_special(
    result: Translation, key: str, leaf: str, value: str, settings: dict[str, str]
) -> None:
    overrides = result.overrides
    if key == "data.max_length" and value.isdecimal():
        overrides |= {"data.max_prompt_tokens": value, "rollout.max_response_tokens": value}
        result.missing.append(
            f"{key}={value}: verl limits prompt and response together; here each has this limit"
        )
    elif key == "data.truncation":
        if value != "error":
            result.missing.append(f"{key}={value}: responses are never truncated here")
    elif leaf in ("lr_scheduler", "lr_scheduler_type") and value in SCHEDULES:
        overrides["optimizer.schedule"] = SCHEDULES[value]
    elif leaf in ("save_freq", "test_freq") and value.lstrip("-").isdecimal():
        name = "checkpoint_every" if leaf == "save_freq" else "validate_every"
        if int(value) > 0:
            overrides[f"training.{name}"] = value
    elif leaf == "n_gpus_per_node" and value.isdecimal():
        nodes = settings.get("trainer.nnodes", "1")
        if nodes.isdecimal() and int(value) * int(nodes) > 1:
            overrides |= {"cluster": "ray", "cluster.workers": str(int(value) * int(nodes))}
    elif leaf == "logger":
        overrides |= track_of(name for name in TRACKERS if name in value)
    elif value not in _UNSET:
        reason = REASONS.get(leaf)
        result.missing.append(f"{key}={value}: {reason}" if reason else f"{key}={value}")
