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
    f"{_MODEL}.lora.rank": "model.lora.rank",
    f"{_MODEL}.lora.alpha": "model.lora.alpha",
    f"{_MODEL}.target_modules": "model.lora.targets",
    f"{_MODEL}.trust_remote_code": "model.trust_remote_code",
    f"{_ACTOR}.optim.lr": "optimizer.lr",
    f"{_ACTOR}.optim.lr_warmup_steps": "optimizer.warmup_steps",
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": "optimizer.warmup_ratio",
    f"{_ACTOR}.optim.weight_decay": "optimizer.weight_decay",
    f"{_ACTOR}.optim.betas": "optimizer.betas",
    f"{_ACTOR}.optim.min_lr_ratio": "optimizer.final_lr_ratio",
    f"{_ACTOR}.optim.clip_grad": "optimizer.max_grad_norm",
    f"{_ACTOR}.grad_clip": "optimizer.max_grad_norm",
    f"{_ACTOR}.clip_ratio_low": "method.clip_low",
    f"{_ACTOR}.clip_ratio_high": "method.clip_high",
    f"{_ACTOR}.clip_ratio_c": "method.dual_clip",
    f"{_ACTOR}.entropy_coeff": "method.entropy_coef",
    f"{_ACTOR}.loss_agg_mode": "method.aggregation",
    f"{_ACTOR}.ppo_epochs": "training.ppo_epochs",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "training.token_budget",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "cluster.sequence_parallel",
    f"{_ROLLOUT}.n": "rollout.samples",
    f"{_ROLLOUT}.temperature": "rollout.temperature",
    f"{_ROLLOUT}.top_p": "rollout.top_p",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": "rollout.max_turns",
    f"{_ROLLOUT}.multi_turn.format": "rollout.tool_format",
    f"{_ROLLOUT}.multi_turn.max_tool_response_length": "rollout.tool_chars",
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
    "trainer.max_actor_ckpt_to_keep": "training.keep_checkpoints",
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
    "val_kwargs.min_p",
    "rollout.name",
    "rollout.mode",
    "balance_batch",
    "return_raw_chat",
    "calculate_log_probs",
    "overlong_buffer.log",
    "overlong_buffer_cfg.log",
    "strategy",
    "hybrid_engine",
    "use_torch_compile",
    "load_format",
    "layered_summon",
    "use_shm",
    "nccl_timeout",
    "log_val_generations",
    "max_num_seqs",
    "max_model_len",
    "disable_log_stats",
    "use_legacy_worker_impl",
    "filter_overlong_prompts_workers",
    "dataloader_num_workers",
    "entropy_checkpointing",
    "entropy_from_logits_with_chunking",
    "multi_stage_wake_up",
    "data_parallel_size",
    "expert_parallel_size",
    "forward_prefetch",
    "validation_data_dir",
    "rollout_data_dir",
    "max_optim_to_keep",
    "max_critic_ckpt_to_keep",
    "forward_max_token_len_per_gpu",
    "critic.model.enable_gradient_checkpointing",
    "critic.ppo_max_token_len_per_gpu",
    "multi_turn.enable",
    "use_liger",
    "trainer.device",
    "return_multi_modal_inputs",
    "skip_tokenizer_init",
    "reward_model.num_workers",
    "use_reward_loop",
)
# Parts of names of sections with such settings.
NOT_NEEDED_SECTIONS = (
    *(".megatron.", ".profiler.", "global_profiler.", ".checkpoint.", ".checkpoint_engine."),
    *(".fsdp_config.", ".engine_kwargs.", "ray_kwargs.", "ray_init.", ".fused_kernel_options."),
    *(".prometheus.", ".trace.", "override_optimizer_config."),
)

# Why a setting of verl has no equivalent, by its name or the last part of it.
REASONS = {
    "tool_config_path": "tools of verl are classes; write rollout.tools=[file.py:function]",
    "interaction_config_path": "write an environment: environment.name=file.py:Class",
    "max_user_turns": "rollout.max_turns limits the model's turns",
    "val_only": "postgrad eval MODEL data=FILE evaluates",
    "train_max_samples": "give a file with fewer rows",
    "max_position_embeddings": "the model's own config.json decides",
    "image_key": "models are trained on text only",
    "video_key": "models are trained on text only",
    "total_rollout_steps": "set training.steps",
    "staleness_threshold": "set rollout.staleness, in steps",
    "partial_rollout": "rollout.stream=true continues responses over an update",
    "over_sample_rate": "all responses of a step are waited for",
    "llm_judge_model_name": "a judge is a server: reward.judge.model=http://HOST:PORT/v1#NAME",
    "monitor_model_name": "a monitor is a server: reward.judge.monitor=http://HOST:PORT/v1#NAME",
    "gen_batch_size": "refills draw as many problems as are missing",
    "sandbox_fusion_url": "programs run in the sandbox of this machine",
    "lr_warmup_steps_ratio": "the critic has the policy's schedule",
}

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
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.max_grad_norm",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_ratio",
    "num_generations": "rollout.samples",
    "max_completion_length": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "temperature": "rollout.temperature",
    "num_iterations": "training.ppo_epochs",
    "mask_truncated_completions": "method.mask_truncated",
    "num_train_epochs": "training.epochs",
    "save_steps": "training.checkpoint_every",
    "eval_steps": "training.validate_every",
    "save_total_limit": "training.keep_checkpoints",
    "output_dir": "runs",
    "run_name": "name",
    "seed": "seed",
    "gradient_checkpointing": "model.activation_checkpointing",
    "label_smoothing": "method.label_smoothing",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "desirable_weight": "method.desirable_weight",
    "undesirable_weight": "method.undesirable_weight",
    "simpo_gamma": "method.target_margin",
    "center_rewards_coefficient": "method.centering",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
}
# Arguments of TRL's PPOConfig with the same value here.
TRL_PPO_NAMES = {
    "sft_model_path": "model.path",
    "response_length": "rollout.max_response_tokens",
    "num_ppo_epochs": "training.ppo_epochs",
    "num_mini_batches": "training.updates_per_step",
    "gamma": "method.gamma",
    "lam": "method.lam",
    "cliprange_value": "method.critic_clip",
}
# Optimizers of transformers; "" has the recipe's.
TRL_OPTIMIZERS = {
    "adamw_torch": "",
    "adamw_torch_fused": "",
    "adamw_hf": "",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
}
# Arguments of PEFT's LoraConfig, and their names in TRL's ModelConfig.
PEFT_NAMES = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
}
# Settings of TRL that change no result here.
TRL_NOT_NEEDED = (
    *("bf16", "fp16", "tf32", "use_cpu", "use_vllm", "vllm_gpu_memory_utilization"),
    *("logging_steps", "logging_strategy", "log_completions", "packing", "padding_free"),
    *("save_strategy", "eval_strategy", "remove_unused_columns", "ddp_find_unused_parameters"),
    *("torch_dtype", "attn_implementation", "gradient_checkpointing_kwargs", "use_peft"),
    *("per_device_eval_batch_size", "dataloader_num_workers", "use_liger_kernel"),
    *("dataset_num_proc", "local_rollout_forward_batch_size", "num_sample_generations"),
    *("ds3_gather_for_generation", "lora_task_type", "precompute_ref_log_probs"),
    *("vllm_mode", "vllm_tensor_parallel_size", "vllm_max_model_length", "vllm_model_impl"),
    *("vllm_enable_sleep_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
    *("vllm_server_timeout", "vllm_group_port", "vllm_max_model_len"),
)

VLLM_CORRECTION = (
    "the native engine samples from the trainer's weights and needs no correction; for "
    "rollout.engine=vllm set method.correction (token or sequence) and method.correction_bound "
    "(C truncates, low_high masks)"
)
# Why an argument of TRL has no equivalent.
TRL_REASONS = {
    "reward_funcs": "reward.verifier=file.py:function takes TRL's functions as they are",
    "reward_weights": "weights are in reward.verifier, as in 1.0*a.py:f + 0.5*a.py:g",
    "dataset_text_field": "data.train=FILE:COLUMN=text names the column",
    "completion_only_loss": "the loss never reads the prompt, except of plain texts",
    "assistant_only_loss": "the loss never reads the other turns",
    "packing_strategy": "rows are packed without padding and do not see each other",
    "generation_batch_size": "set training.problems_per_step, in problems",
    "lora_dropout": "dropout would make the trained policy differ from the sampled one",
    "vf_coef": "the critic has its own optimizer; set method.critic_lr",
    "report_to": "track is one of wandb, tensorboard and trackio",
    "push_to_hub": "postgrad push RUN user/name uploads a run",
    "hub_model_id": "postgrad push RUN user/name uploads a run",
    "load_best_model_at_end": "training.keep_best=SET keeps the best checkpoint, by accuracy",
    "metric_for_best_model": "training.keep_best=SET chooses by the accuracy on a validation set",
    "chat_template_path": "the chat template is that of model.path",
    "eos_token": "the end of a turn is that of the chat template",
    "sync_ref_model": "the reference is the starting model at every step",
    "ref_model_mixup_alpha": "the reference is the starting model at every step",
    "ref_model_sync_steps": "the reference is the starting model at every step",
    "lr_scheduler_type": "schedules are constant, linear and cosine; optimizer.decay_ratio keeps "
    "the rate until the last part of a run, as warmup_stable_decay",
    "normalize_advantages": "advantages of rloo have the scale of the rewards",
    "multi_objective_aggregation": "method.advantage=gdpo, with method.reward_weights.PART",
    "entropy_target": "the coefficient of the entropy bonus is fixed: method.entropy_coef",
    "vllm_importance_sampling_correction": VLLM_CORRECTION,
    "vllm_importance_sampling_mode": VLLM_CORRECTION,
    "vllm_importance_sampling_cap": VLLM_CORRECTION,
    "vllm_importance_sampling_clip_max": VLLM_CORRECTION,
    "vllm_importance_sampling_clip_min": VLLM_CORRECTION,
    "loss_weights": "one loss per run; method.sft_coef adds an SFT term",
}

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
# Commands of TRL's command line, and its configs.
TRL_COMMANDS = {
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "grpo": "GRPOConfig",
    "kto": "KTOConfig",
    "reward": "RewardConfig",
    "rloo": "RLOOConfig",
}
TRL_DPO_LOSSES = {"sigmoid": "sigmoid", "ipo": "ipo", "hinge": "hinge"}
