"""Mutations of the formulas of losses, aggregation, KL and values."""

from .mutation import Mutation

MUTATIONS = [
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
    Mutation(
        "aggregation",
        "token_weights",
        "Groups.of(groups, rows.device).index[rows]",
        "rows",
        "aggregation_by_prompt",
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
    # PF-PPO
    Mutation(
        "resampling",
        "resampling_weights",
        "rewards.abs().pow(power)",
        "rewards.pow(power)",
        "resampling",
    ),
    Mutation(
        "resampling",
        "resampling_weights",
        "rewards.abs().pow(power)",
        "rewards.abs().pow(2)",
        "resampling",
    ),
    Mutation("resampling", "resampling_weights", "rewards.min()", "rewards.max()", "resampling"),
    Mutation(
        "resampling",
        "resampling_weights",
        "torch.where(highest, 0.4, 0.1)",
        "torch.where(highest, 0.1, 0.4)",
        "resampling",
    ),
    Mutation("resampling", "resampling_weights", "weights + 1e-8", "weights", "resampling"),
    # preference losses
    Mutation(
        "preference", "dpo", "gain_chosen - gain_rejected", "gain_chosen + gain_rejected", "dpo"
    ),
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
    # supervised
    Mutation("supervised", "sft_loss", "logprobs.detach().exp()", "logprobs.exp()", "sft_loss"),
    Mutation(
        "supervised",
        "sft_loss",
        "-logprobs.detach().exp() * logprobs",
        "-logprobs.detach() * logprobs",
        "sft_loss",
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
]
