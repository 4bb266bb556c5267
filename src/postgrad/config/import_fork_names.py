"""Names of settings that LUFFY, ExGRPO, BuPO and Classmate-CoT add to verl's, and those here."""

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CLASSMATE = "reward_model.classmate_cot_reward_configs"

# Settings with the same value here.
FORK_NAMES = {
    f"{_ACTOR}.iterative_steps": "method.phase_one_steps",
    f"{_ROLLOUT}.val_temperature": "training.validation_temperature",
    f"{_ROLLOUT}.n_val": "training.validation_samples",
    f"{_ROLLOUT}.n_prefix": "method.num_demonstrations",
    f"{_ROLLOUT}.min_prefix_ratio": "method.prefix_min",
    f"{_ROLLOUT}.max_prefix_ratio": "method.prefix_max",
    f"{_ROLLOUT}.prefix_strategy": "method.prefix_strategy",
    f"{_ROLLOUT}.prefix_share_across_samples": "method.prefix_shared",
    f"{_ROLLOUT}.prefix_reward_weight_alpha": "method.off_advantage_scale",
    "trainer.experience_ratio": "method.replay_share",
    "trainer.experience_start_sratio": "method.start_at",
    "trainer.exp_bucket_manager": "method.buckets",
    "trainer.exp_sample_range": "method.pool_range",
    "trainer.exp_is_correct": "method.importance",
    "reward_model.think_start_str": "method.cot_start",
    "reward_model.think_end_str": "method.cot_end",
    f"{_CLASSMATE}.classmate_reward_weight": "method.classmate_weight",
    f"{_CLASSMATE}.classmate_model_name_or_path_list": "method.classmates",
    f"{_CLASSMATE}.main_cot_keep_rate": "method.keep",
    f"{_CLASSMATE}.main_cot_keep_rate_min": "method.keep_min",
    f"{_CLASSMATE}.main_cot_keep_rate_max": "method.keep_max",
    f"{_CLASSMATE}.use_classmate_main_cond": "method.condition",
    "reward_model.classmate_generation_configs.max_tokens": "method.classmate_max_tokens",
}

# Settings that the recipes fulfill, with the values for which that is so.
FORK_NOT_NEEDED = {
    f"{_ACTOR}.use_sft_prefix_reward": ("False",),
    f"{_ACTOR}.use_off_policy_loss": ("True", "False"),  # chooses the recipe
    f"{_ACTOR}.use_sft_multitask_loss": ("True", "False"),  # chooses the recipe
    f"{_ACTOR}.off_policy_normalize": ("False",),
    f"{_ACTOR}.off_policy_loss_impl": ("token",),
    f"{_ACTOR}.loss_remove_token_mean": ("True",),
    f"{_ACTOR}.internal_policy_interative": ("True",),
    "actor_rollout_ref.ref.use_ref": ("False",),
    "data.reward_impl_version": ("3",),  # the verifier think_math
    "trainer.experience": ("True",),
    "trainer.exp_metric": ("ent",),
    "trainer.exp_select_mode": ("argmin",),
    "trainer.experience_lbound": ("0",),
    "trainer.experience_rbound": ("7",),
    f"{_CLASSMATE}.add_consistency_reward": ("False",),
}

# Coefficients whose scale differs in the recipes luffy and exgrpo, with the scripts' values.
SCALED = {
    f"{_ACTOR}.entropy_coeff": "0.001",
    f"{_ACTOR}.grad_clip": "1.0",
    f"{_ACTOR}.skip_grad_bound": "500",
}

# Classmate-CoT: (setting here, value here by value there).
CLASSMATE_VALUES: dict[str, tuple[str, dict[str, str]]] = {
    f"{_CLASSMATE}.classmate_reward_type": (
        "method.reward_type",
        {
            "vanilla_reward": "vanilla",
            "random_truncate": "random_truncate",
            "remove_wo_cot": "remove_wo_cot",
            "help_other_questions": "help_other_questions",
            "help_other_similar_questions": "help_other_similar_questions",
        },
    ),
    f"{_CLASSMATE}.token_level_classmate_reward_mode": (
        "method.classmate_tokens",
        {"classmate_partial": "cot", "all": "all"},
    ),
    "reward_model.token_level_main_reward_mode": (
        "method.main_tokens",
        {"all_tokens": "all_tokens", "cot_only": "cot_only", "output_only": "output_only"},
    ),
}
CLASSMATE_ESTIMATORS = {
    "grpo_w_classmate": "classmate_with",
    "grpo_main_classmate_separated": "classmate_separated",
    "grpo_main_classmate_separated_non_neg_cl": "classmate_non_neg",
    "gdpo": "classmate_gdpo",
    "gdpo_wo_bn": "classmate_gdpo_wo_bn",
}
