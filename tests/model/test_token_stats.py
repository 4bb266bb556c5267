"""Per-token statistics of an update: entropy at the right rows, whatever rows a method drops."""

import pytest
import torch
from tiny_runs import config_of, random_batch

from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.model.load.load import load
from postgrad.model.policy import LocalPolicy
from postgrad.types import Batch


class ReversedRows(PolicyObjective):
    def prepare(self, batch: Batch) -> Batch:
        batch = super().prepare(batch)
        return batch.select(range(len(batch) - 1, -1, -1))


def make_policy(model, objective, *overrides: str) -> LocalPolicy:
    config = config_of("grpo", model, "optimizer.lr=1e-2", *overrides)
    return LocalPolicy(config, load(config.model, torch.device("cpu")), objective(config))


@pytest.mark.parametrize("objective", [PolicyObjective, ReversedRows])
@pytest.mark.parametrize("budget", [0, 24])
def test_entropy_of_an_update_is_that_of_the_policy_before_it(tiny, objective, budget):
    policy = make_policy(tiny, objective, f"training.token_budget={budget}")
    batch = random_batch(5, groups=6)
    assert policy.token_stats() == {}
    before = policy.logprobs(batch)["entropy"]
    policy.update(batch, 1)
    entropy = policy.token_stats()["entropy"]
    trained = (batch.tokens["advantages"] * batch.tokens["loss_mask"]).abs()
    is_computed = batch.expand(batch.sum_tokens(trained) > 0)
    assert bool(is_computed.any())
    assert not bool(is_computed.all())
    torch.testing.assert_close(entropy[is_computed], before[is_computed], rtol=1e-5, atol=1e-5)
    assert bool(entropy[~is_computed].isnan().all())
    assert "row_number" not in batch.rows
    assert "entropy" not in batch.tokens


def test_rows_of_a_later_optimizer_step_have_the_entropy_of_the_updated_policy(tiny):
    policy = make_policy(
        tiny, PolicyObjective, "training.updates_per_step=2", "method.entropy_coef=0.01"
    )
    batch = random_batch(5, groups=6)
    before = policy.logprobs(batch)["entropy"]
    policy.update(batch, 1)
    entropy = policy.token_stats()["entropy"]
    in_first_step = batch.expand(batch.rows["group"] < 3)
    torch.testing.assert_close(entropy[in_first_step], before[in_first_step], rtol=1e-5, atol=1e-5)
    assert bool(entropy.isfinite().all())
    assert not torch.allclose(entropy[~in_first_step], before[~in_first_step], atol=1e-4)
