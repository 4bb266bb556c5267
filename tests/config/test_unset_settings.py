"""Lists a reason for every setting that no recipe sets; a new one needs a reason too."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import yaml

from postgrad.config.compose import RECIPES
from postgrad.config.schema import Config
from postgrad.methods import METHODS, find_method

REASONS = {
    # the run
    "name": "chosen per run",
    "runs": "chosen per machine",
    "track": "W&B and TensorBoard are other programs",
    # the model
    "model.device": "chosen per machine",
    "model.activation_checkpointing": "chosen by the memory of the GPU",
    "model.kept_attention_blocks": "chosen by the memory of the GPU",
    "model.quantization": "chosen by the memory of the GPU; any recipe runs with it and LoRA",
    "model.trust_remote_code": "unsafe, so it is only ever set by the user",
    "model.lora.rank": "chosen by the memory of the GPU; any recipe runs with LoRA",
    "model.lora.alpha": "goes with model.lora.rank",
    "model.lora.targets": "goes with model.lora.rank",
    # the data
    "data.template_options": "chosen per model, e.g. thinking on or off",
    "data.shuffle": "off for a curriculum, as in verl",
    # rollouts
    "rollout.engine": "chosen per machine",
    "rollout.url": "address of rollout.engine=http",
    "rollout.max_gap": "raised for models whose engine and trainer differ more",
    "rollout.cache_gib": "chosen by the memory of the GPU",
    "rollout.tensor_parallel": "chosen by the size of the model and the number of GPUs",
    "rollout.staleness": "asynchronous rollouts; chosen per cluster",
    "rollout.stream": "asynchronous rollouts; chosen per cluster",
    "rollout.top_p": "evaluation uses it; no original trains with truncated sampling",
    "rollout.top_k": "evaluation uses it; no original trains with truncated sampling",
    "rollout.min_p": "evaluation uses it; no original trains with truncated sampling",
    "rollout.stop": "chosen per model and prompt",
    "rollout.tools": "multi-turn with tools; the tools are the user's",
    "rollout.max_turns": "goes with rollout.tools and environment",
    "rollout.tool_format": "chosen by the model; auto finds it",
    "rollout.tool_timeout_s": "goes with rollout.tools",
    "rollout.tool_chars": "goes with rollout.tools",
    # environments
    "environment.name": "the environment is the user's",
    "environment.options": "arguments of the user's environment",
    "environment.weights": "goes with several environments",
    "environment.workers": "chosen by the number of cores",
    "environment.timeout_s": "chosen per environment",
    "environment.max_chars": "chosen per environment",
    # agents
    "agent.command": "the program is the user's",
    "agent.workers": "chosen by the number of cores and what the program does",
    "agent.timeout_s": "chosen per program",
    "agent.max_calls": "chosen per program",
    # rewards
    "reward.objective": "Classmate-CoT's explicit direction of the objective",
    "reward.judge.model": "address or path of the user's judge",
    "reward.judge.both_orders": "removes position bias of a pairwise judge, at twice the cost",
    "reward.judge.lowest": "chosen with a judge prompt of the user's own",
    "reward.judge.highest": "chosen with a judge prompt of the user's own",
    "reward.judge.max_tokens": "chosen per judge; thinking judges need more",
    "reward.judge.retries": "chosen per judge",
    "reward.judge.concurrency": "chosen by the judge's server",
    "reward.judge.monitor": "Classmate-CoT's CoT monitor; the model is the user's",
    "reward.timeout_s": "chosen per verifier; code needs more than answers",
    "reward.workers": "chosen by the number of cores",
    "reward.max_failure_rate": "safety limit of a run",
    # the optimizer
    "optimizer.eps": "AdamW's standard parameter",
    # training
    "training.ppo_epochs": "passes over a rollout batch; the originals all use one",
    "training.validation_samples": "chosen by the size of the validation set",
    "training.async_save": "chosen by the size of the model and the speed of the disk",
    "training.keep_checkpoints": "chosen by the size of the disk",
    "training.keep_best": "names a validation set of the user",
    "training.max_flat_steps": "safety limit of a run",
    "training.profile_steps": "for finding slow steps",
    # the cluster
    "cluster.backend": "chosen per machine",
    "cluster.workers": "chosen by the number of GPUs",
    "cluster.tensor_parallel": "chosen by the size of the model and the number of GPUs",
    "cluster.expert_parallel": "chosen by the size of the model and the number of GPUs",
    "cluster.sequence_parallel": "chosen by the length of rows and the number of GPUs",
    "cluster.shard_workers": "chosen by the number of GPUs per node",
    "cluster.engines": "chosen by the number of GPUs",
    "cluster.pools": "chosen by the number of GPUs",
    "cluster.offload": "chosen by the memory of the GPU",
    "cluster.address": "address of the user's cluster",
    "cluster.engine_apart": "chosen per machine",
    "cluster.wait_s": "raised for very large models",
    # policy gradient methods
    "method.train_on": "SFT on the last assistant turn only, as some trainers do",
    "method.gamma": "discount of GAE and REINFORCE++, as in verl",
    "method.kl_target": "verl's adaptive KL controller",
    "method.correction_normalize": "verl's batch normalization of importance weights",
    "method.mask_truncated": "TRL's mask_truncated_completions",
    "method.kl_ratio": "DeepSeek-V3.2's unbiased KL; goes with many updates per step",
    "method.correction_bound": "goes with method.correction",
    "method.rejection": "verl's rejection of tokens and sequences",
    "method.lam": "lambda of GAE",
    "method.critic_path": "a critic that starts from a reward model, as in verl",
    "method.critic_clip": "verl's value clipping",
    "method.critic_warmup": "verl's critic warm-up",
    # distillation
    "method.teacher": "path of the user's teacher",
    "method.reward_coef": "adds a verifiable reward to distillation",
    "method.reference_mixup": "TR-DPO's soft update; goes with method.reference_sync_every",
    # KTO
    "method.desirable_weight": "balances data with few desirable responses",
    "method.undesirable_weight": "balances data with few undesirable responses",
    # LUFFY
    "method.on_shape": "LUFFY's table of ratio shapes",
    "method.on_options": "goes with method.on_shape",
    "method.max_probability": "LUFFY's limit on tokens that the policy already knows",
    "method.off_advantage_scale": "LUFFY's weight of off-policy tokens",
    "method.on_advantage_scale": "LUFFY's weight of on-policy tokens",
    "method.prefix_advantage": "LUFFY's prefix_reward_weight",
    "method.truncated_advantage": "LUFFY's treatment of responses that reach the length limit",
    "method.objective": "the user's own loss",
    "method.resample": "PF-PPO's draw of rows, an option of verl's PPO",
    "method.resample_power": "with method.resample=pow",
    "method.demonstration_share": "mixes problems with and without demonstrations",
    "method.prefix_strategy": "LUFFY's schedules of demonstration prefixes",
    "method.prefix_shared": "LUFFY's prefix_share_across_samples",
    "method.prefix_min": "goes with method.prefix_strategy",
    "method.prefix_max": "goes with method.prefix_strategy",
    "method.prefix_peak": "goes with method.prefix_strategy",
    "method.prefix_steps": "goes with method.prefix_strategy",
    "method.overlong_demonstrations": "demonstrations of reasoning models are often too long",
    "method.wrong_demonstrations": "demonstrations of weaker models are often wrong",
    "method.demonstration_probs": "column of the user's data with the author's probabilities",
    # ExGRPO
    "method.start_at": "ExGRPO's delayed start of replay",
    "method.success_reward": "for verifiers whose full score is not 1",
    "method.replay_share": "ExGRPO's share of replayed problems",
    "method.buckets": "ExGRPO's weights of problems by their success rate",
    "method.pool_range": "ExGRPO's range of the replay pool",
    "method.pick_by": "ExGRPO's choice of a stored trajectory",
    "method.pick": "goes with method.pick_by",
    "method.importance": "ExGRPO's importance weights of replayed tokens",
    "method.retire_margin": "ExGRPO's retired set",
    # BuPO
    "method.internal_norm": "BuPO's norm before the head",
    # Classmate-CoT
    "method.keep": "Classmate-CoT's main_cot_keep_rate",
    "method.unclosed": "for models that rarely close their thoughts",
    "method.no_output_score": "needed with reward.objective=minimize",
    "method.main_tokens": "Classmate-CoT's token-level modes",
    "method.classmate_shares": "weights of several classmates",
    "method.classmate_samples": "samples per classmate",
    "method.classmate_temperature": "sampling of the classmates",
    "method.classmate_top_p": "sampling of the classmates",
    "method.classmate_cot_start": "for classmates of another model family",
    "method.classmate_cot_end": "for classmates of another model family",
    "method.classmate_weight": "Classmate-CoT's weight of the classmate reward",
    "method.classmate_tokens": "Classmate-CoT's token-level modes",
    "method.consistency_weight": "Classmate-CoT's reward for consistent answers",
}


def setting_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yields the dotted key of each setting of a dataclass and its sections."""
    for spec in dataclasses.fields(schema):
        if dataclasses.is_dataclass(spec.type):
            yield from setting_keys(spec.type, f"{prefix}{spec.name}.")  # type: ignore[arg-type]
        elif spec.name != "method":
            yield f"{prefix}{spec.name}"


def keys_in(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted key of each value and section of a recipe."""
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from keys_in(value, f"{prefix}{name}.")


def all_settings() -> set[str]:
    known = set(setting_keys(Config))
    for name in METHODS:
        known |= set(setting_keys(find_method(name).Settings, "method."))
    return known


def settings_of_recipes() -> set[str]:
    used: set[str] = set()
    for file in RECIPES.glob("*.yaml"):
        used |= set(keys_in(yaml.safe_load(file.read_text()) or {}))
    return used


def test_every_setting_that_no_recipe_sets_has_a_reason():
    missing = all_settings() - settings_of_recipes() - REASONS.keys()
    assert not missing, f"set it in a recipe, remove it, or write a reason: {sorted(missing)}"


def test_no_reason_is_left_over():
    left_over = REASONS.keys() - (all_settings() - settings_of_recipes())
    assert not left_over, f"a recipe sets it, or it no longer exists: {sorted(left_over)}"
    assert all(REASONS.values())
