"""Names of settings in verl's scripts and TRL's configs, and the settings here."""

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"

# Settings of verl with the same value here.
NAMES = {
    "data.train_files": "data.train",
    "data.val_files": "data.validation",
    "data.train_batch_size": "training.problems_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_response_tokens",
    "data.shuffle": "data.shuffle",
    "data.seed": "seed",
    f"{_MODEL}.path": "model.path",
    f"{_MODEL}.enable_gradient_checkpointing": "model.activation_checkpointing",
    f"{_MODEL}.lora_rank": "model.lora.rank",
    f"{_MODEL}.lora_alpha": "model.lora.alpha",
    f"{_MODEL}.trust_remote_code": "model.trust_remote_code",
    f"{_ACTOR}.optim.lr": "optimizer.lr",
    f"{_ACTOR}.optim.lr_warmup_steps": "optimizer.warmup_steps",
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": "optimizer.warmup_ratio",
    f"{_ACTOR}.optim.weight_decay": "optimizer.weight_decay",
    f"{_ACTOR}.grad_clip": "optimizer.max_grad_norm",
    f"{_ACTOR}.clip_ratio_low": "method.clip_low",
    f"{_ACTOR}.clip_ratio_high": "method.clip_high",
    f"{_ACTOR}.clip_ratio_c": "method.dual_clip",
    f"{_ACTOR}.entropy_coeff": "method.entropy_coef",
    f"{_ACTOR}.loss_agg_mode": "method.aggregation",
    f"{_ACTOR}.ppo_epochs": "training.ppo_epochs",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "training.token_budget",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "cluster.sequence_parallel",
    f"{_ACTOR}.iterative_steps": "method.phase_one_steps",
    f"{_ROLLOUT}.n": "rollout.samples",
    f"{_ROLLOUT}.temperature": "rollout.temperature",
    f"{_ROLLOUT}.top_p": "rollout.top_p",
    f"{_ROLLOUT}.n_prefix": "method.num_demonstrations",
    f"{_ROLLOUT}.min_prefix_ratio": "method.prefix_min",
    f"{_ROLLOUT}.max_prefix_ratio": "method.prefix_max",
    f"{_ROLLOUT}.prefix_strategy": "method.prefix_strategy",
    f"{_ROLLOUT}.val_kwargs.n": "training.validation_samples",
    f"{_ROLLOUT}.val_kwargs.temperature": "training.validation_temperature",
    f"{_ROLLOUT}.val_kwargs.top_p": "training.validation_top_p",
    "algorithm.gamma": "method.gamma",
    "algorithm.lam": "method.lam",
    "algorithm.norm_adv_by_std_in_grpo": "method.normalize_by_std",
    "algorithm.grpo_use_std": "method.normalize_by_std",
    "critic.optim.lr": "method.critic_lr",
    "critic.model.path": "method.critic_path",
    "critic.cliprange_value": "method.critic_clip",
    "trainer.critic_warmup": "method.critic_warmup",
    "trainer.total_epochs": "training.epochs",
    "trainer.total_training_steps": "training.steps",
    "trainer.experiment_name": "name",
    "trainer.default_local_dir": "runs",
}

# Endings of verl's settings that change no result here: sizes of passes, memory and placement are
# chosen by the framework, or belong to verl's own workers.
NOT_NEEDED = (
    "micro_batch_size",
    "micro_batch_size_per_gpu",
    "use_dynamic_bsz",
    "use_remove_padding",
    "param_offload",
    "optimizer_offload",
    "grad_offload",
    "fsdp_size",
    "gpu_memory_utilization",
    "tensor_model_parallel_size",
    "sequence_parallel_size",
    "log_prob_max_token_len_per_gpu",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enforce_eager",
    "free_cache_engine",
    "nnodes",
    "project_name",
    "resume_mode",
    "val_before_train",
    "val_batch_size",
    "use_fused_kernels",
    "filter_groups.max_num_gen_batches",
    "val_kwargs.do_sample",
    "prompt_key",
    "rollout.name",
    "rollout.mode",
    "balance_batch",
    "return_raw_chat",
    "calculate_log_probs",
    "overlong_buffer.log",
    "reward_manager",
)

ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "grpo_passk",
    "grpo_split": "grpo_split",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "remax": "remax",
    "gdpo": "gdpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "tir_optimal_token_baseline",
}
LOSSES = {"vanilla": "ppo_clip"} | {
    name: name
    for name in (
        *("gspo", "cispo", "sapo", "gpg", "geo_mean", "clip_cov", "kl_cov"),
        *("dppo_tv", "dppo_kl", "dro"),
    )
}
_KL_NAMES = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
KL_TYPES = _KL_NAMES | {f"{name}+": f"{here}+" for name, here in _KL_NAMES.items()}

# Settings of verl that only a run with a critic reads.
OF_CRITIC = ("critic.", "algorithm.lam", "trainer.critic_warmup")

TRL_NAMES = {
    "model_name_or_path": "model.path",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_ratio",
    "lr_scheduler_type": "optimizer.schedule",
    "num_generations": "rollout.samples",
    "max_completion_length": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "temperature": "rollout.temperature",
    "num_iterations": "training.ppo_epochs",
    "steps_per_generation": "training.updates_per_step",
    "epsilon": "method.clip_low",
    "epsilon_high": "method.clip_high",
    "mask_truncated_completions": "method.mask_truncated",
    "max_steps": "training.steps",
    "num_train_epochs": "training.epochs",
    "save_steps": "training.checkpoint_every",
    "eval_steps": "training.validate_every",
    "output_dir": "runs",
    "run_name": "name",
    "seed": "seed",
    "gradient_checkpointing": "model.activation_checkpointing",
    "label_smoothing": "method.label_smoothing",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "delta": "method.dual_clip",
    "desirable_weight": "method.desirable_weight",
    "undesirable_weight": "method.undesirable_weight",
    "simpo_gamma": "method.target_margin",
    "center_rewards_coefficient": "method.centering",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
}
# Settings of TRL that change no result here.
TRL_NOT_NEEDED = (
    *("bf16", "fp16", "tf32", "use_cpu", "use_vllm", "vllm_gpu_memory_utilization"),
    *("logging_steps", "logging_strategy", "log_completions", "packing", "padding_free"),
    *("save_strategy", "eval_strategy", "remove_unused_columns", "ddp_find_unused_parameters"),
    *("torch_dtype", "attn_implementation", "gradient_checkpointing_kwargs", "use_peft"),
    *("per_device_eval_batch_size", "dataloader_num_workers", "use_liger_kernel"),
)

# TRL's configs and the recipes here.
TRL_RECIPES = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "PPOConfig": "ppo",
    "RLOOConfig": "rloo",
    "GRPOConfig": "grpo",
    "KTOConfig": "kto",
    "ORPOConfig": "orpo",
    "RewardConfig": "reward_model",
    "PRMConfig": "process_reward_model",
    "GKDConfig": "gkd",
    "OnlineDPOConfig": "online_dpo",
    "CPOConfig": "simpo",
}
TRL_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
TRL_DPO_LOSSES = {"sigmoid": "sigmoid", "ipo": "ipo", "hinge": "hinge"}
