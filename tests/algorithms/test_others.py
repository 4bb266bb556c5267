"""Properties of KL, correction, critic, entropy, preferences, shaping, masks and pass@k."""

import ast
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

import postgrad.algorithms
from postgrad.algorithms.correction import (
    LEVELS,
    RULES,
    importance_weights,
    mismatch_metrics,
    ratio_bounds,
    reject,
)
from postgrad.algorithms.entropy import entropy, selective_log_softmax, sum_probs_squared
from postgrad.algorithms.kl import (
    KL_ESTIMATORS,
    adapt_kl_coef,
    kl_in_reward,
    kl_penalty,
    mean_kl,
)
from postgrad.algorithms.masked import masked_mean, masked_normalize, row_mean, row_sum
from postgrad.algorithms.passk import pass_at_k
from postgrad.algorithms.preference import dpo, kto
from postgrad.algorithms.shaping import (
    SHAPES,
    off_policy_shape,
    on_policy_reshape,
    overlong_penalty,
)
from postgrad.errors import ConfigError

from .batches import examples, ragged
from .helpers import F64, column, exactly, gradient, row_index, trues


def near(actual, expected, atol=1e-9):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=F64), rtol=1e-9, atol=atol)


# KL


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_extremes_and_reference_gradient(name):
    levels = torch.tensor([0.0, -1.0, -50.0, -1e4])
    new, ref = (
        t.flatten().clone().requires_grad_() for t in torch.meshgrid(levels, levels, indexing="ij")
    )
    values = kl_penalty(new, ref, name)
    (grad,) = torch.autograd.grad(values.sum(), new)
    assert torch.isfinite(values).all() and torch.isfinite(grad).all()
    assert torch.autograd.grad(kl_penalty(new, ref, name).sum(), ref, allow_unused=True) == (None,)


def test_kl_gradcheck():
    ref = column(-1.0, -0.3, -2.0)
    for name in ("k1", "k2", "k3", "abs"):
        assert torch.autograd.gradcheck(
            lambda x, n=name: kl_penalty(x, ref, n), column(-1.3, -0.9, -1.1).requires_grad_()
        )


@examples
@given(ragged())
def test_kl_in_reward_leaves_masked_tokens_alone(b):
    rewards, kl = kl_in_reward(b.noise(3), b.logprobs(), b.logprobs(1), b.mask, 0.1, estimator="k3")
    exactly(rewards[~b.mask], b.noise(3)[~b.mask])
    near(rewards, b.noise(3) - 0.1 * kl)
    assert torch.isfinite(mean_kl(kl, b.mask, b.rows, b.num_rows))


# rollout correction


@examples
@given(ragged(min_rows=1))
def test_equal_policies_need_no_correction(b):
    logprobs = b.logprobs()
    for level, threshold in itertools.product(LEVELS, (2.0, "0.5_2.0")):
        out = importance_weights(
            logprobs,
            logprobs,
            b.mask,
            b.rows,
            b.num_rows,
            level=level,
            threshold=threshold,
        )
        exactly(out.values, b.mask.double())
        if b.mask.any():
            assert (
                out.metrics["effective_sample_size"] == 1
                and out.metrics["fraction_high"] == 0 == out.metrics["fraction_low"]
            )
    rules = {rule: 1.001 if rule.endswith("k1") else 1e-6 for rule in RULES}
    assert torch.equal(reject(logprobs, logprobs, b.mask, b.rows, b.num_rows, rules).keep, b.mask)
    metrics = mismatch_metrics(logprobs, logprobs, b.mask, b.rows, b.num_rows)
    assert bool(metrics) == bool(b.mask.any())
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "probs_diff_max"):
        assert float(metrics.get(name, torch.zeros(()))) == 0
    if "probs_pearson" in metrics:
        near(metrics["probs_pearson"], 1.0)


@examples
@given(ragged(min_rows=1))
def test_weights_and_rejection_row_by_row(b):
    """Against loops over rows."""
    train, rollout = b.logprobs(), b.logprobs(1)
    ratio = (train - rollout).exp()
    truncated = {
        level: importance_weights(train, rollout, b.mask, b.rows, b.num_rows, level=level).values
        for level in LEVELS
    }
    bounds = {
        "seq_sum_k1": "0.4_3.0",
        "seq_mean_k1": "0.7_1.1",
        "seq_sum_k3": 0.8,
        "seq_mean_k2": 0.4,
        "seq_max_k3": 0.5,
    }
    kept = {
        rule: reject(train, rollout, b.mask, b.rows, b.num_rows, {rule: bound}).keep
        for rule, bound in bounds.items()
    }
    for row in range(b.num_rows):
        mine = (b.rows == row) & b.mask
        r = ratio[mine]
        near(truncated["token"][mine], r.clamp(max=2))
        if len(r) == 0:
            continue
        geometric = r.prod() ** (1 / len(r))
        near(truncated["sequence"][mine], r.prod().clamp(max=2).expand(len(r)))
        near(truncated["geometric"][mine], geometric.clamp(max=2).expand(len(r)))
        k3 = r - 1 - r.log()
        expected = {
            "seq_sum_k1": 0.4 <= r.prod() <= 3,
            "seq_mean_k1": 0.7 <= geometric <= 1.1,
            "seq_sum_k3": k3.sum() <= 0.8,
            "seq_mean_k2": (r.log() ** 2 / 2).mean() <= 0.4,
            "seq_max_k3": k3.max() <= 0.5,
        }
        for rule, passed in expected.items():
            assert (kept[rule][mine] == bool(passed)).all(), rule
    for values in truncated.values():
        exactly(values[~b.mask], torch.zeros(int((~b.mask).sum())))


def test_correction_extremes_are_finite_and_carry_no_gradient():
    levels = torch.tensor([0.0, -1.0, -60.0, -1e4])
    train, rollout = (t.flatten() for t in torch.meshgrid(levels, levels, indexing="ij"))
    rows, mask = row_index(8, 8), trues(16)
    train = train.clone().requires_grad_()
    for level, threshold in itertools.product(LEVELS, (2.0, "0.5_5.0")):
        out = importance_weights(train, rollout, mask, rows, 2, level=level, threshold=threshold)
        assert torch.isfinite(out.values).all() and not out.values.requires_grad
        assert all(torch.isfinite(v) for v in out.metrics.values())
    rejected = reject(train, rollout, mask, rows, 2, dict.fromkeys(RULES, 2.0))
    assert not rejected.keep.any()
    metrics = mismatch_metrics(train, rollout, mask, rows, 2)
    assert all(
        torch.isfinite(metrics[name])
        for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "probs_diff_max")
    )


def test_bounds_mean_what_they_say():
    assert ratio_bounds("0.5_1.2") == (0.5, 1.2)
    assert ratio_bounds(4.0) == (0.25, 4.0) == ratio_bounds("4")
    for bad in ("1.2_0.5", "a_b", "0_2", "_", 0.5, "x", -1.0):
        with refused("wrong_value", "bounds"):
            ratio_bounds(bad)
    # A bound that equals rho is inside.
    for rho in (0.5, 2.0):
        assert reject(
            column(math.log(rho)), column(0), trues(1), row_index(1), 1, {"token_k1": "0.5_2.0"}
        ).keep.all()
    nothing = torch.zeros(0, dtype=F64), torch.zeros(0, dtype=F64), trues(0), row_index(), 0
    assert (
        importance_weights(*nothing).metrics
        == {}
        == mismatch_metrics(*nothing)
        == reject(*nothing, {"token_k2": 1.0}).metrics
    )
    with refused("unknown_name", "level"):
        importance_weights(*nothing, level="sequences")
    with refused("unknown_name", "rule"):
        reject(*nothing, {"token_k": 1.0})
    with refused("wrong_value", "bounds"):
        reject(*nothing, {"token_k2": "0.1_0.2"})


# critic


# logits


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_chunks_never_change_results(chunk):
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 11, dtype=F64) * 4
    index = torch.randint(0, 11, (2, 5))
    expected = torch.log_softmax(logits, -1)
    near(
        selective_log_softmax(logits, index, chunk=chunk),
        expected.gather(-1, index.unsqueeze(-1)).squeeze(-1),
    )
    near(entropy(logits, chunk=chunk), -(expected.exp() * expected).sum(-1))
    near(sum_probs_squared(logits, chunk=chunk), expected.exp().square().sum(-1))
    for function in (
        entropy,
        sum_probs_squared,
        lambda x, chunk: selective_log_softmax(x, index, chunk=chunk),
    ):
        x = logits.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(x, chunk=chunk).sum(), x)
        (whole,) = torch.autograd.grad(function(x, chunk=1000).sum(), x)
        near(grad, whole)


def test_logit_functions_pass_gradcheck():
    logits = torch.randn(
        3, 4, dtype=F64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    index = torch.tensor([0, 3, 1])
    assert torch.autograd.gradcheck(lambda x: entropy(x, chunk=2, temperature=0.7), logits)
    assert torch.autograd.gradcheck(
        lambda x: selective_log_softmax(x, index, chunk=2, temperature=0.7), logits
    )
    assert torch.autograd.gradcheck(lambda x: sum_probs_squared(x, chunk=2), logits)


def test_logits_of_any_dtype_give_float32_and_stay_in_range():
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = (torch.randn(4, 50) * 10).to(dtype)
        for function in (
            entropy,
            sum_probs_squared,
            lambda x: selective_log_softmax(x, torch.zeros(4, dtype=torch.int64)),
        ):
            out = function(logits)
            assert out.dtype == torch.float32 and torch.isfinite(out).all()
        near(entropy(logits).double(), entropy(logits.double()), 1e-5)
        assert (entropy(logits) >= 0).all() and (entropy(logits) <= math.log(50) + 1e-6).all()
    huge = torch.tensor([[1e4, 1e4 - 1, -1e4]])
    near(
        selective_log_softmax(huge, torch.tensor([0])).double(), [-math.log(1 + math.exp(-1))], 1e-6
    )
    assert entropy(torch.zeros(0, 7)).shape == (0,)
    near(entropy(torch.zeros(50, dtype=F64)), math.log(50))
    with pytest.raises(ValueError, match="chunk"):
        entropy(huge, chunk=0)


def test_impossible_tokens_have_no_entropy_and_a_finite_gradient():
    logits = torch.tensor([[0.0, -math.inf, 1.0]] * 3, dtype=F64).requires_grad_()
    out = entropy(logits, chunk=2)
    (grad,) = torch.autograd.grad(out.sum(), logits)
    near(out.detach(), entropy(torch.tensor([[0.0, 1.0]] * 3, dtype=F64)))
    assert torch.isfinite(grad).all()


# preferences


def test_dpo_gradients_and_extremes():
    chosen, rejected = (
        column(-1.3, -4.0, -2.2).requires_grad_(),
        column(-2.0, -1.0, -2.0).requires_grad_(),
    )
    for loss in ("sigmoid", "ipo", "hinge"):

        def function(c, r, loss=loss):
            return dpo(c, r, column(-1, -2, -3), column(-2, -2, -2), loss=loss).values

        assert torch.autograd.gradcheck(function, (chosen, rejected))
    far = torch.tensor([-1e4, 0.0], requires_grad=True)
    values = dpo(far, far.detach().flip(0), beta=1.0).values
    (grad,) = torch.autograd.grad(values.sum(), far)
    assert torch.isfinite(values).all() and torch.isfinite(grad).all()
    for bad in (
        {"loss": "sigmoidal"},
        {"beta": 0.0},
        {"target_margin": 0.1, "loss": "hinge"},
    ):
        with pytest.raises(ConfigError):
            dpo(chosen, rejected, **bad)
    with pytest.raises(ValueError, match="give both"):
        dpo(chosen, rejected, chosen)
    with pytest.raises(ValueError, match="no reference"):
        dpo(chosen, rejected, chosen, rejected, loss="odds_ratio")


def test_gradients_of_odds_ratio_and_kto():
    chosen, rejected = (
        column(-1.3, -0.01, -2.2).requires_grad_(),
        column(-2.0, -1.0, -0.4).requires_grad_(),
    )
    assert torch.autograd.gradcheck(
        lambda c, r: dpo(c, r, loss="odds_ratio").values, (chosen, rejected)
    )
    desirable = torch.tensor([True, False, True])
    assert torch.autograd.gradcheck(
        lambda x: kto(x, rejected.detach(), desirable, 0.3).values, (chosen,)
    )
    certain = torch.tensor([0.0, -1e-9, -1e4], requires_grad=True)
    values = dpo(certain, certain.detach().flip(0), loss="odds_ratio").values
    (grad,) = torch.autograd.grad(values.sum(), certain)
    assert torch.isfinite(values).all() and torch.isfinite(grad).all()


# shaping


def test_shapes_gradcheck_and_extremes():
    p, old = column(-0.2, -2.0, -5.0), column(-0.5, -1.0, -5.5)
    wild = torch.tensor([0.0, -1e4, 500.0, 1e4])
    for shape in SHAPES:
        assert torch.autograd.gradcheck(
            lambda x, s=shape: off_policy_shape(x, s, gamma=0.2), p.clone().requires_grad_()
        )
        assert torch.autograd.gradcheck(
            lambda x, s=shape: on_policy_reshape(x, old, s, gamma=0.2), p.clone().requires_grad_()
        )
        x = wild.clone().requires_grad_()
        out = off_policy_shape(x, shape)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.isfinite(out).all() and torch.isfinite(grad).all()
        x = torch.tensor([0.0, -1e4, -3.0]).requires_grad_()
        out = on_policy_reshape(x, torch.tensor([-1e4, 0.0, -2.0]), shape)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.isfinite(out).all() and torch.isfinite(grad).all()
    assert gradient(lambda x: off_policy_shape(x, max_value=0.5).sum(), column(0.0)).item() == 0
    with refused("unknown_name", "shape"):
        off_policy_shape(p, "p_div_p_0.1")
    with refused("wrong_value", "gamma"):
        on_policy_reshape(p, old, "p_div_p", gamma=0.0)


def test_overlong_refuses_an_impossible_buffer():
    for buffer in (0, -3, 21):
        with refused("wrong_value", "buffer"):
            overlong_penalty(torch.tensor([1]), max_length=20, buffer=buffer)


# masks


@examples
@given(ragged())
def test_masked_places_cannot_leak(b):
    poisoned = torch.where(b.mask, b.noise(), torch.nan)
    near(masked_normalize(poisoned, b.mask, normalize_constant=3.0), b.noise()[b.mask].sum() / 3)
    assert masked_mean(poisoned, b.mask).isnan() == (not b.mask.any())
    sums, means = (
        row_sum(poisoned, b.mask, b.rows, b.num_rows),
        row_mean(poisoned, b.mask, b.rows, b.num_rows),
    )
    for row in range(b.num_rows):
        mine = b.noise()[(b.rows == row) & b.mask]
        near(sums[row], mine.sum())
        near(means[row], mine.mean() if len(mine) else 0.0)


# pass@k


@examples
@given(st.integers(1, 7), st.data())
def test_pass_at_k_counts_subsets(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(min(s) < c for s in subsets) / len(subsets))


@pytest.mark.slow
def test_pass_at_k_refuses():
    for arguments in ((4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError):
            pass_at_k(*arguments)
    assert 0 < pass_at_k(100000, 1, 50000) < 1  # big numbers stay exact


def test_unknown_kl_names_are_refused():
    with refused("unknown_name", "estimator"):
        kl_penalty(column(0), column(0), "full")
    with refused("wrong_value", "target"):
        adapt_kl_coef(0.01, 0.1, 100, target=0.0)


# imports


def test_algorithms_import_torch_types_and_errors_only():
    allowed = ("torch", "postgrad.algorithms", "postgrad.errors", "postgrad.types")
    standard = {"collections", "dataclasses", "itertools", "math", "random", "re", "typing"}
    for path in Path(postgrad.algorithms.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.startswith(allowed) or name.split(".")[0] in standard, (
                    f"{path.name} imports {name}"
                )
        assert len(path.read_text().splitlines()) < 400, path.name
