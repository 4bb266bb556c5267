"""Extreme numbers: half precision over long rows and groups, confident tokens, huge ratios."""

import math

import pytest
import torch

from postgrad.algorithms.advantages import gpg, grpo, opo, rloo
from postgrad.algorithms.correction import importance_weights, mismatch_metrics
from postgrad.algorithms.distillation import divergence, with_rest
from postgrad.algorithms.kl import kl_penalty
from postgrad.algorithms.losses import dppo_kl, geo_mean, gspo, kl_cov
from postgrad.algorithms.masked import row_mean, row_sum
from postgrad.algorithms.shaping import on_policy_reshape

HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALF)
def test_a_long_row_in_half_precision_is_summed_in_full(dtype):
    values = torch.full((3000,), 0.5, dtype=dtype)
    mask, rows = torch.ones(3000, dtype=torch.bool), torch.zeros(3000, dtype=torch.int64)
    assert row_sum(values, mask, rows, 1).item() == 1500
    assert row_mean(values, mask, rows, 1).item() == 0.5


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("estimate", [grpo, rloo, gpg, lambda r, g: opo(r, g, torch.ones(600))])
def test_a_large_group_in_half_precision_is_the_one_in_float32(dtype, estimate):
    rewards, groups = torch.arange(600) % 2, torch.zeros(600, dtype=torch.int64)
    torch.testing.assert_close(
        estimate(rewards.to(dtype), groups), estimate(rewards.float(), groups)
    )


def test_gspo_gives_all_tokens_of_a_row_one_ratio():
    # exp(1e-4) on every token, whatever the size of its log-prob: the clip range of gspo is 3e-4.
    old = torch.tensor([-0.5, -3.0, -40.0, -0.001])
    loss = gspo(
        old + 1e-4,
        old,
        torch.ones(4),
        torch.ones(4, dtype=torch.bool),
        torch.zeros(4, dtype=torch.int64),
        1,
    )
    assert loss.values.unique().numel() == 1


@pytest.mark.parametrize("name", ["k1", "k3", "abs"])
def test_straight_through_keeps_the_value_to_the_last_digit(name):
    logprobs, reference = torch.tensor([-0.3, -30.0, -9.1]), torch.tensor([-0.31, -0.1, -20.0])
    assert torch.equal(
        kl_penalty(logprobs, reference, name + "+"), kl_penalty(logprobs, reference, name)
    )


def test_dppo_kl_measures_confident_tokens():
    # KL = p log(p/q) + (1-p) log((1-p)/(1-q)) with 1-p = 1e-3 and 1-q = 1e-8 is 0.0105, within
    # 0.05. exp(-1e-8) is 1 in float32.
    loss = dppo_kl(torch.tensor([-1e-8]), torch.tensor([math.log1p(-1e-3)]), torch.ones(1))
    assert loss.metrics["clip_fraction"].item() == 0
    outside = dppo_kl(
        torch.tensor([-1e-8]), torch.tensor([math.log1p(-5e-3)]), torch.ones(1), clip_high=0.06
    )
    assert outside.metrics["clip_fraction"].item() == 1  # 5e-3 · log(5e5) - 5e-3 = 0.0606


def test_kl_cov_pulls_from_any_distance():
    logprobs = torch.tensor([-50.0], requires_grad=True)
    loss = kl_cov(
        logprobs,
        torch.tensor([-1.0]),
        torch.ones(1),
        torch.ones(1, dtype=torch.bool),
        coefficient=0.1,
    ).values
    loss.sum().backward()
    assert loss.item() == pytest.approx(4.9)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-0.1)


def test_geo_mean_takes_ratios_below_the_clamp_as_they_are():
    # A > 0 bounds d above only: exp(mean(-30, 0.1)) = exp(-14.95)
    logprobs = torch.tensor([-31.0, -0.9], dtype=torch.float64, requires_grad=True)
    old, mask, rows = (
        torch.tensor([-1.0, -1.0], dtype=torch.float64),
        torch.ones(2, dtype=torch.bool),
        torch.zeros(2).long(),
    )
    values = geo_mean(logprobs, old, torch.ones(2, dtype=torch.float64), mask, rows, 1).values
    assert values[0].item() == pytest.approx(-math.exp(-14.95))
    values[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(-14.95) / 2] * 2)
    # A < 0 leaves d open above: nothing overflows
    assert (
        geo_mean(torch.zeros(1), torch.tensor([-200.0]), -torch.ones(1), mask[:1], rows[:1], 1)
        .values.isfinite()
        .all()
    )


def test_the_ratio_of_a_sequence_is_the_product_of_its_tokens():
    # 30 and -29.5 cancel: exp(0.5). Clamped one by one they would give exp(0).
    train, rollout = torch.tensor([-1.0, -30.5]), torch.tensor([-31.0, -1.0])
    place = (torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1)
    weights = importance_weights(train, rollout, *place, level="sequence", threshold=5.0).values
    torch.testing.assert_close(weights, torch.full((2,), math.exp(0.5)))
    assert mismatch_metrics(train, rollout, *place)["chi2_seq"].item() == pytest.approx(
        math.e - 1, rel=1e-5
    )


def test_a_reshaped_ratio_never_slopes_backwards():
    logprobs = torch.tensor([-1.0, -0.5], requires_grad=True)
    value = on_policy_reshape(logprobs, torch.tensor([-100.0, -1.0]), "p_div_p")
    value.sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad >= 0).all()
    p, q = math.exp(-0.5), math.exp(-1.0)
    assert value[1].item() == pytest.approx(p / (p + 0.1) / (q / (q + 0.1)))


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_a_token_that_the_teacher_excludes_gives_a_finite_divergence(kind):
    student = torch.tensor([[-0.5, -1.5]], requires_grad=True)
    teacher = torch.tensor([[-0.1, -math.inf]])
    value = divergence(with_rest(student), with_rest(teacher), kind)
    value.sum().backward()
    assert value.isfinite().all() and student.grad is not None and student.grad.isfinite().all()
    p = torch.tensor([-0.5, -1.5, math.log(1 - math.exp(-0.5) - math.exp(-1.5))]).exp()
    q = torch.tensor([math.exp(-0.1), 0.0, 1 - math.exp(-0.1)])
    if kind == "forward":  # the excluded token has no term
        assert value.item() == pytest.approx(float((q * (q / p).log())[[0, 2]].sum()), rel=1e-4)
    if kind == "jsd":
        mixture = (p + q) / 2
        own = (p * (p / mixture).log()).sum()
        other = (q * (q / mixture).log())[[0, 2]].sum()
        assert value.item() == pytest.approx(float(own + other) / 2, rel=1e-4)
