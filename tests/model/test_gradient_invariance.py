"""THE property: one optimizer step's gradient does not depend on budget, bundling or order, and equals a slow row-by-row reference.

The model computes in float64, so that what is left is the float32 in which gradients accumulate.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import config_of, random_batch, rows_of, stock_model, stock_row

from postgrad.algorithms.aggregation import AGGREGATIONS
from postgrad.methods import find_method
from postgrad.model.load import load
from postgrad.model.passes import layout
from postgrad.model.policy import LocalPolicy, MetricAccumulator
from postgrad.model.views import FULL
from postgrad.types import Batch

METHODS = ("grpo", "sft")
LENGTH = 11  # rollout.max_response_tokens, the constant of seq-mean-token-sum-norm
STATE: dict = {}


def policy_of(folder, method: str) -> LocalPolicy:
    """One float64 policy a method, for all examples."""
    if method not in STATE:
        config = config_of(
            method, folder, f"rollout.max_response_tokens={LENGTH}", "rollout.temperature=0.9"
        )
        loaded = load(config.model, torch.device("cpu"))
        loaded.model.double()
        STATE[method] = LocalPolicy(config, loaded, find_method(method)(config))
    return STATE[method]


def gradient(
    policy: LocalPolicy,
    batch: Batch,
    aggregation: str,
    budget: int = 8192,
    width: int | None = None,
) -> torch.Tensor:
    """All gradients of one optimizer step, flat."""
    policy.config.training.token_budget = budget
    policy.config.method.aggregation = aggregation
    own = policy.width
    policy.width = width or own
    try:
        policy.accumulate(
            policy.objective.prepare(batch.select(range(len(batch)))), FULL, MetricAccumulator()
        )
    finally:
        policy.width = own
    masters = policy.optimizer.masters
    flat = torch.cat(
        [(torch.zeros_like(m) if m.grad is None else m.grad).flatten() for m in masters.values()]
    )
    policy.optimizer.adam.zero_grad(set_to_none=True)
    return flat


def weights_by_hand(aggregation: str, batch: Batch) -> torch.Tensor:
    """The weight of every token, from the modes' definitions, in plain Python."""
    masks = [
        mask.tolist() for mask in batch.tokens["loss_mask"].split(batch.response.lengths.tolist())
    ]
    total, rows = sum(map(sum, masks)), sum(any(mask) for mask in masks)
    share = {
        "token-mean": lambda count: 1 / max(1, total),
        "token-sum": lambda count: 1.0,
        "seq-mean-token-sum": lambda count: 1 / max(1, rows),
        "seq-mean-token-mean": lambda count: 1 / (max(1, rows) * max(1, count)),
        "seq-mean-token-sum-norm": lambda count: 1 / (max(1, rows) * LENGTH),
    }[aggregation]
    return torch.tensor(
        [seen * share(sum(mask)) for mask in masks for seen in mask], dtype=torch.float64
    )


def reference(
    folder, method: str, names: list[str], batch: Batch, aggregation: str
) -> torch.Tensor:
    """Row by row through the stock model in float64, with the losses written out."""
    if "stock" not in STATE:
        STATE["stock"] = stock_model(folder)
    model = STATE["stock"]
    logprobs = torch.cat(
        [stock_row(model, prompt, response, 0.9)[0] for prompt, response in rows_of(batch)]
    )
    if method == "sft":
        losses = -logprobs
    else:
        advantages = batch.tokens["advantages"].double()
        ratio = (logprobs - batch.tokens["old_logprobs"].double()).exp()
        losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        losses = torch.where(advantages < 0, torch.minimum(losses, -3.0 * advantages), losses)
    total = (losses * weights_by_hand(aggregation, batch)).sum()
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(total, [named[name] for name in names], allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(named[n]) if g is None else g).flatten()
            for n, g in zip(names, gradients, strict=True)
        ]
    )


def assert_same(one: torch.Tensor, two: torch.Tensor) -> None:
    gap, scale = float((one.double() - two.double()).abs().max()), float(two.abs().max())
    assert gap <= 1e-6 * scale, f"gradients differ by {gap:.3g}, their largest entry is {scale:.3g}"


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_equals_the_row_by_row_reference(tiny, method, aggregation):
    policy = policy_of(tiny, method)
    for seed in (101, 102):
        batch = random_batch(seed, groups=4, samples=4)
        ours = gradient(policy, batch, aggregation)
        assert float(ours.abs().max()) > 0
        assert_same(
            ours, reference(tiny, method, list(policy.optimizer.masters), batch, aggregation)
        )


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_budget_order_and_bundling_do_not_change_the_gradient(tiny, method, data):
    policy = policy_of(tiny, method)
    batch = random_batch(data.draw(st.integers(0, 10**6), "batch"), groups=4, samples=4)
    aggregation = data.draw(st.sampled_from(AGGREGATIONS), "aggregation")
    order = data.draw(st.permutations(range(len(batch))), "order")
    budget = data.draw(st.sampled_from([1, 8, 13, 30, 64, 8192]), "budget")
    width = data.draw(st.sampled_from([1, 32, 10**6]), "width: from never share a prompt to always")
    one = gradient(policy, batch, aggregation)
    two = gradient(policy, batch.select(order), aggregation, budget, width)
    assert_same(two, one)


def test_the_examples_really_differ_in_their_layout(tiny):
    """The property would be empty if all settings gave one layout."""
    batch = random_batch(101, groups=4, samples=4)
    shapes = {
        tuple(tuple(m.ids.shape) for m in layout.make_padded_micro_batches(batch, budget, width))
        for budget in (1, 13, 8192)
        for width in (1, 10**6)
    }
    assert len(shapes) >= 4


def test_rows_of_one_update_may_be_computed_in_any_number_of_calls(tiny):
    """Ranks and accumulation: parts that carry the global weights add up to the whole."""
    policy = policy_of(tiny, "sft")
    batch = random_batch(7, groups=5)
    whole = gradient(policy, batch, "seq-mean-token-mean")
    prepared = policy.objective.prepare(batch)
    for row in range(len(prepared)):
        policy.accumulate(prepared.select([row]), FULL, MetricAccumulator())
    masters = policy.optimizer.masters
    parts = torch.cat([m.grad.flatten() for m in masters.values()])
    policy.optimizer.adam.zero_grad(set_to_none=True)
    assert_same(parts, whole)


@pytest.mark.parametrize("method", METHODS)
def test_metrics_are_means_over_tokens_whatever_the_budget(tiny, method):
    policy = policy_of(tiny, method)
    batch = random_batch(9, groups=5)
    results = []
    for budget in (1, 40, 8192):
        policy.config.training.token_budget, policy.config.method.aggregation = budget, "token-mean"
        metrics = MetricAccumulator()
        policy.accumulate(policy.objective.prepare(batch.select(range(len(batch)))), FULL, metrics)
        policy.optimizer.adam.zero_grad(set_to_none=True)
        results.append(metrics.result())
    for other in results[1:]:
        assert results[0].keys() == other.keys()
        for name, value in results[0].items():
            assert other[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_rows_without_an_advantage_count_in_the_denominator(tiny):
    """GRPO does not compute them, but leaving them out of the batch would change the mean."""
    policy = policy_of(tiny, "grpo")
    batch = random_batch(12, groups=4, samples=4)
    silent = batch.sum_tokens(batch.tokens["advantages"].abs()) == 0
    assert bool(silent.any()) and len(
        policy.objective.prepare(batch.select(range(len(batch))))
    ) < len(batch)
    assert_same(
        gradient(policy, batch, "token-mean"),
        reference(tiny, "grpo", list(policy.optimizer.masters), batch, "token-mean"),
    )
