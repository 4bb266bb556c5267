"""One optimizer step's gradient does not depend on token budget, layout or row order.

It equals a slow row-by-row reference. The model computes in float64, so the only rounding left is
that of the float32 gradient accumulation.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import config_of, random_batch, rows_of, stock_model, stock_row

from postgrad.algorithms.aggregation import AGGREGATIONS
from postgrad.methods import find_method
from postgrad.model.load.load import load
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes import layout
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL
from postgrad.types import Batch

METHODS = ("grpo", "sft")
LENGTH = 11  # rollout.max_response_tokens, the constant of seq-mean-token-sum-norm
STATE: dict = {}


def policy_of(folder, method: str) -> LocalPolicy:
    """Return one float64 policy per method, shared by all examples."""
    if method not in STATE:
        config = config_of(
            method, folder, f"rollout.max_response_tokens={LENGTH}", "rollout.temperature=0.9"
        )
        loaded = load(config.model, torch.device("cpu"))
        loaded.model.double()
        STATE[method] = LocalPolicy(config, loaded, find_method(method)(config).objective)
    return STATE[method]


def gradient(
    policy: LocalPolicy,
    batch: Batch,
    aggregation: str,
    budget: int = 8192,
    width: int | None = None,
) -> torch.Tensor:
    """Return all gradients of one optimizer step, flattened.

    Passes are packed; with a `width` they are padded, and prompts are shared as for that width.
    """
    policy.config.training.token_budget = budget
    policy.config.method.aggregation = aggregation
    prepared = policy.objective.prepare(batch.select(range(len(batch))))
    with pytest.MonkeyPatch.context() as patch:
        if width is not None:
            patch.setattr(
                policy,
                "micro_batches",
                lambda rows, row_groups: layout.make_padded_micro_batches(
                    rows, budget, width, row_groups
                ),
            )
        policy.accumulate(prepared, FULL, MetricAccumulator())
    return collect_gradients(policy)


def collect_gradients(policy: LocalPolicy) -> torch.Tensor:
    """Return all accumulated gradients, flattened, and clear them."""
    gradients = []
    for master in policy.optimizer.masters.values():
        gradient = torch.zeros_like(master) if master.grad is None else master.grad
        gradients.append(gradient.flatten())
    policy.optimizer.adam.zero_grad(set_to_none=True)
    return torch.cat(gradients)


def weights_by_hand(aggregation: str, batch: Batch) -> torch.Tensor:
    """Return the loss weight of every token by the definitions of the aggregations."""
    masks = [
        mask.tolist() for mask in batch.tokens["loss_mask"].split(batch.response.lengths.tolist())
    ]
    total = sum(map(sum, masks))
    rows = sum(any(mask) for mask in masks)
    if aggregation == "prompt-mean-token-mean":
        return weights_by_prompt(masks, batch.rows["group"].tolist())
    weight = {
        "token-mean": lambda count: 1 / max(1, total),
        "token-sum": lambda count: 1.0,
        "seq-mean-token-sum": lambda count: 1 / max(1, rows),
        "seq-mean-token-mean": lambda count: 1 / (max(1, rows) * max(1, count)),
        "seq-mean-token-sum-norm": lambda count: 1 / (max(1, rows) * LENGTH),
    }[aggregation]
    weights = [is_trained * weight(sum(mask)) for mask in masks for is_trained in mask]
    return torch.tensor(weights, dtype=torch.float64)


def weights_by_prompt(masks: list[list[bool]], groups: list[int]) -> torch.Tensor:
    """Return the weights that give each prompt with a trained token the same sum."""
    totals = dict.fromkeys(groups, 0)
    for group, mask in zip(groups, masks, strict=True):
        totals[group] += sum(mask)
    prompts = sum(total > 0 for total in totals.values())
    weights = [
        is_trained / (max(1, totals[group]) * max(1, prompts))
        for group, mask in zip(groups, masks, strict=True)
        for is_trained in mask
    ]
    return torch.tensor(weights, dtype=torch.float64)


def reference(
    folder, method: str, names: list[str], batch: Batch, aggregation: str
) -> torch.Tensor:
    """Return the gradients row by row through the stock model in float64."""
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
    difference = float((one.double() - two.double()).abs().max())
    largest = float(two.abs().max())
    assert difference <= 1e-6 * largest, f"they differ by {difference:.3g} of {largest:.3g}"


@pytest.mark.parametrize(
    "aggregation",
    [AGGREGATIONS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in AGGREGATIONS[1:])],
)
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


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_budget_order_and_layout_do_not_change_the_gradient(tiny, method, data):
    policy = policy_of(tiny, method)
    batch = random_batch(data.draw(st.integers(0, 10**6), "batch"), groups=4, samples=4)
    aggregation = data.draw(st.sampled_from(AGGREGATIONS), "aggregation")
    order = data.draw(st.permutations(range(len(batch))), "order")
    budget = data.draw(st.sampled_from([1, 8, 13, 30, 64, 8192]), "budget")
    # None: packed. Padded: a width of 1 never shares a prompt, one of 10**6 always does.
    width = data.draw(st.sampled_from([None, 1, 32, 10**6]), "width")
    one = gradient(policy, batch, aggregation)
    two = gradient(policy, batch.select(order), aggregation, budget, width)
    assert_same(two, one)


def test_the_examples_above_have_different_layouts(tiny):
    batch = random_batch(101, groups=4, samples=4)
    shapes = {
        tuple(tuple(m.ids.shape) for m in layout.make_padded_micro_batches(batch, budget, width))
        for budget in (1, 13, 8192)
        for width in (1, 10**6)
    }
    assert len(shapes) >= 4


def test_gradients_of_parts_add_up_to_that_of_the_batch(tiny):
    """Ranks and accumulation rely on it: the parts carry the global loss weights."""
    policy = policy_of(tiny, "sft")
    batch = random_batch(7, groups=5)
    expected = gradient(policy, batch, "seq-mean-token-mean")
    prepared = policy.objective.prepare(batch)
    for row in range(len(prepared)):
        policy.accumulate(prepared.select([row]), FULL, MetricAccumulator())
    assert_same(collect_gradients(policy), expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_metrics_are_means_over_tokens_whatever_the_budget(tiny, method):
    policy = policy_of(tiny, method)
    batch = random_batch(9, groups=5)
    results = []
    for budget in (1, 40, 8192):
        policy.config.training.token_budget = budget
        policy.config.method.aggregation = "token-mean"
        metrics = MetricAccumulator()
        policy.accumulate(policy.objective.prepare(batch.select(range(len(batch)))), FULL, metrics)
        policy.optimizer.adam.zero_grad(set_to_none=True)
        results.append(metrics.result())
    for other in results[1:]:
        assert results[0].keys() == other.keys()
        for name, value in results[0].items():
            assert other[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_rows_without_an_advantage_count_in_the_denominator(tiny):
    """GRPO does not compute them, but dropping them from the batch would change the mean."""
    policy = policy_of(tiny, "grpo")
    batch = random_batch(12, groups=4, samples=4)
    has_no_advantage = batch.sum_tokens(batch.tokens["advantages"].abs()) == 0
    assert bool(has_no_advantage.any())
    assert len(policy.objective.prepare(batch.select(range(len(batch))))) < len(batch)
    names = list(policy.optimizer.masters)
    expected = reference(tiny, "grpo", names, batch, "token-mean")
    assert_same(gradient(policy, batch, "token-mean"), expected)
