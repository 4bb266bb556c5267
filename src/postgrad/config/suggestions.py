"""Hints for a key that does not exist, also for the settings of TRL, verl and transformers."""

import difflib

from postgrad.errors import did_you_mean

# The last part of a setting's name in TRL, verl or transformers -> the setting here.
FOREIGN_NAMES = {
    "learning_rate": "optimizer.lr",
    "grad_clip": "optimizer.max_grad_norm",
    "clip_grad": "optimizer.max_grad_norm",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "lr_warmup_steps_ratio": "optimizer.warmup_ratio",
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
    "num_iterations": "training.ppo_epochs",
    "ppo_mini_batch_size": "training.updates_per_step",
    "max_steps": "training.steps",
    "total_training_steps": "training.steps",
    "num_train_epochs": "training.epochs",
    "total_epochs": "training.epochs",
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
    "load_in_4bit": "model.quantization",
    "activation_offloading": "model.activation_offload",
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


def suggest(key: str, known: list[str]) -> str:
    """Returns a hint for an unknown key.

    In this order: a known key with the same last part, the name of another trainer, a similar
    spelling, all keys of the section.
    """
    section, _, leaf = key.rpartition(".")
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if same_leaf:
        return f"did you mean {same_leaf[0]}?"
    foreign = FOREIGN_NAMES.get(leaf, "")
    if foreign in known or foreign.startswith("method."):
        return f"the nearest here is {foreign}"
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    similar = difflib.get_close_matches(leaf, siblings, n=1)
    if similar:
        return f"did you mean {section}.{similar[0]}?" if section else f"did you mean {similar[0]}?"
    if section and siblings:
        return f"known in {section}: {', '.join(siblings)}"
    return did_you_mean(key, known)
