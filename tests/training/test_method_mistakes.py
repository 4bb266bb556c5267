"""Mistakes in a user's method: one line that names the method, before the weights change."""

import json
import shutil
from collections import Counter

import numpy
import pyarrow.parquet as pq
import pytest
import torch
from tables import table
from tiny_runs import metrics_of, overrides_of, random_batch, toy_run
from transformers import AutoTokenizer

from postgrad.cli.main import main
from postgrad.errors import RunError
from postgrad.methods.step import Step
from postgrad.training.stages import check_result
from postgrad.types import Batch

HEAD = """
import functools
import random

import numpy
import torch

from postgrad.methods.method import Role
from postgrad.methods.grpo import Grpo
from postgrad.methods.support.policy_objective import PolicyObjective


class Mine(Grpo):
"""
ROLES = """
    def roles(self):
        return {line}
"""


def train_method(home, monkeypatch, model, code: str, *more: str, **values: str) -> int:
    """Train two steps with a method of this code; return the exit code."""
    (home / "mine.py").write_text(HEAD + code.format(**values))
    (home / "reward.py").write_text("def score(response, problem):\n    return len(response)\n")
    monkeypatch.chdir(home)
    own = ("method=mine.py:Mine", "reward.verifier=reward.py:score", "runs=runs")
    settings = (*toy_run(steps=2, response_tokens=3), *own, "training.checkpoint_every=2")
    return main(["train", "grpo", *overrides_of(model, *settings, *more, "name=test")])


def score(batch: Batch, change: str) -> Batch:
    """Run a stage that changes its batch; return the batch after the check."""
    step = Step(1)
    scope = {"batch": batch, "step": step, "numpy": numpy, "torch": torch}
    exec(change, scope)
    check_result(scope["batch"], step, "Mine.score")
    return scope["batch"]


@pytest.fixture
def batch() -> Batch:
    batch = random_batch(0)
    batch.rows["reward"] = torch.arange(len(batch)).float()
    return batch


@pytest.mark.parametrize(
    ("change", "message"),
    table(__file__, "a_column_that_cannot_be_used_is_an_error"),
)
def test_a_column_that_cannot_be_used_is_an_error(change, message, batch):
    with pytest.raises(RunError, match=message):
        score(batch, change)


@pytest.mark.parametrize("method", ["tolist()", "numpy()", "int()", "numpy() > 2"])
def test_rewards_of_other_types_become_floats(method, batch):
    column = score(batch, f"batch.rows['reward'] = batch.rows['reward'].{method}").rows["reward"]
    assert column.dtype == torch.float32 and float(column[3]) in (1.0, 3.0)


MINE = """
    def __init__(self, config):
        Grpo.__init__(self, config)
        self.seen = 0

    def score(self, batch, step):
        batch = super().score(batch, step)
        batch.rows["reward"] = torch.stack([self.scores(one) for one in batch.rows["reward"]])
        batch.tokens["table"] = torch.zeros(batch.num_tokens, 3)
        step.metrics["noise"] = random.random() + numpy.random.rand() + float(torch.rand(()))
        return batch

    def scores(self, reward):
        return reward * 2

    class Objective(PolicyObjective):
        def prepare(self, batch):
            batch.tokens["advantages"] *= 10
            with open("sizes.txt", "a") as file:
                file.write(f"{{float(batch.tokens['advantages'].abs().sum())}}\\n")
            return super().prepare(batch)

        def loss(self, batch, current, metrics):
            return super().loss(batch, current, metrics) * float(torch.rand(()))
"""


def test_what_a_method_may_do(tmp_path, monkeypatch, tiny):
    """A helper named like a stage, a wide column, global random numbers, changes in prepare."""
    seen = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        more = ("training.ppo_epochs=3", "training.updates_per_step=1")
        assert train_method(tmp_path / name, monkeypatch, tiny, MINE, *more) == 0
        lines = [one for one in metrics_of(tmp_path / name / "runs" / "test") if one["step"] > 0]
        seen.append([(line["noise"], line["grad_norm"]) for line in lines])
    assert seen[0] == seen[1] and seen[0][0] != seen[0][1], "they follow from seed and step"
    sizes = [float(text) for text in (tmp_path / "a" / "sizes.txt").read_text().split()]
    assert len(sizes) == 6 and sizes[0] == sizes[1] == sizes[2] > 0, "epochs do not add up"


REFILLED = """
    def scoring_stages(self):
        enrich, score, *others = super().scoring_stages()
        return [enrich, score, self.keep_two, *others]

    def keep_two(self, batch, step):
        keep = [i for i in range(len(batch)) if batch.rows["index"][i] % 4 < 2]
        return batch.select(keep)
"""


def test_refills_run_stages_that_come_after_the_score(tmp_path, monkeypatch, tiny):
    """With few tokens, rewards of many groups are equal, so that there are refills."""
    more = ("method.max_refills=3", "rollout.samples=4", "rollout.max_response_tokens=1")
    assert train_method(tmp_path, monkeypatch, tiny, REFILLED, *more) == 0
    lines = [one for one in metrics_of(tmp_path / "runs" / "test") if one["step"] > 0]
    assert max(line["refill/times"] for line in lines) > 0
    for file in (tmp_path / "runs" / "test" / "rollouts").glob("*.parquet"):
        groups = pq.read_table(file)["group"].to_pylist()
        assert set(Counter(groups).values()) == {2}, file


def test_a_frozen_model_needs_the_policys_tokens(tmp_path, monkeypatch, tiny, capsys):
    """It may have further ones."""
    line = '{"teacher": Role("frozen", "other")}'
    shutil.copytree(tiny, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path / "other")
    assert train_method(tmp_path, monkeypatch, tiny, ROLES, line=line) == 0
    file = tmp_path / "other" / "tokenizer.json"
    stored = json.loads(file.read_text())
    vocab = stored["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    file.write_text(json.dumps(stored))
    assert train_method(tmp_path, monkeypatch, tiny, ROLES, "runs=again", line=line) == 2
    assert "the model teacher (other) has another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(("loss", "is_noted"), [("geo_mean", True), ("ppo_clip", False)])
def test_an_aggregation_that_a_formula_does_not_assume_is_noted(
    loss, is_noted, tmp_path, monkeypatch, tiny, capsys
):
    assert train_method(tmp_path, monkeypatch, tiny, "    pass", f"method.loss={loss}") == 0
    note = "method.loss=geo_mean assumes method.aggregation=seq-mean-token-mean; this run has token"
    captured = capsys.readouterr()
    assert (note in captured.out + captured.err) == is_noted
