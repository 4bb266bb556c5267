"""The authors' recipes have the authors' values: the tables of defaults of the five originals.

A value here is the one in the original's launch script. Where the recipe differs, `differs` has the
recipe's value and the reason, so that a difference is never silent.
"""

from typing import Any

import pytest

from postgrad.config.compose import compose, recipe_names
from postgrad.methods import find_method

ADAMW = {
    "optimizer.lr": 1e-6,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.weight_decay": 0.01,
    "optimizer.max_grad_norm": 1.0,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
}
VERL_GRPO = {
    **ADAMW,
    "training.problems_per_step": 1024,
    "training.updates_per_step": 4,  # ppo_mini_batch_size 256
    "training.ppo_epochs": 1,
    "training.steps": 105,  # 15 epochs of 7473 // 1024 steps
    "rollout.samples": 5,
    "rollout.temperature": 1.0,
    "data.max_prompt_tokens": 512,
    "rollout.max_response_tokens": 1024,
    "method.kl": "loss",
    "method.kl_estimator": "k3",  # low_var_kl
    "method.kl_coef": 0.001,
    "method.entropy_coef": 0.0,
    "method.aggregation": "token-mean",
    "method.normalize_by_std": True,
    "training.validation_temperature": 0.0,
    "training.validate_every": 5,  # test_freq
    "training.checkpoint_every": 20,  # save_freq
}
VERL_PPO = {
    **ADAMW,
    "training.problems_per_step": 1024,
    "training.updates_per_step": 4,
    "training.steps": 105,
    "rollout.samples": 1,
    "data.max_prompt_tokens": 512,
    "rollout.max_response_tokens": 512,
    "method.kl": "none",
    "method.critic_lr": 1e-5,
    "method.critic_warmup": 0,
    "method.critic_clip": 0.5,
    "method.gamma": 1.0,
    "method.lam": 1.0,
    "training.validate_every": 1,
    "training.checkpoint_every": 20,
}
VERL_DAPO = {
    **ADAMW,
    "optimizer.weight_decay": 0.1,
    "optimizer.warmup_steps": 10,
    "training.problems_per_step": 512,
    "training.updates_per_step": 16,  # train_prompt_mini_bsz 32
    "training.epochs": 1.0,
    "rollout.samples": 16,
    "data.max_prompt_tokens": 2048,
    "data.overlong": "left",
    "rollout.max_response_tokens": 20480,
    "method.clip_low": 0.2,
    "method.clip_high": 0.28,
    "method.overlong_buffer": 4096,
    "method.max_refills": 9,  # max_num_gen_batches 10, the first included
    "method.refill_by": "score",  # metric acc
    "method.kl": "none",
    "method.aggregation": "token-mean",
    "method.dual_clip": 10.0,  # clip_ratio_c
    "training.validation_temperature": 1.0,
    "training.validation_top_p": 0.7,
    "training.validate_every": 5,
    "training.checkpoint_every": 5,
}
LUFFY_SHARED = {
    **ADAMW,
    "training.problems_per_step": 128,
    "training.updates_per_step": 2,  # ppo_mini_batch_size 64
    "training.ppo_epochs": 1,
    "rollout.samples": 8,
    "rollout.temperature": 1.0,
    "data.max_prompt_tokens": 1024,
    "data.overlong": "drop",
    "rollout.max_response_tokens": 8192,
    "training.token_budget": 32768,
    "training.validate_every": 10,
    "training.validation_temperature": 0.6,
    "training.validation_samples": 1,
    "training.checkpoint_every": 50,
    "method.entropy_coef": 0.001,
    "method.kl": "none",
    "method.normalize_by_std": False,
    "method.aggregation": "seq-mean-token-sum-norm",
    "reward.verifier": "think_math",  # reward_impl_version 3
}
LUFFY = {
    **LUFFY_SHARED,
    "training.steps": 500,
    "method.advantage": "grpo",
    "method.num_demonstrations": 1,
    "method.prefix_min": 1.0,
    "method.prefix_max": 1.0,
    "method.off_shape": "p_div_p",
    "method.off_options": {"gamma": 0.1},
    "method.clip_low": float("inf"),
    "method.clip_high": float("inf"),
}
EXGRPO = {
    **LUFFY_SHARED,
    "training.steps": 701,
    "method.start_at": 0.35,
    "method.replay_share": 0.5,
    "method.buckets": "normal",
    "method.pick_by": "entropy",
    "method.replay_order": "min",
    "method.importance": True,
    "method.retire_margin": 20,
    "method.clip_low": 0.2,
    "optimizer.skip_grad_norm": 500,
}
BUPO = {
    **ADAMW,
    "method.num_blocks": 6,  # internal_layer 5 counts from 0
    "method.phase_one_steps": 30,
    "data.max_prompt_tokens": 1024,
    "data.overlong": "left",
    "rollout.max_response_tokens": 8192,
    "training.problems_per_step": 128,
    "rollout.samples": 8,
    "training.updates_per_step": 4,
    "training.token_budget": 32768,
    "method.clip_low": 0.2,
    "method.clip_high": 0.2,
    "method.dual_clip": 10.0,
    "method.aggregation": "token-mean",
    "method.kl": "none",
    "method.entropy_coef": 0.0,
    "method.normalize_by_std": True,
    "rollout.temperature": 1.0,
    "training.steps": 300,
    "training.validate_every": 30,
    "training.validation_problems": 0,  # all rows
    "training.validation_temperature": 1.0,
    "training.checkpoint_every": 100,
}
CLASSMATE = {  # SEED's sycophancy runs
    **ADAMW,
    "optimizer.lr": 1e-5,
    "training.problems_per_step": 64,
    "rollout.samples": 8,
    "training.updates_per_step": 4,
    "training.epochs": 3.0,
    "data.max_prompt_tokens": 1024,
    "rollout.max_response_tokens": 3072,
    "training.validate_every": 10,
    "training.checkpoint_every": 10,
    "method.cot_start": "<think>",
    "method.cot_end": "</think>",
    "method.reward_type": "vanilla",
    "method.keep": "1",
    "method.condition": "always",
    "method.normalize_by_std": False,
    "method.classmate_weight": 1.0,
    "method.classmate_tokens": "cot",
    "method.classmate_temperature": 1.0,
    "method.aggregation": "seq-mean-token-sum-norm",
    "reward.verifier": "llm_judge",
    "reward.judge.template": "sycophancy",
    "method.kl": "none",
}
CS336_GRPO = {
    "optimizer.lr": 1e-5,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.weight_decay": 0.0,
    "optimizer.max_grad_norm": 1.0,
    "training.steps": 200,
    "training.problems_per_step": 32,  # rollout batch 256, group size 8
    "rollout.samples": 8,
    "rollout.temperature": 1.0,
    "rollout.max_response_tokens": 1024,
    "training.ppo_epochs": 1,
    "training.updates_per_step": 1,
    "method.loss": "reinforce",  # reinforce_with_baseline
    "method.advantage": "grpo",
    "method.normalize_by_std": True,
    "method.aggregation": "seq-mean-token-mean",
    "method.kl": "none",
    "data.prompt_style": "r1_zero",
    "training.validation_problems": 1024,
}
CS336_SFT = {
    "optimizer.lr": 5e-6,
    "optimizer.weight_decay": 0.01,
    "optimizer.max_grad_norm": 1.0,
    "optimizer.warmup_ratio": 0.1,
    "optimizer.warmup_steps": 0,
    "optimizer.schedule": "cosine",
    "seed": 42,
    "training.epochs": 1.0,
    "training.problems_per_step": 16,
    "training.validate_every": 50,
    "training.checkpoint_every": 100,
    "training.validation_problems": 100,
    "training.validation_temperature": 0.6,
    "training.validation_top_p": 0.95,
    "rollout.max_response_tokens": 32768,
    "data.prompt_style": "r1_zero",
}
CS336_DPO = {
    "method.beta": 0.1,
    "optimizer.kind": "rmsprop",
    "optimizer.lr": 1e-6,
    "training.epochs": 1.0,
    "training.problems_per_step": 64,
    "training.validation_problems": 200,
    "data.prompt_style": "alpaca_sft",
}
CS336_INSTRUCT = {
    "optimizer.lr": 2e-5,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_ratio": 0.03,
    "training.epochs": 1.0,
    "training.problems_per_step": 32,
    "data.prompt_style": "alpaca_sft",
}

ON_POLICY = {**LUFFY, "method.num_demonstrations": 0, "method.clip_low": 0.2}
ON_POLICY["method.clip_high"] = 0.2
RL_SFT = {**LUFFY, "method.advantage": "grpo_split", "method.sft_coef": 1.0}

# recipe -> the authors' values
ORIGINALS: dict[str, dict[str, Any]] = {
    "verl_grpo": VERL_GRPO,
    "verl_ppo": VERL_PPO,
    "verl_dapo": VERL_DAPO,
    "luffy": LUFFY,
    "luffy_on_policy": ON_POLICY,
    "luffy_rl_sft": RL_SFT,
    "luffy_sft_rl": {**ON_POLICY, "warmup.recipe": "sft"},
    "exgrpo": EXGRPO,
    "bupo": BUPO,
    "bupo_grpo": {**BUPO, "method.phase_one_steps": 0},
    "bupo_llama": {**BUPO, "method.num_blocks": 27, "rollout.max_response_tokens": 3072},
    "classmate_gdpo": {**CLASSMATE, "method.advantage": "classmate_gdpo"},
    "classmate_baseline": {**CLASSMATE, "method.condition": "no_classmate"},
    "classmate_warmup": {**CLASSMATE, "warmup.recipe": "classmate_baseline"},
    "classmate_sycophancy": {
        **CLASSMATE,
        "method.advantage": "classmate_with",
        "training.problems_per_step": 16,
        "training.updates_per_step": 1,
        "training.checkpoint_every": 20,
    },
    "cs336_grpo": CS336_GRPO,
    "cs336_no_baseline": {**CS336_GRPO, "method.advantage": "no_baseline"},
    "cs336_sft": CS336_SFT,
    "cs336_sft_2048": {
        **CS336_SFT,
        "training.problems_per_step": 64,
        "training.validate_every": 10,
        "training.checkpoint_every": 50,
        "rollout.max_response_tokens": 4096,
    },
    "cs336_sft_4096": {
        **CS336_SFT,
        "training.problems_per_step": 32,
        "training.validate_every": 10,
        "training.checkpoint_every": 50,
        "rollout.max_response_tokens": 4096,
    },
    "cs336_dpo": CS336_DPO,
    "cs336_instruct": CS336_INSTRUCT,
}

SUM_OVER_64 = "the authors sum over the 64 rows of a rank; here the loss is a mean over rows"
SUM_OVER_56 = "the authors sum over the 56 own rows of a rank; here the loss is a mean over rows"
SCALED = {
    "optimizer.max_grad_norm": (1 / 64, SUM_OVER_64),
    "method.entropy_coef": (0.001 * 4 / 64, SUM_OVER_64 + ", and entropy counts per micro-batch"),
}
# recipe -> key -> (our value, why it is not the authors')
DIFFERS: dict[str, dict[str, tuple[Any, str]]] = {
    "luffy": SCALED,
    "luffy_on_policy": SCALED,
    "luffy_sft_rl": SCALED,
    "luffy_rl_sft": {
        "optimizer.max_grad_norm": (0.0179, SUM_OVER_56),
        "method.entropy_coef": (7.14e-5, SUM_OVER_56),
        "method.sft_coef": (0.0714, SUM_OVER_56 + ", and one SFT mean per micro-batch"),
    },
    "exgrpo": {**SCALED, "optimizer.skip_grad_norm": (500 / 64, SUM_OVER_64)},
    "bupo_llama": {"method.phase_one_steps": (20, "the paper's; the script says 30")},
}


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ORIGINALS)
def test_recipe_has_the_authors_values(recipe):
    config = compose(recipe, [], lambda name: find_method(name).Settings, complete=False)
    differs = DIFFERS.get(recipe, {})
    assert set(differs) <= set(ORIGINALS[recipe]), "every difference is one from a listed value"
    for key, theirs in ORIGINALS[recipe].items():
        ours, reason = differs.get(key, (theirs, ""))
        assert value_of(config, key) == ours, (key, reason)
        assert key not in differs or (ours != theirs and reason), f"{key} does not differ any more"


@pytest.mark.slow
def test_every_original_has_a_small_variant_or_is_small():
    """Runs for many GPUs have a recipe of the same method for one small machine."""
    small = {
        "verl_grpo": "grpo",
        "verl_ppo": "ppo",
        "verl_dapo": "dapo",
        "luffy": "luffy_small",
        "luffy_on_policy": "luffy_on_policy_small",
        "luffy_rl_sft": "luffy_rl_sft_small",
        "luffy_sft_rl": "luffy_sft_rl_small",
        "exgrpo": "exgrpo_small",
        "bupo": "bupo_small",
        "classmate_sycophancy": "classmate",
        "classmate_baseline": "classmate_baseline_small",
        "classmate_warmup": "classmate_warmup_small",
    }
    assert set(small.values()) <= set(recipe_names())
    for large, tiny in small.items():
        both = [
            compose(name, [], lambda name: find_method(name).Settings, complete=False)
            for name in (large, tiny)
        ]
        assert both[0].method.name == both[1].method.name
        assert both[1].training.problems_per_step <= 16
        assert both[1].rollout.max_response_tokens <= 480
