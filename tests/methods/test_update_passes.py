"""Several passes over a rollout batch, masks, corrections and filters of the GRPO family."""

import pytest
import torch
from method_runs import SMALL, bound, run
from tiny_runs import config_of, metrics_of

from postgrad.methods.step import Step
from postgrad.methods.support.dynamic_sampling import _informative_rows
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import Batch, Trajectory


def updates_of(b) -> list[tuple[int, ...]]:
    """The groups of each optimizer step of one training step."""
    seen = []
    prepare = b.host.policy.objective.prepare

    def recording(batch):
        seen.append(tuple(batch.rows["group"].unique().tolist()))
        return prepare(batch)

    b.host.policy.objective.prepare = recording
    b.until("publish")
    return seen


def test_every_pass_takes_the_same_updates(tiny):
    b = bound("grpo", tiny, "training.ppo_epochs=3", "training.updates_per_step=2")
    assert updates_of(b) == [(0, 1), (2, 3)] * 3
    assert "compute_old_logprobs" in b.stages()


@pytest.mark.slow
def test_two_passes_equal_two_updates_by_hand(tiny):
    """The second pass uses the old log-probs of the first, and AdamW continues."""
    overrides = ("optimizer.lr=1e-3", "method.kl=none")
    twice = bound("grpo", tiny, "training.ppo_epochs=2", *overrides)
    twice.until("publish")
    once = bound("grpo", tiny, *overrides)
    batch = once.until("estimate")
    batch.tokens["old_logprobs"] = once.host.policy.logprobs(batch)["logprobs"]
    for _ in range(2):
        once.host.policy.update(batch, 1)
    pairs = zip(
        twice.host.policy.weights().values(), once.host.policy.weights().values(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    first = bound("grpo", tiny, *overrides)
    first.until("publish")
    different = zip(
        twice.host.policy.weights().values(), first.host.policy.weights().values(), strict=True
    )
    assert not all(torch.equal(a, b) for a, b in different)


@pytest.mark.slow
def test_critic_takes_every_pass(tiny, tmp_path):
    b = bound("ppo", tiny, "training.ppo_epochs=3", "training.updates_per_step=2")
    optimizer = b.host.models["critic"].optimizer
    rates: list[float] = []
    step = optimizer.step
    optimizer.step = lambda lr: rates.append(lr) or step(lr)
    b.until("publish")
    assert len(rates) == 6


OPTIONS = [
    ["method.correction=bypass"],
    ["method.correction=bypass", "method.rejection.seq_mean_k1=0.5_2.0"],
    ["method.correction=token"],
    ["method.mask_truncated=true", "method.kl=loss", "method.kl_ratio=true"],
    ["method.loss=kl_cov", "method.loss_options.cov_share=0.5"],
]


@pytest.mark.parametrize(
    "overrides",
    [OPTIONS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in OPTIONS[1:])],
    ids=str,
)
def test_options_train(tiny, verifiers, tmp_path, overrides):
    lines = run("grpo", tiny, tmp_path, *overrides, f"reward.verifier={verifiers}:graded")
    assert all(line["loss"] == line["loss"] and "grad_norm" in line for line in lines)
    if "method.correction=token" in overrides:
        assert {"correction/fraction_high", "correction/fraction_low"} <= lines[0].keys()
    if "method.loss=kl_cov" in overrides:
        assert lines[0]["policy/selected_fraction"] == pytest.approx(0.5, abs=0.1)
    if "method.mask_truncated=true" in overrides:
        assert 0 < lines[0]["response/masked"] < 1


def test_bypass_compares_with_the_engine_and_skips_a_pass(tiny):
    b = bound("grpo", tiny, "method.correction=bypass", "training.updates_per_step=2")
    assert "compute_old_logprobs" not in b.stages() and "correct" in b.stages()
    batch = b.until("estimate")
    assert torch.equal(batch.tokens["old_logprobs"], batch.tokens["behavior_logprobs"])


def test_truncated_rows_have_no_gradient_but_count_in_their_group(tiny):
    b = bound("grpo", tiny, "method.mask_truncated=true")
    batch = b.until("estimate")
    truncated = torch.tensor([finish == "length" for finish in batch.rows["finish"]])
    assert 0 < int(truncated.sum()) < len(batch)
    assert not batch.tokens["loss_mask"][batch.expand(truncated)].any()
    plain = bound("grpo", tiny).until("estimate")
    kept = ~batch.expand(truncated)
    assert torch.equal(batch.tokens["advantages"][kept], plain.tokens["advantages"][kept])


def test_optimal_token_baseline_reads_the_importance_weights(tiny):
    overrides = ("method.advantage=optimal_token_baseline", "method.correction=token")
    b = bound("grpo", tiny, *overrides)
    batch = b.until("correct")
    plain = b.method.estimate(batch, Step(1, b.problem_queue)).tokens["advantages"].clone()
    weights = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(0)) + 0.1
    batch.tokens["rollout_weights"] = weights
    weighted = b.method.estimate(batch, Step(1, b.problem_queue)).tokens["advantages"]
    assert not torch.allclose(plain, weighted)


def rows_with(scores: list[float], penalties: list[float]) -> Batch:
    batch = Batch.of([Trajectory(str(i), [1], [2], group=i // 2) for i in range(len(scores))])
    batch.rows["reward/overlong"] = torch.tensor(penalties)
    batch.rows["reward/answer"] = torch.tensor(scores)
    batch.rows["reward"] = torch.tensor(scores) + batch.rows["reward/overlong"]
    return batch


def test_groups_are_filtered_by_accuracy_not_by_the_shaped_reward():
    """Group 0 differs in length only, group 1 in accuracy."""
    batch = rows_with([1.0, 1.0, 1.0, 0.0], [0.0, -0.5, -1.0, 0.0])
    assert _informative_rows(batch, "score").rows["group"].tolist() == [1, 1]
    assert _informative_rows(batch, "answer").rows["group"].tolist() == [1, 1]
    assert _informative_rows(batch, "reward").rows["group"].tolist() == [0, 0]


def test_epochs_become_steps_and_a_run_resumes(tiny, tmp_path):
    small = [word for word in SMALL if not word.startswith("training.steps")]
    warmup = ("optimizer.warmup_steps=0.5", f"runs={tmp_path}")
    words = (*small, "training.epochs=0.1", *warmup)
    config = config_of("sft", tiny, *words)
    result = train(config, Reporter())
    assert result.step == 2  # 0.1 * 96 problems // 4
    lines = metrics_of(result.folder)
    assert lines[0]["lr"] == pytest.approx(config.optimizer.lr / 2), "half of 2 steps warm up"
    assert train(config_of("sft", tiny, *words), Reporter()).step == 2
    assert metrics_of(result.folder) == lines
