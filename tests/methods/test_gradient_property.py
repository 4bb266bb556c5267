"""Any recipe, any split into micro-batches and any order of rows give the same gradient.

The models compute in float64, so that what is left is the float32 in which gradients accumulate.
"""

import copy
import random
from pathlib import Path

import pytest
import torch
from core_recipes import recipe_params
from method_runs import LIMIT, PAIR_RECIPES, RECIPES, SMALL, overrides_for
from tiny_runs import END, NUM_TOKENS, config_of, random_batch

from postgrad.algorithms.aggregation import AGGREGATIONS
from postgrad.algorithms.kl import KL_ESTIMATORS
from postgrad.cluster.host import POLICY_CLASSES
from postgrad.methods import find_method
from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.model.load.load import load
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes.layout import make_padded_micro_batches
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL
from postgrad.model.scored import LocalCritic
from postgrad.types import DEMONSTRATION, Batch, Trajectory
from postgrad.user_code import import_named

BUDGETS = (1, 40, 10_000)  # every row alone, a few together, all at once


def policy_of(recipe: str, folder, loaded, *overrides: str) -> LocalPolicy:
    config = config_of(recipe, folder, *SMALL, *overrides_for(recipe), *overrides)
    method = find_method(config.method.name)(config)
    if method.traits.samples:
        config.rollout.temperature = 0.9
    method.check()
    policy_class = import_named(POLICY_CLASSES[method.traits.scores])
    return policy_class(config, copy.deepcopy(loaded), method.objective)


def batch_with_all_columns(seed: int = 101) -> Batch:
    """Ragged, masked, some advantages zero, and every column that some loss reads, at random."""
    batch = random_batch(seed, groups=5, samples=4)
    generator = torch.Generator().manual_seed(seed)

    def column(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(batch.num_tokens, generator=generator)

    more = {
        "behavior_logprobs": column(-3.2, -2.6),
        "reference_logprobs": column(-3.5, -2.3),
        "rollout_weights": column(0.3, 2.0),
        "uniforms": column(0, 1),
        "values": column(-1, 1),
        "returns": column(-1, 1),
    }
    batch.tokens.update(more)
    batch.tokens["teacher_top_ids"] = torch.randint(
        0, NUM_TOKENS, (batch.num_tokens, 3), generator=generator
    )
    batch.tokens["teacher_top_logprobs"] = column(-3.0, -2.0)[:, None].repeat(1, 3)
    batch.rows["mixed"] = torch.ones(len(batch), dtype=torch.bool)
    batch.rows["preference"] = preference(batch.rows["group"].tolist())
    batch.rows["desirable"] = (torch.arange(len(batch)) % 2).float()
    batch.rows["kl"] = torch.full((len(batch),), 0.1)
    # Drawn last, so that the columns above keep their numbers. Ties are selected together.
    batch.tokens["entropy"] = (column(0.0, 2.0) > 0.5).float()
    batch.tokens["advantages"] *= 3  # wide enough for clip_cov's band to hold candidates
    return batch


def preference(groups: list[int]) -> torch.Tensor:
    """(rows,) 1 for the first row of a group, -1 for the second, 0 for others and single rows."""
    column = torch.zeros(len(groups))
    for group in set(groups):
        rows = [i for i, other in enumerate(groups) if other == group]
        if len(rows) > 1:
            column[rows[0]], column[rows[1]] = 1.0, -1.0
    return column


def pairs(seed: int = 5, number: int = 6, with_reference: bool = True) -> Batch:
    """Preference pairs of any lengths; half of them have prompts long enough to share."""
    draw = random.Random(seed)
    rows = []
    for group in range(number):
        prompt = [draw.randrange(NUM_TOKENS) for _ in range(draw.choice([1, 9]))]
        for index in (0, 1):
            response = [*(draw.randrange(NUM_TOKENS) for _ in range(draw.randint(0, LIMIT))), END]
            columns = {"reference_logprobs": [draw.uniform(-3.5, -2.3) for _ in response]}
            if not with_reference:
                columns = {}
            rows.append(
                Trajectory(
                    f"p{group}",
                    prompt,
                    response,
                    group,
                    index,
                    DEMONSTRATION,
                    "given",
                    tokens=columns,
                    rows={"margin": 0.1 * group},
                )
            )
    return Batch.of(rows)


def shuffled(batch: Batch, seed: int) -> Batch:
    return batch.select(torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)))


def take_gradient(optimizer) -> torch.Tensor:
    """All gradients, flat; cleared."""
    masters = optimizer.masters.values()
    flat = torch.cat(
        [(torch.zeros_like(m) if m.grad is None else m.grad).flatten() for m in masters]
    ).double()
    optimizer.adam.zero_grad(set_to_none=True)
    return flat


def gradient(policy: LocalPolicy, batch: Batch, budget: int) -> torch.Tensor:
    policy.config.training.token_budget = budget
    policy.accumulate(
        policy.objective.prepare(batch.select(range(len(batch)))), FULL, MetricAccumulator()
    )
    return take_gradient(policy.optimizer)


def assert_one_gradient(compute, batch: Batch) -> None:
    whole = compute(batch, 10_000)
    scale = float(whole.abs().max())
    assert scale > 0 and bool(torch.isfinite(whole).all())
    for budget in BUDGETS:
        for other in (batch, shuffled(batch, budget))[budget != 40 :]:
            gap = float((compute(other, budget) - whole).abs().max())
            assert gap <= 1e-6 * scale, (
                f"budget {budget}: gradients differ by {gap:.3g}, the largest entry is {scale:.3g}"
            )


def test_the_budgets_really_split_differently():
    for batch, row_groups in (
        (batch_with_all_columns(), None),
        (pairs(), pairs().rows["group"].tolist()),
    ):
        counts = [
            len(list(make_padded_micro_batches(batch, budget, 32, row_groups)))
            for budget in BUDGETS
        ]
        assert counts[0] > counts[1] > counts[2] == 1, counts


def one_recipe_per_loss() -> list[str]:
    """Return the first recipe of each objective, loss and aggregation."""
    found: dict[tuple[object, ...], str] = {}
    for recipe in RECIPES:
        config = config_of(recipe, Path("tiny"), *SMALL, *overrides_for(recipe))
        objective = type(find_method(config.method.name)(config).objective)
        settings = vars(config.method)
        key = (objective, settings.get("loss"), settings.get("aggregation"))
        found.setdefault(key, recipe)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipe_params(RECIPES, slow=one_recipe_per_loss()))
def test_any_recipe_any_split_one_gradient(recipe, tiny, loaded):
    policy = policy_of(recipe, tiny, loaded)
    has_reference = recipe not in ("orpo", "simpo")
    reads_pairs = recipe in (*PAIR_RECIPES, "reward_model")
    batch = pairs(with_reference=has_reference) if reads_pairs else batch_with_all_columns()
    assert_one_gradient(lambda rows, budget: gradient(policy, rows, budget), batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["grpo", "rloo", "reinforce_pp_baseline", "gspo", "geo_mean", "dppo_kl"]
)
def test_the_same_without_old_logprobs(recipe, tiny, loaded):
    """The on-policy shortcut: old log-probs are the current ones, micro-batch by micro-batch."""
    policy = policy_of(recipe, tiny, loaded)
    batch = batch_with_all_columns()
    del batch.tokens["old_logprobs"]
    assert_one_gradient(lambda rows, budget: gradient(policy, rows, budget), batch)


EXTRAS = [
    *(
        ("grpo", "method.kl=loss", "method.kl_coef=0.5", f"method.kl_estimator={name}")
        for name in KL_ESTIMATORS
        if name != "k1"  # refused in the loss without the ratio
    ),
    ("grpo", "method.kl=loss", "method.kl_estimator=k1", "method.kl_ratio=true"),
    *(
        (recipe, f"method.aggregation={mode}")
        for recipe in ("gspo", "geo_mean")
        for mode in AGGREGATIONS
    ),
    ("grpo", "method.entropy_coef=0.3"),
    *(("dpo", f"method.loss={loss}") for loss in ("ipo", "hinge")),
    ("dpo", "method.reference_free=true"),
]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", EXTRAS, ids=lambda overrides: " ".join(overrides))
def test_the_same_with_settings_that_no_recipe_has(overrides, tiny, loaded):
    policy = policy_of(overrides[0], tiny, loaded, *overrides[1:])
    assert_one_gradient(
        lambda rows, budget: gradient(policy, rows, budget),
        pairs() if overrides[0] == "dpo" else batch_with_all_columns(),
    )


def test_the_critic_too(tiny):
    config = config_of("ppo", tiny, *SMALL)
    model = load(config.model, torch.device("cpu"))
    model.model.double()
    critic = LocalCritic(config, model, find_method("ppo")(config).objective, lr=1e-3)
    torch.nn.init.normal_(
        critic.head.weight, generator=torch.Generator().manual_seed(0)
    )  # at zero the body would get no gradient
    critic.optimizer.step = lambda lr: 0.0  # leave the gradient where it is
    config.training.updates_per_step = 1

    def compute(batch: Batch, budget: int) -> torch.Tensor:
        config.training.token_budget = budget
        critic.update(batch, 1)
        return take_gradient(critic.optimizer)

    assert_one_gradient(compute, batch_with_all_columns())


def test_the_check_would_notice_weights_of_micro_batches(tiny, loaded, monkeypatch):
    """Were tokens weighed within each micro-batch, as many trainers do, the property would fail."""
    policy = policy_of("grpo", tiny, loaded)
    right = PolicyObjective.loss

    def local_mean(self, batch, current, metrics):
        batch.tokens["loss_weight"] = batch.tokens["loss_mask"] / batch.tokens[
            "loss_mask"
        ].sum().clamp(min=1)
        return right(self, batch, current, metrics)

    monkeypatch.setattr(PolicyObjective, "loss", local_mean)
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_one_gradient(
            lambda rows, budget: gradient(policy, rows, budget), batch_with_all_columns()
        )
