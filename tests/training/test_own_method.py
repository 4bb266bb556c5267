"""A user's method in a file outside the package, with its own stage, columns and setting."""

import pyarrow.parquet as pq
import pytest
import torch
from tiny_runs import metrics_of, overrides_of, stock_model, toy_run

from postgrad.cli.main import main

METHOD = '''
"""Weighs each token's loss by a column that its own stage made."""

from dataclasses import dataclass

import torch

from postgrad.config.schema import setting
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.methods.support.policy_objective import PolicyObjective


@dataclass
class FlavorSettings(GrpoSettings):
    strength: float = setting(1.0, "weight of every token", at_least=0.0)


class FlavorObjective(PolicyObjective):
    def loss(self, batch, current, tally):
        assert len(batch.rows["mood"]) == len(batch)
        tally.mean("flavor/mean", batch.tokens["flavor"])
        weights = batch.tokens["flavor"] * batch.tokens["loss_weight"]
        return -(current.logprobs * batch.tokens["advantages"] * weights).sum()


class Flavor(Grpo):
    Settings = FlavorSettings
    Objective = FlavorObjective

    def __init__(self, config):
        super().__init__(config)
        self.seen = 0

    def logprob_stages(self):
        return [*super().logprob_stages(), self.flavor]

    def flavor(self, batch, step):
        """A token column that the loss reads, and a row column that it does not."""
        self.seen += len(batch)
        batch.tokens["flavor"] = torch.full((batch.num_tokens,), self.settings.strength)
        batch.rows["mood"] = [f"step {step.number}" for _ in range(len(batch))]
        step.metrics["flavor/seen"] = float(self.seen)
        return batch
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    (folder / "my_flavor.py").write_text(METHOD)
    (folder / "judge.py").write_text(
        "def sevens(response, problem):\n"
        "    return float(response.count('7')) + 0.1 * len(response)\n"
    )
    return folder


def run(home, model, monkeypatch, name, *overrides) -> int:
    monkeypatch.chdir(home)
    small = (*toy_run(steps=3, problems=3), "optimizer.weight_decay=0", "optimizer.lr=1e-2")
    more = ("reward.verifier=judge.py:sevens", "training.checkpoint_every=2", "runs=runs")
    own = ("method=my_flavor:Flavor", f"name={name}")
    return main(["train", "grpo", *overrides_of(model, *small, *more, *own, *overrides)])


def weights(home, name, step=3):
    policy = home / "runs" / name / "checkpoints" / f"step-{step}" / "policy"
    return dict(stock_model(policy, torch.float32).named_parameters())


@pytest.fixture(scope="module")
def ran(home, tiny):
    with pytest.MonkeyPatch.context() as patch:
        assert run(home, tiny, patch, "plain", "method.strength=2") == 0
    return home / "runs" / "plain"


def test_stage_runs_in_its_order_and_writes_metrics_and_columns(ran):
    lines = metrics_of(ran)
    assert [line["flavor/seen"] for line in lines] == [12, 24, 36]
    assert all(line["flavor/mean"] == 2.0 for line in lines)
    stages = [key for key in lines[0] if key.startswith("stage/")]
    at = stages.index("stage/flavor_s")
    assert stages[at - 1 : at + 2] == ["stage/score_s", "stage/flavor_s", "stage/estimate_s"]
    for row in pq.read_table(ran / "rollouts" / "step-000002.parquet").to_pylist():
        assert row["flavor"] == [2.0] * len(row["response"]) and row["mood"] == "step 2"


@pytest.mark.slow
def test_loss_reads_the_column(home, ran, tiny, monkeypatch):
    before = dict(stock_model(tiny, torch.float32).named_parameters())
    assert any(not torch.equal(p, before[name]) for name, p in weights(home, "plain").items())
    assert run(home, tiny, monkeypatch, "nothing", "method.strength=0") == 0
    assert all(torch.equal(p, before[name]) for name, p in weights(home, "nothing").items())
