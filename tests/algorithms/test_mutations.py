# ruff: noqa: E501  (a table reads best with one mutation a line)
"""The checks can fail: each line breaks one formula in the source and names the check that must then fail.

The mutated source is compiled into fresh modules (helpers.mutated); the real ones stay as they are. A mutation whose text no longer
occurs exactly once in the source fails too, so the table cannot rot.
"""

import pytest

from .helpers import mutated, real
from .test_vectors import CHECKS

MUTATIONS = [
    # aggregation
    ("aggregation", "weights / counts.sum().clamp(min=1)", "weights / num_rows", "aggregation"),
    ("aggregation", "(counts > 0).sum()", "torch.tensor(num_rows)", "aggregation_leaves_out_masked_rows"),
    ("aggregation", "weights / counts.clamp(min=1)[rows]", "weights / counts.mean()", "aggregation_leaves_out_masked_rows"),
    ("aggregation", "return weights / length", "return weights * counts.numel() / length", "aggregation_classmate"),
    ("aggregation", "weights = mask.to(dtype)", "weights = torch.ones_like(mask, dtype=dtype)", "aggregation_leaves_out_masked_rows"),
    # groups
    ("groups", "(counts - 1).clamp(min=1)", "counts", "grpo"),
    ("groups", "mean = torch.where(alone, 0.0, groups.sum(rewards) / counts)", "mean = groups.sum(rewards) / counts", "drgrpo"),
    ("groups", "std = torch.where(alone, 1.0, variance.sqrt())", "std = variance.sqrt()", "grpo"),
    ("groups", "torch.where(groups.spread(flat), 0.0, rewards - groups.spread(mean))", "rewards - groups.spread(mean)", "grpo_cs336"),
    ("groups", "/ (total - 1)", "/ total", "reinforce_pp_baseline"),
    ("groups", "mean = (values * weights).sum() / total", "mean = values.mean()", "reinforce_pp_baseline"),
    ("groups", "(values.std() + eps)", "(values.std(correction=0) + eps)", "gdpo_rows"),
    ("groups", "values.numel() < 2 or bool((values == values[0]).all())", "not values.numel()", "classmate_singleton"),
    # row advantages
    ("advantages", "return offset / (std + eps) if normalize_by_std else offset", "return offset", "grpo"),
    ("advantages", "return grpo(rewards, groups, normalize_by_std=False)", "return grpo(rewards, groups)", "drgrpo"),
    ("advantages", "torch.where(num_best > 1, best, second)", "second", "grpo_passk"),
    ("advantages", "best - torch.where(alone, 0.0, second)", "best", "grpo_passk"),
    ("advantages", "offset * counts / (counts - 1).clamp(min=1)", "offset", "rloo"),
    ("advantages", "index.sum(weights * rewards) / total.clamp(min=1)", "index.sum(rewards) / index.sum(weights > 0)", "opo"),
    ("advantages", "torch.where(alone | (total == 0), 0.0,", "torch.where(total == 0, 0.0,", "opo"),
    ("advantages", "offset * rewards.numel() / (rewards != 0).sum().clamp(min=1)", "offset", "gpg"),
    ("advantages", "return whiten(offset, lengths.to(rewards.device))", "return offset", "reinforce_pp_baseline"),
    ("advantages", "weights.get(name, 1.0) * grpo(r,", "grpo(weights.get(name, 1.0) * r,", "gdpo_rows"),
    ("advantages", "return whiten(total, lengths.to(total.device))", "return normalize_rows(total, eps)", "gdpo_verl"),
    ("advantages", "members = on_policy.to(rewards.dtype)", "members = torch.ones_like(rewards)", "grpo_split"),
    ("advantages", "torch.where(alone | flat, 1.0, variance.sqrt())", "variance.sqrt()", "grpo_split"),
    ("advantages", "mean = torch.where(alone, 0.0, index.sum(rewards * members)", "mean = torch.where(flat, 0.0, index.sum(rewards * members)", "grpo_split"),
    # token advantages
    ("token_advantages", "rewards + gamma * following * goes_on - baseline", "rewards + following * goes_on - baseline", "gae"),
    ("token_advantages", "_scan_back(deltas, gamma * lam * goes_on)", "_scan_back(deltas, gamma * goes_on)", "gae"),
    ("token_advantages", "_place(raw + baseline, where", "_place(raw, where", "gae"),
    ("token_advantages", "whiten(raw, torch.ones_like(raw)) if whiten_advantages else raw", "raw", "gae"),
    ("token_advantages", "where = mask.nonzero().squeeze(1)", "where = torch.arange(len(mask))", "gae_skips_masked"),
    ("token_advantages", "factors = factors * reach", "factors = factors", "gae"),
    ("token_advantages", "_scan_back(rewards, gamma * goes_on)", "_scan_back(rewards, goes_on)", "reinforce_pp"),
    ("token_advantages", "(owner[1:] == owner[:-1])", "(owner[1:] >= owner[:-1])", "reinforce_pp"),
    ("token_advantages", "returns - baseline[rows[where]]", "returns", "remax"),
    ("token_advantages", "torch.where(mask.bool(), positions, -1)", "positions", "outcome_rewards"),
    ("token_advantages", "1 - 2 * old_logprobs[where].exp()", "1 - old_logprobs[where].exp()", "optimal_token_baseline"),
    ("token_advantages", "importance_weights[where].square()", "importance_weights[where]", "optimal_token_baseline"),
    ("token_advantages", "moment.sum(returns * weight) / (moment.sum(weight)", "moment.sum(returns) / (moment.sum(weight / weight)", "optimal_token_baseline"),
    ("token_advantages", "torch.where(moment.sum(torch.ones_like(rewards)) < 2, 0.0, baseline)", "baseline", "optimal_token_baseline"),
    ("token_advantages", "weight = _cumulative(energy.to(rewards.dtype), rows[where])", "weight = energy", "optimal_token_baseline"),
    ("token_advantages", "_cumulative(mask.to(torch.float64), rows) - 1", "_cumulative(torch.ones(len(mask)), rows) - 1", "tir_time"),
    # classmate
    ("classmate_advantages", "cot_mask.bool() if spread", "mask.bool() if spread", "classmate_std_off"),
    ("classmate_advantages", ".clamp(min=0)", "", "classmate_std_on"),
    ("classmate_advantages", "_normalize(\"rewards\", both, groups, normalize_by_std)", "both", "classmate_std_on"),
    ("classmate_advantages", "_place(normalize_rows(main + weight * classmate), answer", "_place(main + weight * classmate, answer", "classmate_gdpo_tokens"),
    ("classmate_advantages", "offset / (std + STD_EPS) if by_std else offset", "offset", "classmate_std_on"),
    # losses
    ("losses", "None if clip_high is None else 1 + clip_high", "None if clip_high is None else 1 + 2 * clip_high", "ppo_clip"),
    ("losses", "None if clip_low is None else 1 - clip_low,", "None if clip_low is None else 1 - 2 * clip_low,", "ppo_clip"),
    ("losses", "values = torch.maximum(unclipped, clipped)", "values = torch.minimum(unclipped, clipped)", "ppo_clip_cs336"),
    ("losses", "capped = (advantages < 0) & (values > bound)", "capped = values > bound", "ppo_clip"),
    ("losses", "clip_fraction=clipped > unclipped, dual", "clip_fraction=clipped >= unclipped, dual", "ppo_clip"),
    ("losses", "dual_clip is not None and not (clip_low is None and clip_high is None)", "dual_clip is not None", "ppo_open"),
    ("losses", '{"policy_kl": (old_logprobs - logprobs)', '{"policy_kl": (logprobs - old_logprobs)', "ppo_clip"),
    ("losses", "return TokenLoss(-advantages * logprobs, {})", "return TokenLoss(advantages * logprobs, {})", "policy_gradient"),
    ("losses", "(mean[rows] + (logprobs - logprobs.detach()))", "(logprobs - old_logprobs)", "gspo"),
    ("losses", "weight = _clip(ratio, clip_low, clip_high)", "weight = ratio", "cispo"),
    ("losses", "log_ratio(logprobs, old_logprobs).exp().detach()", "log_ratio(logprobs, old_logprobs).exp()", "cispo"),
    ("losses", "-advantages * 4 / tau", "-advantages * 4", "sapo"),
    ("losses", "advantages > 0, ratio.new_tensor(temperature_positive)", "advantages < 0, ratio.new_tensor(temperature_positive)", "sapo"),
    ("losses", "torch.where(advantages > 0, delta.clamp(max=clip_high), delta.clamp(min=-clip_low))", "delta.clamp(-clip_low, clip_high)", "geo_mean"),
    ("losses", "rho = row_mean(limited", "rho = row_mean(delta", "geo_mean"),
    ("losses", "candidates, rank_by = mask, -covariance", "candidates, rank_by = mask, covariance", "kl_cov"),
    ("losses", "coefficient * (logprobs - old_logprobs.detach()).abs(), 0.0", "coefficient * (logprobs - old_logprobs.detach()), 0.0", "kl_cov"),
    ("losses", "(advantages - masked_mean(advantages, mask))", "advantages", "token_covariance"),
    ("losses", "torch.where(cov_selected, 0.0, loss.values)", "loss.values", "clip_cov"),
    ("losses", "& (covariance > band[0])", "& (covariance >= 0)", "clip_cov"),
    ("losses", "int(share * int(mask.sum()))", "round(share * int(mask.sum())) + 1", "clip_cov"),
    ("losses", ".exp().clamp(max=max_ratio).detach()", ".exp().detach()", "dppo"),
    ("losses", "moved <= clip_high, moved >= -clip_low", "moved.abs() <= clip_high, moved.abs() <= clip_low", "dppo"),
    ("losses", "rest_old * (rest_old.log() - rest.log())", "0", "dppo"),
    ("losses", "(divergence <= clip_low) | (p >= p_old)", "(divergence <= clip_low)", "dppo"),
    ("losses", "0.5 * beta * delta.square()", "beta * delta.square()", "dro"),
    # KL
    ("kl", "k2 = x.square() / 2", "k2 = x.square()", "kl_values"),
    ("kl", "negative.exp() - negative - 1", "negative.exp() - 1", "kl_values"),
    ("kl", ".clamp(-MAX_K3, MAX_K3)", "", "kl_values"),
    ("kl", "value.detach() + (k2 - k2.detach()) if estimator", "value if estimator", "kl_gradients_in_expectation"),
    ("kl", "x = logprobs - reference_logprobs.detach()", "x = reference_logprobs.detach() - logprobs", "kl_expectations"),
    ("kl", "min(max(kl / self.target - 1, -0.2), 0.2)", "kl / self.target - 1", "adaptive_kl"),
    ("kl", "num_rows / self.horizon", "1 / self.horizon", "adaptive_kl"),
    ("kl", "/ present.sum().clamp(min=1)", "/ num_rows", "mean_kl"),
    ("kl", "return token_rewards - coefficient * kl, kl", "return token_rewards + coefficient * kl, kl", "kl_in_reward"),
    ("kl", "kl = torch.where(mask.bool(), kl, 0.0)", "kl = kl", "kl_in_reward"),
    # critic
    ("value", "0.5 * torch.maximum(squared, clipped)", "0.5 * torch.minimum(squared, clipped)", "value_loss"),
    ("value", "old_values - clip, old_values + clip", "-clip, clip", "value_loss"),
    ("value", "1 - error.var()", "1 - error.square().mean()", "explained_variance"),
    # correction
    ("correction", "values = raw.clamp(max=high)", "values = raw", "truncated_weights"),
    ("correction", "log_ratio = row_mean(log_ratio, mask, rows, num_rows)[rows]", "log_ratio = log_ratio", "truncated_weights"),
    ("correction", '"effective_sample_size": torch.where(square > 0, mean.square() / square', '"effective_sample_size": torch.where(square > 0, mean / square', "truncated_weights"),
    ("correction", 'metrics["mean"] if level == "token" else metrics["seq_mean"]', 'metrics["mean"]', "truncated_weights"),
    ("correction", "torch.where((raw >= low) & (raw <= high), raw, 0.0)", "raw.clamp(low, high)", "icepop"),
    ("correction", "(train_logprobs - rollout_logprobs).detach().clamp", "(rollout_logprobs - train_logprobs).detach().clamp", "classmate_weights"),
    ("correction", "passed = (measure.exp() >= low) & (measure.exp() <= high)", "passed = (1 / measure.exp() >= low) & (1 / measure.exp() <= high)", "rejection_is_about_rho"),
    ("correction", '"k2": log_ratio.square() / 2', '"k2": log_ratio.square()', "rejection"),
    ("correction", '"k3": log_ratio.exp() - 1 - log_ratio', '"k3": log_ratio.exp() - 1', "rejection"),
    ("correction", "keep = keep & passed", "keep = mask & passed", "rejection"),
    ("correction", '"chi2_token": (2 * kept).exp()', '"chi2_token": kept.exp()', "mismatch_metrics"),
    ("correction", '"chi2_seq": (2 * product).exp()', '"chi2_seq": (2 * kept).exp()', "mismatch_metrics"),
    ("correction", '"kl": -kept.mean()', '"kl": kept.mean()', "mismatch_metrics"),
    ("correction", '"training_ppl": train.exp().mean()', '"training_ppl": train.mean().exp()', "mismatch_metrics"),
    # preferences
    ("preference", "h = gain_chosen - gain_rejected", "h = gain_chosen + gain_rejected", "dpo"),
    ("preference", "-(1 - label_smoothing) * logsigmoid(beta * h)", "-logsigmoid(beta * h)", "dpo"),
    ("preference", "(h - 1 / (2 * beta)).square()", "(h - 1 / beta).square()", "dpo"),
    ("preference", "torch.relu(1 - beta * h)", "torch.relu(1 - h)", "dpo"),
    ("preference", "(row_mean if average else row_sum)", "row_sum", "row_logprobs"),
    # shaping
    ("shaping", "torch.sigmoid(log_ratio - torch.log(", "torch.sigmoid(log_ratio + torch.log(", "luffy_shaping"),
    ("shaping", "value = weight * log_ratio", "value = log_ratio", "luffy_loss"),
    ("shaping", "value = bounded.exp() + weight * log_ratio", "value = bounded.exp()", "luffy_loss"),
    ("shaping", "value.clamp(min_value, max_value)", "value", "luffy_loss"),
    ("shaping", "logprobs.detach().exp() <= max_probability", "logprobs.detach().exp() > -1", "luffy_loss"),
    ("shaping", "logsigmoid(old_logprobs.detach() - at)", "old_logprobs.detach()", "on_policy_reshape"),
    ("shaping", "return ratio + weight * delta", "return ratio", "on_policy_reshape"),
    ("shaping", "(exceeded / buffer).clamp(0, 1)", "(exceeded / max_length).clamp(0, 1)", "overlong"),
    ("shaping", "return -factor * (", "return -(", "overlong"),
    ("shaping", "torch.maximum(-advantages * value, -advantages * value.clamp(", "torch.minimum(-advantages * value, -advantages * value.clamp(", "reshaped_loss"),
    # demonstrations and replays
    ("prefixes", "done = step - 1", "done = step", "prefix_ratios"),
    ("prefixes", "-(-done * NUM_WINDOWS // steps) - 1", "done * NUM_WINDOWS // steps", "prefix_ratios"),
    ("prefixes", "max(num_copies - 1, 1)", "num_copies", "prefix_ratios"),
    ("prefixes", "NUM_WINDOWS - window\n", "window\n", "prefix_ratios"),
    ("prefixes", "1 - min(done / steps, 1.0)", "1 - done / steps", "prefix_ratios"),
    ("replay", "math.exp(-((successes - samples / 2) ** 2) / 2)", "math.exp(-((successes - samples / 2) ** 2))", "bucket_weights"),
    ("replay", '"linear_clip": min(share, 0.5)', '"linear_clip": share', "bucket_weights"),
    ("replay", "sum(weights[key] for key in left)", "sum(weights.values())", "bucket_draws"),
    ("replay", "point -= weights[keys.pop(0)]", "keys.pop(0)", "bucket_draws"),
    ("replay", "(max if largest else min)", "(min if largest else max)", "pool"),
    ("replay", "if successes and uid in self.entries:", "if uid in self.entries:", "pool"),
    ("replay", "if not any(torch.equal(old.tokens, new.tokens) for old in entry.experiences):", "if True:", "pool"),
    # classmates
    ("thought", "close = find(ids, end, first, length)", "close = find(ids, end, first, len(ids))", "thought"),
    ("thought", "first = at + len(start) if at >= 0 else 0", "first = max(at, 0)", "thought"),
    ("thought", "close + len(end))", "close)", "thought"),
    ("thought", "max(1, int(count * share))", "int(count * share)", "thought"),
    ("thought", "else (end - kept, end)", "else (end - kept - 1, end)", "thought"),
    ("thought", "count = int(len(ends) * share)", "count = round(len(ends) * share) + 1", "thought"),
    ("classmate_rewards", "torch.where(scores.isnan(), no_output_score, scores).mean(-1)", "scores.nanmean(-1)", "classmate_rewards"),
    ("classmate_rewards", "share / share.sum()", "share", "classmate_rewards"),
    ("classmate_rewards", "torch.where(main > 0, classmate, otherwise)", "torch.where(main >= 0, classmate, otherwise)", "classmate_rewards"),
    # logits, masks, pass@k
    ("entropy", "-(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0)).sum(-1)", "-(logprobs.exp() * logprobs).sum(-1)", "entropy"),
    ("entropy", ".square().sum(-1), logits, chunk)", ".sum(-1), logits, chunk)", "entropy"),
    ("entropy", "torch.log_softmax(_wide(part) / temperature, -1).gather", "torch.log_softmax(_wide(part), -1).gather", "entropy"),
    ("masked", "masked_normalize(tensor, mask, dim) / count", "masked_normalize(tensor, mask, dim) / count.clamp(min=1)", "masked"),
    ("masked", ") / normalize_constant", ")", "masked"),
    ("masked", "counts.clamp(min=1)", "counts.sum()", "row_logprobs"),
    ("passk", "comb(num_samples - num_correct, k)", "comb(num_samples - 1, k)", "pass_at_k"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # broken code may well complain
@pytest.mark.parametrize(
    ("module", "old", "new", "check"),
    MUTATIONS,
    ids=[f"{m[0]}-{m[3]}-{i}" for i, m in enumerate(MUTATIONS)],
)
def test_mutation_is_caught(module, old, new, check):
    broken = mutated(module, old, new)
    with pytest.raises(AssertionError):
        CHECKS[f"check_{check}"](broken)


def test_every_module_and_check_is_mutated_and_the_harness_is_honest():
    """No formula file without a mutation; a mutation that changes nothing must pass; the real modules are still the real ones."""
    files = {name for name in vars(real()) if name != "__init__"}
    assert {m[0] for m in MUTATIONS} == files
    before = real()
    same = mutated("losses", "MAX_LOG_RATIO = 20.0", "MAX_LOG_RATIO = 20.0 ")
    CHECKS["check_ppo_clip"](same)
    assert same.losses is not before.losses and real().losses is before.losses
    with pytest.raises(AssertionError, match="not once"):
        mutated("losses", "no such text", "")
