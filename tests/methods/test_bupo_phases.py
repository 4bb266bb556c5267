"""BuPO: what is compared with which policy, and the two phases over a run."""

import math

import pytest
import torch
from bupo_models import bupo, gradients, is_above, run
from tiny_runs import config_of, metrics_without_timing

from postgrad.methods.bupo import Bupo
from postgrad.methods.method import Step
from postgrad.model.port import FULL, after

# ---- the full policy, the reference, the engine


@pytest.mark.slow
def test_old_log_probs_are_the_internal_policys_and_nobody_takes_them_for_the_engines(tiny_untied):
    """Step 1 computes the full policy once; step 2 does not and logs no engine gap."""
    b = bupo(tiny_untied, "method.phase_one_steps=2", "training.updates_per_step=4")
    for number in (1, 2):
        batch = b.until("estimate", number)
        policy = b.host.policy
        inside, full = (policy.logprobs(batch, view)["logprobs"] for view in (after(1), FULL))
        torch.testing.assert_close(batch.tokens["old_logprobs"], inside, rtol=0, atol=0)
        assert float((inside - full).abs().mean()) > 0.5
        assert b.metrics["internal/divergence"] == pytest.approx(
            float((full - inside).mean()), abs=1e-4
        )
        assert b.metrics["full/entropy"] == pytest.approx(-float(full.mean()), abs=1e-4)
        assert b.metrics["phase"] == 1 and b.metrics["blocks_run"] == pytest.approx(1 / 3)
        assert ("kl/engine" in b.metrics) == (number == 1) and b.metrics.get(
            "engine/gap_max", 0.0
        ) < 1e-4
    b.until("publish", 3)
    assert (
        b.metrics["phase"] == 2
        and b.metrics["blocks_run"] == 1.0
        and b.metrics["engine/gap_max"] < 1e-4
    )
    assert "internal/divergence" not in b.metrics and "internal/entropy" not in b.metrics


def test_the_shortcut_of_one_update_logs_the_divergence_beside_the_model(tiny_untied):
    """No old log-probs, no second pass: the update itself measures, on the rows it computes."""
    b = bupo(
        tiny_untied, "training.updates_per_step=1", "method.phase_one_steps=2", "optimizer.lr=1e-12"
    )
    assert "compute_old_logprobs" not in b.stages()
    batch = b.until("publish", 2)
    moving = b.method.objective.prepare(batch.select(range(len(batch))))
    inside = b.host.policy.logprobs(moving, after(1))
    gap = float((moving.tokens["behavior_logprobs"] - inside["logprobs"]).mean())
    assert b.metrics["internal/divergence"] == pytest.approx(gap, abs=1e-4) and abs(gap) > 0.2
    assert (
        b.metrics["internal/entropy"]
        == b.metrics["entropy"]
        == pytest.approx(float(inside["entropy"].mean()), abs=1e-4)
    )
    assert "kl/engine" not in b.metrics and "engine/gap_mean" not in b.metrics


class Apart:
    """An engine that says it has weights of its own."""

    shares_weights = False

    def __init__(self, engine) -> None:
        self.generate = engine.generate

    def publish(self, weights) -> None:
        pass


def test_an_engine_apart_is_corrected_by_the_full_policy(tiny_untied):
    """The engine gives first tokens a third of the full probability: weight 3, truncated to 2."""
    b = bupo(tiny_untied, "method.phase_one_steps=2")
    b.method.ports.engine = Apart(b.host.engine)
    stages = b.stages()
    assert (
        stages.index("measure")
        < stages.index("compute_old_logprobs")
        < stages.index("correct")
        < stages.index("estimate")
    )
    batch = b.until("score", 2)
    full = b.host.policy.logprobs(batch)["logprobs"]
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[batch.response.offsets[:-1]] = True
    batch.tokens["behavior_logprobs"] = full - math.log(3) * first
    step = Step(2, b.problem_queue)
    for stage in (b.method.measure, b.method.compute_old_logprobs, b.method.correct):
        batch = stage(batch, step)
    torch.testing.assert_close(
        batch.tokens["rollout_weights"], torch.where(first, 2.0, 1.0), rtol=1e-4, atol=1e-4
    )
    inside = b.host.policy.logprobs(batch, after(1))["logprobs"]
    torch.testing.assert_close(batch.tokens["old_logprobs"], inside, rtol=0, atol=0)
    assert step.metrics["kl/engine"] == pytest.approx(
        -math.log(3) * float(first.float().mean()), abs=1e-4
    )
    assert step.metrics["internal/divergence"] == pytest.approx(
        float((full - inside).mean()), abs=1e-4
    )


def test_the_reference_is_asked_for_the_same_depth(tiny_untied):
    b = bupo(tiny_untied, "method.kl=loss", "method.kl_coef=0.5", "training.updates_per_step=1")
    batch = b.until("estimate")
    inside = b.host.policy.logprobs(batch, after(1))["logprobs"]
    torch.testing.assert_close(batch.tokens["reference_logprobs"], inside, rtol=0, atol=1e-6)
    b.until("publish")
    assert b.metrics["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    assert all(
        g is None for name, g in gradients(b.host.policy, batch, 1).items() if is_above(name, 1)
    )


# ---- the schedule


@pytest.mark.parametrize(("phase_one", "phases"), [(0, [2, 2, 2]), (1, [1, 2, 2]), (3, [1, 1, 1])])
def test_phases_by_step(tiny_untied, phase_one, phases):
    config = config_of(
        "bupo",
        tiny_untied,
        "method.num_blocks=2",
        f"method.phase_one_steps={phase_one}",
        "training.steps=3",
    )
    method = Bupo(config)
    method.check()
    assert [1 if method.objective.view(step) == after(2) else 2 for step in (1, 2, 3)] == phases


@pytest.mark.slow
def test_no_phase_one_is_grpo_to_the_bit(tiny_untied, verifiers, tmp_path):
    same = ("training.updates_per_step=2", "training.steps=3")
    ours = run(
        "bupo",
        tiny_untied,
        tmp_path / "a",
        verifiers,
        "method.num_blocks=1",
        "method.phase_one_steps=0",
        *same,
    ).folder
    clip = ("method.clip_low=0.2", "method.clip_high=0.2", "method.dual_clip=10")
    theirs = run("grpo", tiny_untied, tmp_path / "b", verifiers, *clip, *same).folder
    for file in ("policy/model.safetensors", "optimizer.safetensors"):
        one, two = (folder / "checkpoints" / "step-3" / file for folder in (ours, theirs))
        assert one.read_bytes() == two.read_bytes(), file
    more = {"phase", "blocks_run", "full/entropy"}
    lines = [metrics_without_timing(folder) for folder in (ours, theirs)]
    assert [{k: v for k, v in line.items() if k not in more} for line in lines[0]] == lines[1]
