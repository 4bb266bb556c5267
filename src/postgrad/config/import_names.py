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

# Sizes by which verl divides a model or its rows among workers, and the settings here.
PARALLEL_SIZES = {
    "tensor_model_parallel_size": "cluster.tensor_parallel",
    "expert_model_parallel_size": "cluster.expert_parallel",
    "ulysses_sequence_parallel_size": "cluster.sequence_parallel",
}
_NO_PIPELINES = "blocks are not divided into pipelines; cluster.tensor_parallel divides each"

# Why a setting of verl has no equivalent, by its name or the last part of it.
REASONS = {
    "pipeline_model_parallel_size": _NO_PIPELINES,
    "virtual_pipeline_model_parallel_size": _NO_PIPELINES,
    "context_parallel_size": "cluster.sequence_parallel divides rows among workers (Ulysses)",
    "expert_tensor_parallel_size": "it equals cluster.tensor_parallel",
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
    "delta": "method.dual_clip",
    "desirable_weight": "method.desirable_weight",
    "undesirable_weight": "method.undesirable_weight",
    "center_rewards_coefficient": "method.centering",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "trust_remote_code": "model.trust_remote_code",
}
# Optimizers of transformers; "" has the recipe's.
TRL_OPTIMIZERS = {
    "adamw_torch": "",
    "adamw_torch_fused": "",
    "adamw_hf": "",
    "adamw_apex_fused": "",
    "paged_adamw": "",
    "paged_adamw_32bit": "",
    "adamw_torch_8bit": "adamw_8bit",
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
    *("logging_steps", "logging_strategy", "log_completions", "padding_free"),
    *("save_strategy", "eval_strategy", "remove_unused_columns", "ddp_find_unused_parameters"),
    *("torch_dtype", "attn_implementation", "gradient_checkpointing_kwargs", "use_peft"),
    *("per_device_eval_batch_size", "dataloader_num_workers", "use_liger_kernel"),
    "dataset_num_proc",
    *("ds3_gather_for_generation", "lora_task_type", "precompute_ref_log_probs"),
    *("vllm_mode", "vllm_tensor_parallel_size", "vllm_max_model_length", "vllm_model_impl"),
    *("vllm_enable_sleep_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
    *("vllm_server_timeout", "vllm_group_port", "vllm_max_model_len"),
    *("dtype", "device_map", "low_cpu_mem_usage", "use_cache", "use_kernels"),
    *("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "activation_offloading"),
    *("pad_to_multiple_of", "pad_token", "precompute_ref_batch_size", "eval_accumulation_steps"),
    *("logging_first_step", "logging_dir", "log_level", "log_level_replica", "disable_tqdm"),
    *("num_completions_to_print", "log_unique_prompts", "log_multimodal", "do_train", "do_eval"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps"),
    *("ddp_timeout", "ddp_backend", "ddp_bucket_cap_mb", "overwrite_output_dir", "save_only_model"),
    *("save_safetensors", "hub_strategy", "hub_private_repo", "hub_token", "num_labels"),
    *(
        "cache_implementation",
        "use_transformers_paged",
        "use_transformers_continuous_batching",
        "bf16_full_eval",
    ),
    "fp16_full_eval",
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
    "reward_model_name_or_path": "reward.verifier=model:FOLDER scores with a reward model",
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"), VLLM_CORRECTION
    ),
    **dict.fromkeys(
        ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"), VLLM_CORRECTION
    ),
    "vllm_importance_sampling_clip_min": VLLM_CORRECTION,
    "entropy_target": "the coefficient of the entropy bonus is fixed: method.entropy_coef",
    "normalize_advantages": "advantages of rloo have the scale of the rewards",
    "lr_scheduler_type": "schedules are constant, linear and cosine; optimizer.decay_ratio keeps "
    "the rate until the last part of a run, as warmup_stable_decay",
    "multi_objective_aggregation": "method.advantage=gdpo normalizes each part of the reward",
    "project": "the project of trackers is postgrad",
    "num_processes": "cluster=ray cluster.workers=N trains on N GPUs; TRL's sizes are per process",
    "accelerate_config": "cluster=ray cluster.workers=N shards the training (FSDP2)",
    "dataset_config": "data.train=hub:NAME:FOLDER/SPLIT names a folder of the data set",
    "model_revision": "download the revision, and set model.path to its folder",
    "revision": "download the revision, and set model.path to its folder",
    "load_in_8bit": "model.quantization=4bit keeps the frozen weights in 4 bits",
    "deepspeed": "cluster=ray cluster.workers=N shards the training (FSDP2)",
    "fsdp": "cluster=ray cluster.workers=N shards the training (FSDP2)",
    "fsdp_config": "cluster=ray cluster.workers=N shards the training (FSDP2)",
    "resume_from_checkpoint": "the same command continues a run",
    "disable_dropout": "models are trained without dropout, except that of LoRA",
    "num_generations_eval": "training.validation_samples is the number in validations",
    "max_tool_calling_iterations": "rollout.max_turns limits the model's turns",
    "report_to": "track takes wandb, tensorboard or file.py:Class",
    "push_to_hub": "postgrad push RUN user/name uploads a run",
    "hub_model_id": "postgrad push RUN user/name uploads a run",
    "load_best_model_at_end": "training.keep_best=SET keeps the best checkpoint, by accuracy",
    "metric_for_best_model": "training.keep_best=SET chooses by the accuracy on a validation set",
    "chat_template_path": "the chat template is that of model.path",
    "eos_token": "the end of a turn is that of the chat template",
}

# Arguments of TRL's trainers that are objects of the script, and what to set instead.
TRL_TRAINER_ARGUMENTS = {
    "model": "model.path, a name or folder",
    "reward_funcs": "reward.verifier=FILE.py:FUNCTION, or reward= of postgrad.train",
    "train_dataset": "data.train, a file or hub:NAME:SPLIT, or data= of postgrad.train",
    "eval_dataset": "data.validation, a file or hub:NAME:SPLIT",
    "peft_config": "model.lora.rank and model.lora.alpha",
    "quantization_config": "model.quantization=4bit keeps the frozen weights in 4 bits",
    "ref_model": "the reference is the model of model.path before the training",
    "tools": "rollout.tools=[FILE.py:FUNCTION]",
    "environment_factory": "write an environment: environment.name=FILE.py:CLASS",
    "rollout_func": "write an environment, environment.name=FILE.py:CLASS, or an agent",
    "callbacks": "postgrad.train takes callbacks=[...] with TRL's names",
    "compute_metrics": "a validation has the metrics of its method",
    "compute_loss_func": "write a method: method=FILE.py:CLASS",
    "formatting_func": "write the texts to a file, or set data.prompt_style",
    "data_collator": "the loss never reads the prompt; rows are packed without padding",
    "optimizers": "optimizer.kind and optimizer.schedule",
    "optimizer_cls_and_kwargs": "optimizer.kind",
}

# TRL's configs and the recipes here.
TRL_RECIPES = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "RLOOConfig": "rloo",
    "GRPOConfig": "grpo",
    "KTOConfig": "kto",
    "RewardConfig": "reward_model",
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
# Files of TRL's repository that train with the flags of their config.
TRL_SCRIPTS = {
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "grpo": "GRPOConfig",
    "kto": "KTOConfig",
    "rloo": "RLOOConfig",
    "reward": "RewardConfig",
    "reward_modeling": "RewardConfig",
}
TRL_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
TRL_DPO_LOSSES = {
    "sigmoid": {"method.loss": "sigmoid"},
    "ipo": {"method.loss": "ipo"},
    "hinge": {"method.loss": "hinge"},
    "sigmoid_norm": {"method.loss": "sigmoid", "method.length_normalized": "true"},
}
