"""What an update's own forward passes saw of the tokens: entropy at the right rows, whatever the method leaves out or reorders."""

import pytest
import torch
from world import config_of, random_batch

from postgrad.methods.grpo import Grpo
from postgrad.model.load import load
from postgrad.model.policy import LocalPolicy
from postgrad.types import Batch


class Backwards(Grpo):
    def prepare(self, batch: Batch) -> Batch:
        batch = super().prepare(batch)
        return batch.select(range(len(batch) - 1, -1, -1))


def policy_of(model, method, *overrides: str) -> LocalPolicy:
    config = config_of("grpo", model, "optimizer.lr=1e-2", *overrides)
    return LocalPolicy(config, load(config.model, torch.device("cpu")), method(config))


@pytest.mark.parametrize("method", [Grpo, Backwards])
@pytest.mark.parametrize("budget", [0, 24])
def test_the_entropy_of_an_update_is_that_of_the_policy_before_it(tiny, method, budget):
    policy, batch = (
        policy_of(tiny, method, f"training.token_budget={budget}"),
        random_batch(5, groups=6),
    )
    assert policy.token_stats() == {}
    before = policy.logprobs(batch)["entropy"]
    policy.update(batch, 1)
    entropy = policy.token_stats()["entropy"]
    moved = batch.expand(
        batch.sum_tokens((batch.tokens["advantages"] * batch.tokens["loss_mask"]).abs()) > 0
    )
    assert bool(moved.any()) and not bool(moved.all()), "the batch has rows of both kinds"
    torch.testing.assert_close(entropy[moved], before[moved], rtol=1e-5, atol=1e-5)
    assert bool(entropy[~moved].isnan().all()), "rows that move nothing were not computed"
    assert "row_number" not in batch.rows and "entropy" not in batch.tokens


def test_rows_of_a_later_optimizer_step_show_the_policy_they_met(tiny):
    policy, batch = (
        policy_of(tiny, Grpo, "training.updates_per_step=2", "method.entropy_coef=0.01"),
        random_batch(5, groups=6),
    )
    before = policy.logprobs(batch)["entropy"]
    policy.update(batch, 1)
    entropy = policy.token_stats()["entropy"]
    early = batch.expand(batch.rows["group"] < 3)
    torch.testing.assert_close(entropy[early], before[early], rtol=1e-5, atol=1e-5)
    assert bool(entropy.isfinite().all()) and not torch.allclose(
        entropy[~early], before[~early], atol=1e-4
    )
