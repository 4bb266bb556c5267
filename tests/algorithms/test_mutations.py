"""Each mutation breaks one formula, and the named check with hand-computed numbers must fail.

mutation.py replaces the expression in the syntax tree. A mutation whose expression does not occur
exactly once in its function fails too, so that the table stays in step with the source.
"""

from typing import NamedTuple

import pytest

from .mutation import MODULES, mutated_modules, real_modules
from .test_vectors import CHECKS


class Mutation(NamedTuple):
    """`old` becomes `new` in `module`.`function`; the check named `check` must notice."""

    module: str
    function: str
    old: str
    new: str
    check: str


MUTATIONS = [
    # turn_advantages
    Mutation(
        "turn_advantages",
        "turn_returns",
        "gamma * returns[:, turn + 1]",
        "returns[:, turn + 1]",
        "turn_returns",
    ),
    Mutation("turn_advantages", "turn_grpo", "returns[:, turn]", "returns[:, 0]", "turn_grpo"),
    Mutation("turn_advantages", "gigpo", "turn_weight * offset", "offset", "gigpo"),
    Mutation(
        "turn_advantages",
        "gigpo",
        "states.expand(states.sum(torch.ones_like(offset))) < 2",
        "offset > 1e9",
        "gigpo",
    ),
    Mutation(
        "turn_advantages",
        "turn_end_rewards",
        "turns[own] <= turn",
        "turns[own] < turn",
        "turn_end_rewards",
    ),
    # aggregation
    Mutation(
        "aggregation", "token_weights", "counts.sum().clamp(min=1)", "num_rows", "aggregation"
    ),
    Mutation(
        "aggregation",
        "token_weights",
        "(counts > 0).sum()",
        "torch.tensor(num_rows)",
        "aggregation_leaves_out_masked_rows",
    ),
    Mutation(
        "aggregation",
        "token_weights",
        "counts.clamp(min=1)[rows]",
        "counts.mean()",
        "aggregation_leaves_out_masked_rows",
    ),
    Mutation(
        "aggregation",
        "token_weights",
        "weights / length",
        "weights * counts.numel() / length",
        "aggregation_classmate",
    ),
    Mutation(
        "aggregation",
        "token_weights",
        "mask.to(dtype)",
        "torch.ones_like(mask, dtype=dtype)",
        "aggregation_leaves_out_masked_rows",
    ),
    # groups
    Mutation("groups", "centered", "(counts - 1).clamp(min=1)", "counts", "grpo"),
    Mutation(
        "groups",
        "centered",
        "torch.where(alone, 0.0, groups.sum(rewards) / counts)",
        "groups.sum(rewards) / counts",
        "drgrpo",
    ),
    Mutation(
        "groups", "centered", "torch.where(alone, 1.0, variance.sqrt())", "variance.sqrt()", "grpo"
    ),
    Mutation(
        "groups",
        "centered",
        "torch.where(groups.expand(flat), 0.0, rewards - groups.expand(mean))",
        "rewards - groups.expand(mean)",
        "grpo_cs336",
    ),
    Mutation("groups", "whiten", "total - 1", "total", "reinforce_pp_baseline"),
    Mutation(
        "groups",
        "whiten",
        "(values * weights).sum() / total",
        "values.mean()",
        "reinforce_pp_baseline",
    ),
    Mutation("groups", "normalize_rows", "values.std()", "values.std(correction=0)", "gdpo_rows"),
    Mutation(
        "groups",
        "normalize_rows",
        "values.numel() < 2 or bool((values == values[0]).all())",
        "not values.numel()",
        "classmate_singleton",
    ),
    # row advantages
    Mutation(
        "advantages",
        "grpo",
        "offset / (std + eps) if normalize_by_std else offset",
        "offset",
        "grpo",
    ),
    Mutation(
        "advantages",
        "drgrpo",
        "grpo(rewards, groups, normalize_by_std=False)",
        "grpo(rewards, groups)",
        "drgrpo",
    ),
    Mutation(
        "advantages",
        "grpo_passk",
        "torch.where(num_best > 1, best, second)",
        "second",
        "grpo_passk",
    ),
    Mutation(
        "advantages", "grpo_passk", "best - torch.where(alone, 0.0, second)", "best", "grpo_passk"
    ),
    Mutation("advantages", "maxrl", "offset / (mean + eps)", "offset / (mean + 1)", "maxrl"),
    Mutation(
        "correction",
        "geometric_row_weights",
        "torch.where(zero, 0.0, logs.exp())",
        "logs.exp()",
        "geometric_row_weights",
    ),
    Mutation(
        "correction",
        "off_policy_sequence_mask",
        "rollout_logprobs - logprobs",
        "logprobs - rollout_logprobs",
        "off_policy_sequence_mask",
    ),
    Mutation(
        "correction",
        "off_policy_sequence_mask",
        "advantages < 0",
        "advantages > 0",
        "off_policy_sequence_mask",
    ),
    Mutation("advantages", "rloo", "offset * counts / (counts - 1).clamp(min=1)", "offset", "rloo"),
    Mutation(
        "advantages",
        "opo",
        "index.sum(weights * rewards) / total.clamp(min=1)",
        "index.sum(rewards) / index.sum(weights > 0)",
        "opo",
    ),
    Mutation("advantages", "opo", "alone | (total == 0)", "total == 0", "opo"),
    Mutation(
        "advantages",
        "gpg",
        "offset * rewards.numel() / (rewards != 0).sum().clamp(min=1)",
        "offset",
        "gpg",
    ),
    Mutation(
        "advantages",
        "reinforce_pp_baseline",
        "whiten(offset, lengths.to(rewards.device))",
        "offset",
        "reinforce_pp_baseline",
    ),
    Mutation(
        "advantages",
        "gdpo",
        "reward_weights.get(name, 1.0) * normalized",
        "normalized",
        "gdpo_rows",
    ),
    Mutation(
        "advantages",
        "gdpo",
        "whiten(total, lengths.to(total.device))",
        "normalize_rows(total, eps)",
        "gdpo_verl",
    ),
    Mutation(
        "advantages",
        "grpo_split",
        "on_policy.to(rewards.dtype)",
        "torch.ones_like(rewards)",
        "grpo_split",
    ),
    Mutation(
        "advantages",
        "grpo_split",
        "torch.where(alone | flat, 1.0, variance.sqrt())",
        "variance.sqrt()",
        "grpo_split",
    ),
    Mutation(
        "advantages",
        "grpo_split",
        "torch.where(alone, 0.0, index.sum(rewards * members) / counts.clamp(min=1))",
        "torch.where(flat, 0.0, index.sum(rewards * members) / counts.clamp(min=1))",
        "grpo_split",
    ),
    # token advantages
    Mutation("token_advantages", "gae", "gamma * following", "following", "gae"),
    Mutation("token_advantages", "gae", "gamma * lam", "gamma", "gae"),
    Mutation("token_advantages", "gae", "raw + baseline", "raw", "gae"),
    Mutation(
        "token_advantages",
        "gae",
        "whiten(raw, torch.ones_like(raw)) if whiten_advantages else raw",
        "raw",
        "gae",
    ),
    Mutation(
        "token_advantages",
        "_trainable",
        "mask.nonzero().squeeze(1)",
        "torch.arange(len(mask))",
        "gae_skips_masked",
    ),
    Mutation("token_advantages", "_scan_back", "factors * reach", "factors", "gae"),
    Mutation("token_advantages", "reinforce_pp", "gamma * continues", "continues", "reinforce_pp"),
    Mutation(
        "token_advantages",
        "_trainable",
        "owner[1:] == owner[:-1]",
        "owner[1:] >= owner[:-1]",
        "reinforce_pp",
    ),
    Mutation("token_advantages", "remax", "returns - baseline[rows[where]]", "returns", "remax"),
    Mutation(
        "token_advantages",
        "outcome_rewards",
        "torch.where(mask.bool(), positions, -1)",
        "positions",
        "outcome_rewards",
    ),
    Mutation(
        "token_advantages",
        "_token_baseline",
        "2 * old_logprobs[where].exp()",
        "old_logprobs[where].exp()",
        "optimal_token_baseline",
    ),
    Mutation(
        "token_advantages",
        "_token_baseline",
        "importance_weights[where].square()",
        "importance_weights[where]",
        "optimal_token_baseline",
    ),
    Mutation(
        "token_advantages",
        "_token_baseline",
        "peers.sum(returns * weight) / (peers.sum(weight) + BASELINE_EPS)",
        "peers.sum(returns) / (peers.sum(weight / weight) + BASELINE_EPS)",
        "optimal_token_baseline",
    ),
    Mutation(
        "token_advantages",
        "_token_baseline",
        "torch.where(peers.sum(torch.ones_like(rewards)) < 2, 0.0, baseline)",
        "baseline",
        "optimal_token_baseline",
    ),
    Mutation(
        "token_advantages",
        "_token_baseline",
        "_cumulative(energy.to(rewards.dtype), rows[where])",
        "energy",
        "optimal_token_baseline",
    ),
    Mutation(
        "token_advantages",
        "tir_optimal_token_baseline",
        "mask.to(torch.float64)",
        "torch.ones(len(mask))",
        "tir_time",
    ),
    # Classmate-CoT advantages
    Mutation(
        "classmate_advantages",
        "_to_tokens",
        "thought = cot_mask.bool()",
        "thought = mask.bool()",
        "classmate_std_off",
    ),
    Mutation(
        "classmate_advantages", "non_neg", "classmate.clamp(min=0)", "classmate", "classmate_std_on"
    ),
    Mutation(
        "classmate_advantages",
        "with_classmate",
        '_normalize("rewards", both, groups, normalize_by_std)',
        "both",
        "classmate_std_on",
    ),
    Mutation(
        "classmate_advantages",
        "gdpo",
        "normalize_rows(main + classmate_weight * classmate)",
        "main + classmate_weight * classmate",
        "classmate_gdpo_tokens",
    ),
    Mutation(
        "classmate_advantages",
        "_normalize",
        "offset / (std + STD_EPS) if by_std else offset",
        "offset",
        "classmate_std_on",
    ),
    # policy losses
    Mutation("losses", "_clip", "1 + clip_high", "1 + 2 * clip_high", "ppo_clip"),
    Mutation("losses", "_clip", "1 - clip_low", "1 - 2 * clip_low", "ppo_clip"),
    Mutation("losses", "ppo_clip", "torch.maximum", "torch.minimum", "ppo_clip_cs336"),
    Mutation(
        "losses", "ppo_clip", "(advantages < 0) & (values > bound)", "values > bound", "ppo_clip"
    ),
    Mutation("losses", "ppo_clip", "clipped > unclipped", "clipped >= unclipped", "ppo_clip"),
    Mutation(
        "losses",
        "ppo_clip",
        "dual_clip is not None and (not (clip_low is None and clip_high is None))",
        "dual_clip is not None",
        "ppo_open",
    ),
    Mutation(
        "losses", "_metrics", "old_logprobs - logprobs", "logprobs - old_logprobs", "ppo_clip"
    ),
    Mutation("losses", "policy_gradient", "-advantages", "advantages", "policy_gradient"),
    Mutation(
        "losses",
        "gspo",
        "mean[rows] + (logprobs - logprobs.detach())",
        "logprobs - old_logprobs",
        "gspo",
    ),
    Mutation("losses", "cispo", "_clip(ratio, clip_low, clip_high)", "ratio", "cispo"),
    Mutation(
        "losses",
        "cispo",
        "log_ratio(logprobs, old_logprobs).exp().detach",
        "log_ratio(logprobs, old_logprobs).exp",
        "cispo",
    ),
    Mutation("losses", "sapo", "-advantages * 4 / tau", "-advantages * 4", "sapo"),
    Mutation("losses", "sapo", "advantages > 0", "advantages < 0", "sapo"),
    Mutation(
        "losses",
        "geo_mean",
        "torch.where(advantages > 0, delta.clamp(max=clip_high), delta.clamp(min=-clip_low))",
        "delta.clamp(-clip_low, clip_high)",
        "geo_mean",
    ),
    Mutation(
        "losses",
        "geo_mean",
        "row_mean(limited, mask, rows, num_rows)",
        "row_mean(delta, mask, rows, num_rows)",
        "geo_mean",
    ),
    Mutation("covariance", "cov_selection", "-covariance", "covariance", "kl_cov"),
    Mutation(
        "losses",
        "kl_cov",
        "(logprobs - old_logprobs.detach()).abs()",
        "logprobs - old_logprobs.detach()",
        "kl_cov",
    ),
    Mutation(
        "covariance",
        "token_covariance",
        "advantages - masked_mean(advantages, mask)",
        "advantages",
        "token_covariance",
    ),
    Mutation(
        "losses",
        "clip_cov",
        "torch.where(cov_selected, 0.0, loss.values)",
        "loss.values",
        "clip_cov",
    ),
    Mutation("covariance", "cov_selection", "covariance > low", "covariance >= 0", "clip_cov"),
    Mutation(
        "covariance",
        "cov_selection",
        "int(share * int(mask.sum()))",
        "round(share * int(mask.sum())) + 1",
        "clip_cov",
    ),
    Mutation(
        "losses",
        "_dppo",
        "log_ratio(logprobs, old_logprobs).exp().clamp(max=max_ratio)",
        "log_ratio(logprobs, old_logprobs).exp()",
        "dppo",
    ),
    Mutation(
        "losses",
        "dppo_tv",
        "torch.where(advantages > 0, change <= clip_high, change >= -clip_low)",
        "torch.where(advantages > 0, change.abs() <= clip_high, change.abs() <= clip_low)",
        "dppo",
    ),
    Mutation("losses", "dppo_kl", "rest_old * (rest_old.log() - rest.log())", "0", "dppo"),
    Mutation("losses", "dppo_kl", "(kl <= clip_low) | (p >= p_old)", "kl <= clip_low", "dppo"),
    Mutation("losses", "dro", "0.5 * beta", "beta", "dro"),
    # KL
    Mutation("kl", "kl_penalty", "x.square() / 2", "x.square()", "kl_values"),
    Mutation("kl", "kl_penalty", "negative.exp() - negative", "negative.exp()", "kl_values"),
    Mutation(
        "kl",
        "kl_penalty",
        "(negative.exp() - negative - 1).clamp(-MAX_K3, MAX_K3)",
        "negative.exp() - negative - 1",
        "kl_values",
    ),
    Mutation(
        "kl",
        "kl_penalty",
        "value.detach() + (k2 - k2.detach())",
        "value",
        "kl_gradients_in_expectation",
    ),
    Mutation(
        "kl",
        "kl_penalty",
        "logprobs - reference_logprobs.detach()",
        "reference_logprobs.detach() - logprobs",
        "kl_expectations",
    ),
    Mutation(
        "kl",
        "adapt_kl_coef",
        "min(max(kl / target - 1, -0.2), 0.2)",
        "kl / target - 1",
        "adaptive_kl",
    ),
    Mutation("kl", "adapt_kl_coef", "error * num_rows", "error * 1", "adaptive_kl"),
    Mutation("kl", "mean_kl", "present.sum().clamp(min=1)", "num_rows", "mean_kl"),
    Mutation(
        "kl",
        "kl_in_reward",
        "token_rewards - coef * kl",
        "token_rewards + coef * kl",
        "kl_in_reward",
    ),
    Mutation("kl", "kl_in_reward", "torch.where(mask.bool(), kl, 0.0)", "kl", "kl_in_reward"),
    # critic
    Mutation("value", "value_loss", "torch.maximum", "torch.minimum", "value_loss"),
    Mutation(
        "value",
        "value_loss",
        "values.clamp(old_values - clip, old_values + clip)",
        "values.clamp(-clip, clip)",
        "value_loss",
    ),
    Mutation(
        "value", "explained_variance", "error.var", "error.square().mean", "explained_variance"
    ),
    # rollout correction
    Mutation("correction", "importance_weights", "raw.clamp(max=high)", "raw", "truncated_weights"),
    Mutation(
        "correction",
        "importance_weights",
        "row_mean(log_ratio, mask, rows, num_rows)[rows]",
        "log_ratio",
        "truncated_weights",
    ),
    Mutation("correction", "weight_metrics", "mean.square()", "mean", "truncated_weights"),
    Mutation(
        "correction",
        "importance_weights",
        'metrics["mean"] if level == "token" else metrics["seq_mean"]',
        'metrics["mean"]',
        "truncated_weights",
    ),
    Mutation(
        "correction",
        "importance_weights",
        "torch.where((raw >= low) & (raw <= high), raw, 0.0)",
        "raw.clamp(low, high)",
        "icepop",
    ),
    Mutation(
        "correction",
        "log_rho",
        "train_logprobs - rollout_logprobs",
        "rollout_logprobs - train_logprobs",
        "classmate_weights",
    ),
    Mutation(
        "correction",
        "reject",
        "(ratio >= low) & (ratio <= high)",
        "(1 / ratio >= low) & (1 / ratio <= high)",
        "rejection_is_about_rho",
    ),
    Mutation("correction", "reject", "log_ratio.square() / 2", "log_ratio.square()", "rejection"),
    Mutation(
        "correction",
        "reject",
        "log_ratio.exp() - 1 - log_ratio",
        "log_ratio.exp() - 1",
        "rejection",
    ),
    Mutation("correction", "reject", "keep & passed", "mask & passed", "rejection"),
    Mutation("correction", "mismatch_metrics", "2 * kept", "kept", "mismatch_metrics"),
    Mutation("correction", "mismatch_metrics", "2 * product", "2 * kept", "mismatch_metrics"),
    Mutation("correction", "mismatch_metrics", "-kept.mean()", "kept.mean()", "mismatch_metrics"),
    Mutation(
        "correction", "mismatch_metrics", "train.exp().mean", "train.mean().exp", "mismatch_metrics"
    ),
    # preference losses
    Mutation(
        "preference", "dpo", "gain_chosen - gain_rejected", "gain_chosen + gain_rejected", "dpo"
    ),
    Mutation(
        "preference",
        "dpo",
        "-(1 - label_smoothing) * logsigmoid(logits)",
        "-logsigmoid(logits)",
        "dpo",
    ),
    Mutation("preference", "dpo", "-label_smoothing * logsigmoid(-logits)", "0.0", "dpo"),
    Mutation("preference", "dpo", "beta * h - target_margin", "beta * h", "preference_variants"),
    Mutation(
        "preference",
        "dpo",
        "-beta * logsigmoid(log_odds(chosen) - log_odds(rejected))",
        "-logsigmoid(log_odds(chosen) - log_odds(rejected))",
        "preference_variants",
    ),
    Mutation(
        "preference",
        "log_odds",
        "torch.log(-torch.expm1(bounded))",
        "torch.log(torch.exp(bounded))",
        "preference_variants",
    ),
    Mutation("preference", "kto", "gain - kl", "gain", "kto"),
    Mutation("preference", "kto", "torch.where(desirable, 1.0, -1.0)", "1.0 + 0 * gain", "kto"),
    Mutation("preference", "kto", "torch.sigmoid(-distance)", "torch.sigmoid(distance)", "kto"),
    Mutation(
        "preference",
        "kto",
        "torch.where(desirable, desirable_weight, undesirable_weight)",
        "torch.where(desirable, undesirable_weight, desirable_weight)",
        "kto",
    ),
    Mutation(
        "preference",
        "mismatched_kl",
        "logprobs.double() - reference.double()",
        "reference.double() - logprobs.double()",
        "kto",
    ),
    Mutation("preference", "bradley_terry", "difference - margins", "difference", "bradley_terry"),
    Mutation(
        "preference", "bradley_terry", "chosen + rejected", "chosen - rejected", "bradley_terry"
    ),
    Mutation("preference", "step_cross_entropy", "signs * scores", "scores", "step_cross_entropy"),
    Mutation(
        "preference",
        "step_cross_entropy",
        "scores.detach() > 0",
        "scores.detach() < 0",
        "step_cross_entropy",
    ),
    Mutation("preference", "dpo", "2 * beta", "beta", "dpo"),
    Mutation("preference", "dpo", "1 - beta * h", "1 - h", "dpo"),
    Mutation(
        "preference", "row_logprobs", "row_mean if average else row_sum", "row_sum", "row_logprobs"
    ),
    # distillation
    Mutation(
        "distillation",
        "teacher_advantages",
        "teacher_logprobs.detach() - logprobs.detach()",
        "logprobs.detach() - teacher_logprobs.detach()",
        "distillation",
    ),
    Mutation("distillation", "teacher_advantages", "torch.zeros_like(gap)", "gap", "distillation"),
    Mutation("distillation", "with_rest", "-torch.expm1(top)", "torch.exp(top)", "distillation"),
    Mutation(
        "distillation",
        "divergence",
        "_kl(student, teacher)",
        "_kl(teacher, student)",
        "distillation",
    ),
    Mutation(
        "distillation",
        "divergence",
        "jsd_beta * _kl(teacher, mixture)",
        "_kl(teacher, mixture)",
        "distillation",
    ),
    Mutation("distillation", "divergence", "teacher + shares[1].log()", "teacher", "distillation"),
    # supervised, curriculum
    Mutation("supervised", "sft_loss", "logprobs.detach().exp()", "logprobs.exp()", "sft_loss"),
    Mutation(
        "supervised",
        "sft_loss",
        "-logprobs.detach().exp() * logprobs",
        "-logprobs.detach() * logprobs",
        "sft_loss",
    ),
    Mutation(
        "curriculum",
        "draw_probability",
        "1.0 - solve_rate",
        "solve_rate",
        "curriculum",
    ),
    Mutation(
        "curriculum",
        "updated_rate",
        "memory * old + (1.0 - memory) * new",
        "(1.0 - memory) * old + memory * new",
        "curriculum",
    ),
    # shaping
    Mutation(
        "shaping",
        "off_policy_shape",
        "log_ratio - torch.log(torch.full_like(log_ratio, gamma))",
        "log_ratio + torch.log(torch.full_like(log_ratio, gamma))",
        "luffy_shaping",
    ),
    Mutation(
        "shaping",
        "off_policy_shape",
        "value = weight * log_ratio",
        "value = log_ratio",
        "luffy_loss",
    ),
    Mutation(
        "shaping",
        "off_policy_shape",
        "bounded.exp() + weight * log_ratio",
        "bounded.exp()",
        "luffy_loss",
    ),
    Mutation(
        "shaping", "off_policy_shape", "value.clamp(min_value, max_value)", "value", "luffy_loss"
    ),
    Mutation(
        "shaping",
        "drop_confident",
        "logprobs.detach().exp() <= max_probability",
        "logprobs.detach().exp() > -1",
        "luffy_loss",
    ),
    Mutation(
        "shaping",
        "on_policy_reshape",
        "logsigmoid(old_logprobs.detach() - log_gamma)",
        "old_logprobs.detach()",
        "on_policy_reshape",
    ),
    Mutation(
        "shaping", "on_policy_reshape", "ratio + weight * delta", "ratio", "on_policy_reshape"
    ),
    Mutation(
        "shaping", "overlong_penalty", "exceeded / buffer", "exceeded / max_length", "overlong"
    ),
    Mutation(
        "shaping",
        "overlong_penalty",
        "-factor * (exceeded / buffer).clamp(0, 1)",
        "-(exceeded / buffer).clamp(0, 1)",
        "overlong",
    ),
    Mutation("shaping", "reshaped_loss", "torch.maximum", "torch.minimum", "reshaped_loss"),
    # demonstrations and replays
    Mutation("prefixes", "prefix_ratio", "step - 1", "step", "prefix_ratios"),
    Mutation(
        "prefixes",
        "prefix_ratio",
        "-(-steps_done * NUM_WINDOWS // steps)",
        "steps_done * NUM_WINDOWS // steps + 1",
        "prefix_ratios",
    ),
    Mutation("prefixes", "prefix_ratio", "max(num_copies - 1, 1)", "num_copies", "prefix_ratios"),
    Mutation("prefixes", "prefix_ratio", "NUM_WINDOWS - window", "window", "prefix_ratios"),
    Mutation(
        "prefixes",
        "prefix_ratio",
        "min(steps_done / steps, 1.0)",
        "steps_done / steps",
        "prefix_ratios",
    ),
    Mutation(
        "replay",
        "bucket_weight",
        "-(successes - samples / 2) ** 2 / 2",
        "-(successes - samples / 2) ** 2",
        "bucket_weights",
    ),
    Mutation("replay", "bucket_weight", "min(share, 0.5)", "share", "bucket_weights"),
    Mutation(
        "replay",
        "_draw_bucket",
        "(weights[key] for key in keys)",
        "weights.values()",
        "bucket_draws",
    ),
    Mutation("replay", "_draw_bucket", "point -= weights[key]", "point -= 0", "bucket_draws"),
    Mutation(
        "replay_pool",
        "ReplayPool.pick",
        "max if largest else min",
        "min if largest else max",
        "pool",
    ),
    Mutation(
        "replay_pool",
        "ReplayPool.set_successes",
        "successes and uid in self.entries",
        "uid in self.entries",
        "pool",
    ),
    Mutation(
        "replay_pool",
        "ReplayPool.add",
        "not any((torch.equal(old.tokens, new.tokens) for old in entry.experiences))",
        "True",
        "pool",
    ),
    # Classmate-CoT
    Mutation(
        "thought_spans",
        "split_cot",
        "find_ids(ids, end, first, length)",
        "find_ids(ids, end, first, len(ids))",
        "thought",
    ),
    Mutation(
        "thought_spans",
        "split_cot",
        "start_at + len(start) if start_at >= 0 else 0",
        "max(start_at, 0)",
        "thought",
    ),
    Mutation("thought_spans", "split_cot", "end_at + len(end)", "end_at", "thought"),
    Mutation(
        "thought_spans", "keep", "max(1, int(count * share))", "int(count * share)", "thought"
    ),
    Mutation("thought_spans", "keep", "end - num_kept", "end - num_kept - 1", "thought"),
    Mutation(
        "thought_spans",
        "keep_words",
        "int(len(ends) * share)",
        "round(len(ends) * share) + 1",
        "thought",
    ),
    Mutation(
        "classmate_rewards",
        "combine",
        "torch.where(scores.isnan(), no_output_score, scores).mean",
        "scores.nanmean",
        "classmate_rewards",
    ),
    Mutation("classmate_rewards", "combine", "share / share.sum()", "share", "classmate_rewards"),
    Mutation("classmate_rewards", "gate", "main > 0", "main >= 0", "classmate_rewards"),
    # logits, masks, pass@k
    Mutation(
        "entropy",
        "entropy.measure",
        "logprobs.masked_fill(logprobs == -torch.inf, 0)",
        "logprobs",
        "entropy",
    ),
    Mutation(
        "entropy",
        "sum_probs_squared",
        "torch.softmax(_wide(part) / temperature, -1).square()",
        "torch.softmax(_wide(part) / temperature, -1)",
        "entropy",
    ),
    Mutation(
        "entropy",
        "selective_log_softmax.pick",
        "_wide(part) / temperature",
        "_wide(part)",
        "entropy",
    ),
    Mutation(
        "masked",
        "masked_mean",
        "masked_normalize(tensor, mask, dim) / count",
        "masked_normalize(tensor, mask, dim) / count.clamp(min=1)",
        "masked",
    ),
    Mutation(
        "masked",
        "masked_normalize",
        "(kept.sum() if dim is None else kept.sum(dim)) / normalize_constant",
        "kept.sum() if dim is None else kept.sum(dim)",
        "masked",
    ),
    Mutation("masked", "row_mean", "counts.clamp(min=1)", "counts.sum()", "row_logprobs"),
    Mutation("passk", "pass_at_k", "num_samples - num_correct", "num_samples - 1", "pass_at_k"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # broken code may warn
@pytest.mark.parametrize(
    "mutation",
    MUTATIONS,
    ids=[f"{m.module}.{m.function}-{i}" for i, m in enumerate(MUTATIONS)],
)
def test_check_fails_on_mutated_formula(mutation):
    broken = mutated_modules(mutation.module, mutation.function, mutation.old, mutation.new)
    with pytest.raises(AssertionError):
        CHECKS[f"check_{mutation.check}"](broken)


def test_every_module_has_a_mutation():
    assert {mutation.module for mutation in MUTATIONS} == set(MODULES)


def test_mutated_copies_leave_the_real_modules_unchanged():
    before = real_modules()
    unchanged = mutated_modules("losses", "policy_gradient", "-advantages", "-advantages")
    CHECKS["check_policy_gradient"](unchanged)
    assert unchanged.losses is not before.losses
    assert real_modules().losses is before.losses


def test_mutation_of_an_absent_expression_is_refused():
    with pytest.raises(AssertionError, match="0 times"):
        mutated_modules("losses", "ppo_clip", "no_such_name", "0")
