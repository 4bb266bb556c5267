"""GRPO's family and PPO: rollout correction, parts of the loss, and the critic."""

import math

import pytest
import torch
from method_runs import Bound, bound, flat_weights
from safetensors.torch import save_file
from spies import Spy, gradient
from tiny_runs import random_batch

from postgrad.algorithms.losses import LOSSES
from postgrad.errors import RunError
from postgrad.training import checkpoint
from postgrad.types import Batch

# ---- rollout correction


def apart(recipe: str, tiny, *overrides: str) -> Bound:
    """An engine that says it has weights of its own."""
    b = bound(recipe, tiny, *overrides)
    b.method.ports.engine = Spy(b.host.engine, shares_weights=False)
    return b


def test_correction_is_absent_when_the_engine_is_the_trainer(tiny):
    b = bound("grpo", tiny)
    batch = b.until()
    assert "correct" not in b.stages() and "rollout_weights" not in batch.tokens
    assert not any(name.startswith("correction/") for name in b.metrics)
    assert "correct" not in apart("grpo", tiny, "method.correction=none").stages()


def test_correction_is_on_when_the_engine_is_apart(tiny):
    b = apart("grpo", tiny)
    stages = b.stages()
    assert stages.index("compute_old_logprobs") < stages.index("correct") < stages.index("estimate")
    batch = b.until()
    assert {
        "correction/kl",
        "correction/k3_kl",
        "correction/effective_sample_size",
        "correction/mean",
    } <= b.metrics.keys()
    assert all(math.isfinite(value) for value in b.metrics.values())
    torch.testing.assert_close(
        batch.tokens["rollout_weights"], torch.ones(batch.num_tokens), rtol=1e-4, atol=1e-4
    )
    assert b.metrics["correction/effective_sample_size"] == pytest.approx(1, abs=1e-4)


def mismatched(tiny, *overrides: str) -> tuple[Bound, Batch]:
    """Runs up to `compute_old_logprobs`.

    The engine's first tokens then get a third of the probability.
    """
    b = apart("grpo", tiny, *overrides)
    batch = b.until("compute_old_logprobs")
    behavior = batch.tokens["old_logprobs"].clone()
    behavior[batch.response.offsets[:-1]] -= math.log(3)
    batch.tokens["behavior_logprobs"] = behavior
    return b, batch


def test_token_weights_are_truncated_and_multiply_the_loss(tiny):
    b, batch = mismatched(tiny)
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[batch.response.offsets[:-1]] = True
    batch = b.method.estimate(b.method.correct(batch, b.step_done), b.step_done)
    torch.testing.assert_close(
        batch.tokens["rollout_weights"], torch.where(first, 2.0, 1.0)
    )  # 3, truncated at 2
    assert b.metrics["correction/max"] == pytest.approx(2.0) and b.metrics["correction/kl"] < 0
    batch.tokens["rollout_weights"] = torch.full((batch.num_tokens,), 2.0)
    doubled = gradient(b.host.policy, batch)
    del batch.tokens["rollout_weights"]
    torch.testing.assert_close(doubled, 2 * gradient(b.host.policy, batch), rtol=1e-5, atol=1e-8)


def test_sequence_weights_and_intervals(tiny):
    b, batch = mismatched(tiny, "method.correction=sequence", "method.correction_bound='0.5_5'")
    weights = b.method.correct(batch, b.step_done).tokens["rollout_weights"]
    torch.testing.assert_close(weights, torch.full((batch.num_tokens,), 3.0))
    b, batch = mismatched(tiny, "method.correction=sequence", "method.correction_bound='0.5_2'")
    assert float(b.method.correct(batch, b.step_done).tokens["rollout_weights"].abs().max()) == 0.0


def test_rejection_narrows_the_mask_and_the_denominator(tiny):
    b, batch = mismatched(tiny, "method.correction=token", "method.rejection.token_k1='0.5_2.0'")
    batch = b.method.estimate(b.method.correct(batch, b.step_done), b.step_done)
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[batch.response.offsets[:-1]] = True
    assert torch.equal(batch.tokens["loss_mask"], ~first)
    share = len(batch) / batch.num_tokens
    assert b.metrics["correction/token_k1_rejected_fraction"] == pytest.approx(share, rel=1e-5)
    prepared = b.method.objective.prepare(batch.select(range(len(batch))))
    kept = prepared.tokens["loss_mask"]
    torch.testing.assert_close(
        prepared.tokens["loss_weight"][kept],
        torch.full((int(kept.sum()),), 1 / int((~first).sum())),
    )
    assert float(batch.tokens["advantages"][first].abs().max()) == 0.0


def test_rules_without_weights(tiny):
    b, batch = mismatched(
        tiny, "method.correction=rejection", "method.rejection.token_k1='0.5_2.0'"
    )
    batch = b.method.estimate(b.method.correct(batch, b.step_done), b.step_done)
    assert (
        "rollout_weights" not in batch.tokens
        and "correction/effective_sample_size" not in b.metrics
    )
    assert (
        int((~batch.tokens["loss_mask"]).sum()) == len(batch)
        and b.metrics["correction/token_k1_rejected_fraction"] > 0
    )
    assert b.metrics["correction/kl"] < 0


def test_rejected_row_counts_in_the_baseline_of_its_group(tiny):
    overrides = (
        "method.correction=token",
        "method.rejection.seq_mean_k1='0.5_2.0'",
        "method.normalize_by_std=false",
    )
    b = apart("grpo", tiny, *overrides)
    batch = b.until("compute_old_logprobs")
    whole = batch.select(range(len(batch)))
    row = int(batch.rows["reward"].argmax())
    others = batch.row_index != row
    engine_less_sure = batch.tokens["old_logprobs"] - math.log(5)
    batch.tokens["behavior_logprobs"] = torch.where(
        others, batch.tokens["old_logprobs"], engine_less_sure
    )
    batch = b.method.estimate(b.method.correct(batch, b.step_done), b.step_done)
    whole = b.method.estimate(whole, b.step_done)
    assert float(batch.rows["reward"][row]) > 0
    assert not bool(batch.tokens["loss_mask"][~others].any()) and bool(
        batch.tokens["loss_mask"][others].all()
    )
    torch.testing.assert_close(
        batch.tokens["advantages"][others], whole.tokens["advantages"][others]
    )


# ---- what the loss adds, what it leaves out


def test_the_entropy_bonus_raises_the_entropy(tiny):
    b = bound(
        "grpo", tiny, "method.entropy_coef=1", "optimizer.lr=3e-3", value=lambda response: 0.0
    )
    batch = b.until("estimate")
    before = float(b.host.policy.logprobs(batch)["entropy"].mean())
    for number in (1, 2, 3):
        b.host.policy.update(batch, number)
    assert float(b.host.policy.logprobs(batch)["entropy"].mean()) > before + 0.01


def test_the_entropy_bonus_is_linear_and_of_the_policy_being_trained(tiny):
    b = bound("grpo", tiny)
    batch = b.until("estimate")
    gradients = []
    for coefficient in (0.0, 0.5, 1.0):
        b.host.policy.objective.settings.entropy_coef = coefficient
        gradients.append(gradient(b.host.policy, batch))
    bonus = gradients[2] - gradients[0]
    assert float(bonus.abs().max()) > 1e-3
    torch.testing.assert_close(gradients[1] - gradients[0], bonus / 2, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_without_an_advantage_are_left_out_only_where_they_move_nothing(loss, tiny):
    """The gradient equals that of computing all rows, which a vanishing entropy bonus forces."""
    own = ["method.loss_options.beta=0.5"] if loss == "dro" else []
    b = bound("grpo", tiny, f"method.loss={loss}", *own)
    batch = random_batch(12, groups=4, samples=4)
    batch.tokens["uniforms"] = torch.rand(
        batch.num_tokens, generator=torch.Generator().manual_seed(0)
    )
    silent = batch.sum_tokens(batch.tokens["advantages"].abs()) == 0
    assert bool(silent.any()) and bool((~silent).any())
    objective = b.host.policy.objective
    short = gradient(b.host.policy, batch)
    num_short = len(objective.prepare(batch.select(range(len(batch)))))
    objective.settings.entropy_coef = 1e-30
    assert len(objective.prepare(batch.select(range(len(batch))))) == len(batch)
    full = gradient(b.host.policy, batch)
    assert float((short - full).abs().max()) <= 1e-6 * float(full.abs().max())
    assert (num_short < len(batch)) == (loss not in ("dro", "kl_cov")), (
        "their penalties move rows without an advantage"
    )


def test_gdpo_names_a_part_that_the_verifier_does_not_report(tiny):
    b = bound("gdpo", tiny, "method.reward_weights.formt=1.0")
    with pytest.raises(
        RunError,
        match=r"method\.reward_weights\.formt.*did you mean format\?",
    ):
        b.until("estimate")


# ---- PPO's critic


PPO = ("optimizer.lr=1e-2", "method.critic_lr=1e-2", "training.steps=10")


@pytest.mark.slow
def test_warm_up_trains_the_critic_alone(tiny):
    b = bound("ppo", tiny, *PPO, "method.critic_warmup=2")
    before = flat_weights(b.host.policy)
    critic = b.host.models["critic"]
    for number in (1, 2):
        values = critic.values(batch := b.until(number=number))
        assert torch.equal(before, flat_weights(b.host.policy)), "bit for bit"
        assert not torch.equal(values, batch.tokens["values"])
        assert b.metrics["critic/grad_norm"] > 0 and "grad_norm" not in b.metrics
    b.until(number=3)
    assert not torch.equal(before, flat_weights(b.host.policy)) and b.metrics["grad_norm"] > 0


@pytest.mark.slow
def test_values_start_at_zero_and_are_learned(tiny):
    b = bound("ppo", tiny, *PPO, "method.critic_warmup=10", "method.critic_clip=10")
    batch = b.until("estimate")
    assert float(batch.tokens["values"].abs().max()) == 0.0
    assert b.metrics["critic/explained_variance"] == pytest.approx(0, abs=1e-3)
    # With gamma = lambda = 1 every token's return is its row's reward.
    torch.testing.assert_close(batch.tokens["returns"], batch.expand(batch.rows["reward"]))
    critic, losses = b.host.models["critic"], []
    for number in range(1, 9):
        batch.tokens["values"] = critic.values(batch)
        losses.append(critic.update(batch, number)["critic/loss"])
    assert losses[-1] < 0.5 * losses[0]


def test_explained_variance_is_logged_and_means_what_it_says(tiny):
    b = bound("ppo", tiny, *PPO)
    b.until(number=1)
    batch = b.until("estimate", number=2)
    values, returns = batch.tokens["values"].double(), batch.tokens["returns"].double()
    by_hand = 1 - float((returns - values).var()) / (float(returns.var()) + 1e-5)
    assert b.metrics["critic/explained_variance"] == pytest.approx(by_hand, abs=1e-5)


@pytest.mark.slow
def test_a_damaged_value_head_is_a_run_error(tiny, tmp_path):
    critic = bound("ppo", tiny, *PPO).host.models["critic"]
    folder = checkpoint.save(tmp_path, [critic], checkpoint.State(1, {}, 0, {}), 2, None)
    save_file({"weight": torch.zeros(1, 32)}, folder / "critic" / "value_head.safetensors")
    with pytest.raises(RunError, match=r"step-1 cannot be read"):
        checkpoint.load(folder, [critic])
