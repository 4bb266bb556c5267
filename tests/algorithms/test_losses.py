"""Properties of losses and aggregation: splits, masks, extremes, gradients, declarations."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

from postgrad.algorithms.aggregation import AGGREGATIONS, token_weights
from postgrad.algorithms.covariance import cov_selection
from postgrad.algorithms.losses import LOSSES

from .batches import Ragged, examples, ragged
from .helpers import F64, column, exactly, gradient, row_index, trues

SETTINGS = {"dro": {"beta": 0.3}}
SMOOTH = ("ppo_clip", "policy_gradient", "sapo", "geo_mean", "kl_cov", "clip_cov", "dro")


def columns_of(b: Ragged, old=None, advantages=None) -> dict:
    """Everything a loss may read but the current log-probs, computed once over the whole batch."""
    old = b.logprobs(1) if old is None else old
    advantages = b.noise(2) if advantages is None else advantages
    return {
        "old_logprobs": old,
        "advantages": advantages,
        "mask": b.mask,
        "rows": b.rows,
        "num_rows": b.num_rows,
        "cov_selected": cov_selection(old, advantages, b.mask, share=0.3),
    }


def values_of(name: str, logprobs, columns: dict):
    spec = LOSSES[name]
    read = {key: columns[key] for key in spec.reads if key != "logprobs"}
    return spec.function(logprobs=logprobs, **read, **SETTINGS.get(name, {}))


def near(actual, expected, atol=1e-9):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=F64), rtol=1e-9, atol=atol)


@pytest.mark.parametrize("name", LOSSES)
@examples
@given(ragged(max_rows=6), st.sampled_from(AGGREGATIONS), st.randoms(use_true_random=False))
def test_micro_batches_and_row_order_do_not_change_the_gradient(name, b, mode, rng):
    """Any split of shuffled rows into micro-batches adds up to the batch's loss and gradient."""
    columns = columns_of(b)
    weights = token_weights(mode, b.mask, b.rows, b.num_rows, 7.0, dtype=F64)
    logprobs = b.logprobs().requires_grad_()
    whole = (values_of(name, logprobs, columns).values * weights).sum()
    (expected,) = (
        torch.autograd.grad(whole, logprobs, materialize_grads=True)
        if b.num_rows
        else (torch.zeros_like(logprobs),)
    )

    order = list(range(b.num_rows))
    rng.shuffle(order)
    total, grad = 0.0, torch.zeros_like(expected)
    while order:
        size = rng.randint(1, len(order))
        picked, order = order[:size], order[size:]
        part, where = b.reordered(picked), b.order_of_tokens(picked)
        inputs = {
            key: value[where]
            for key, value in columns.items()
            if key in ("old_logprobs", "advantages", "cov_selected")
        }
        inputs |= {"mask": part.mask, "rows": part.rows, "num_rows": part.num_rows}
        leaf = logprobs.detach()[where].requires_grad_()
        loss = (values_of(name, leaf, inputs).values * weights[where]).sum()
        grad[where] = torch.autograd.grad(loss, leaf, materialize_grads=True)[0]
        total += float(loss.detach())
    near(torch.tensor(total, dtype=F64), whole.detach())
    near(grad, expected)


@pytest.mark.parametrize("name", LOSSES)
@examples
@given(ragged(max_rows=5))
def test_masked_tokens_contribute_nothing(name, b):
    """Masked tokens change neither loss nor gradient of the others, and have gradient 0."""
    columns = columns_of(b)
    weights = token_weights("seq-mean-token-mean", b.mask, b.rows, b.num_rows, dtype=F64)

    def step(logprobs, columns):
        x = logprobs.clone().requires_grad_()
        loss = (values_of(name, x, columns).values * weights).sum()
        return loss.detach(), torch.autograd.grad(loss, x, materialize_grads=True)[0]

    loss, grad = step(b.logprobs(), columns)
    other = columns | {
        key: torch.where(b.mask, columns[key], columns[key] * 3 - 5)
        for key in ("old_logprobs", "advantages")
    }
    loss_other, grad_other = step(torch.where(b.mask, b.logprobs(), -40.0), other)
    exactly(grad[~b.mask], torch.zeros(int((~b.mask).sum())))
    near(loss_other, loss)
    near(grad_other, grad)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_give_no_nan(name, dtype):
    levels = torch.tensor([0.0, -1e-7, -1.0, -50.0, -700.0, -1e4], dtype=dtype)
    new, old, advantages = (
        t.flatten()
        for t in torch.meshgrid(
            levels, levels, torch.tensor([-1e3, 0.0, 1e3], dtype=dtype), indexing="ij"
        )
    )
    for rows in (torch.arange(len(new)), torch.arange(len(new)) // 6):
        columns = {
            "old_logprobs": old,
            "advantages": advantages,
            "mask": trues(len(new)),
            "rows": rows,
            "num_rows": int(rows.max()) + 1,
            "cov_selected": cov_selection(old, advantages, trues(len(new)), share=0.1),
        }
        x = new.clone().requires_grad_()
        loss = values_of(name, x, columns)
        (grad,) = torch.autograd.grad(loss.values.sum(), x)
        assert torch.isfinite(loss.values).all() and torch.isfinite(grad).all()
        assert loss.values.dtype == dtype
        for metric, value in loss.metrics.items():
            assert (
                value.shape == new.shape and torch.isfinite(value).all() and not value.requires_grad
            ), metric


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_agree_with_finite_differences(name):
    b = Ragged([3, 4, 1], trues(8), torch.tensor([0, 0, 1]), column(1, 0, 1), seed=11)
    columns = columns_of(b)
    columns["mask"] = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1]).bool()
    assert torch.autograd.gradcheck(
        lambda x: values_of(name, x, columns).values, b.logprobs().requires_grad_()
    )


@pytest.mark.parametrize("name", LOSSES)
def test_loss_declares_its_columns_and_options(name):
    loss = LOSSES[name]
    parameters = inspect.signature(loss.function).parameters.values()
    options = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert loss.reads == tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
    assert set(loss.options) == {p.name for p in options}
    assert loss.required == tuple(p.name for p in options if p.default is inspect.Parameter.empty)
    assert loss.aggregation is None or loss.aggregation in AGGREGATIONS


@pytest.mark.parametrize("name", LOSSES)
def test_only_losses_that_need_all_rows_act_without_advantage(name):
    """The gradient on a row whose advantages are all zero, after the policy has moved."""
    columns = {
        "old_logprobs": column(-1, -2),
        "advantages": column(0, 0),
        "mask": trues(2),
        "rows": row_index(2),
        "num_rows": 1,
        "cov_selected": trues(2),
    }
    grad = gradient(lambda x: values_of(name, x, columns).values.sum(), column(-1.5, -1.2))
    assert bool((grad != 0).any()) == LOSSES[name].needs_all_rows


@examples
@given(ragged(), st.floats(0.0, 1.0))
def test_selection_takes_the_right_number_and_no_masked_token(b, share):
    logprobs, advantages = b.logprobs(), b.noise(2)
    top = cov_selection(logprobs, advantages, b.mask, share=share)
    wanted = max(1, int(share * int(b.mask.sum())))
    assert int(top.sum()) == min(wanted, int(b.mask.sum()))
    assert not (top & ~b.mask).any()
    uniforms = b.noise(5)
    picked = cov_selection(
        logprobs, advantages, b.mask, share=share, band=(-10.0, 10.0), uniforms=uniforms
    )
    assert int(picked.sum()) == min(wanted, int(b.mask.sum()))
    assert torch.equal(
        picked,
        cov_selection(
            logprobs, advantages, b.mask, share=share, band=(-10.0, 10.0), uniforms=uniforms
        ),
    )
    if picked.any() and (b.mask & ~picked).any():
        assert uniforms[picked].max() <= uniforms[b.mask & ~picked].min()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_weights_stay_on_the_device_of_their_columns(name):
    """The meta device refuses to mix with tensors of another device, as a GPU would."""
    data = torch.zeros(5, device="meta")
    mask, rows = data.bool(), data.long()
    columns = {
        "old_logprobs": data,
        "advantages": data,
        "mask": mask,
        "rows": rows,
        "num_rows": 2,
        "cov_selected": mask,
    }
    loss = values_of(name, data, columns)
    for mode in AGGREGATIONS:
        assert (loss.values * token_weights(mode, mask, rows, 2, 3.0)).sum().device.type == "meta"
    assert all(metric.device.type == "meta" for metric in loss.metrics.values())


def test_refusals():
    with refused("unknown_name", "mode"):
        token_weights("token_mean", trues(1), row_index(1), 1)
    for length in (None, 0, -1.0, float("nan")):
        with refused("missing", "length"):
            token_weights("seq-mean-token-sum-norm", trues(1), row_index(1), 1, length)
    with pytest.raises(ValueError, match="uniforms"):
        cov_selection(column(0), column(0), trues(1), band=(1.0, 5.0))
