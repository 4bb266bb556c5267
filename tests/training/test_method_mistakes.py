"""Mistakes in a user's method: one line that names the method, before the weights change."""

import json
import shutil
from collections import Counter

import pyarrow.parquet as pq
import pytest
from tiny_runs import metrics_of, overrides_of, toy_run
from transformers import AutoTokenizer

from postgrad.cli.main import main

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
SCORE = """
    def score(self, batch, step):
        batch = super().score(batch, step)
        {line}
        return batch
"""
ESTIMATE = SCORE.replace("score", "estimate")
LOSS = """
    class Objective(PolicyObjective):
        def loss(self, batch, current, metrics):
            return {line}
"""
TOKEN_LOSSES = LOSS.replace("loss", "token_losses")
STAGES = """
    def scoring_stages(self):
        return [*super().scoring_stages(), {line}]
"""
STATE = """
    def state(self):
        return {line}

    def load(self, state):
        pass
"""
LR_SCALES = """
    class Objective(PolicyObjective):
        def lr_scales(self, names):
            return {line}
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


# (code, its line, what the error says)
MISTAKES = {
    "texts as rewards": (SCORE, 'batch.rows["reward"] = ["good"] * len(batch)', "not numbers"),
    "too few rewards": (SCORE, 'batch.rows["reward"] = [1.0]', "has 1 entries"),
    "None as rewards": (SCORE, 'batch.rows["reward"] = None', "NoneType without entries"),
    "a column of rewards": (
        SCORE,
        'batch.rows["reward"] = batch.rows["reward"][:, None]',
        "reward after Mine.score has the shape",
    ),
    "NaN as reward": (
        SCORE,
        'batch.rows["reward"][0] = float("nan")',
        "rewards after Mine.score are not finite numbers",
    ),
    "no rows": (SCORE, "batch = batch.select([])", "Mine.score returned a batch without rows"),
    "a text as metric": (SCORE, 'step.metrics["kind"] = "easy"', 'step.metrics["kind"]'),
    "a list as token column": (
        SCORE,
        'batch.tokens["mine"] = [0.0] * batch.num_tokens',
        "token column mine after Mine.score is a list",
    ),
    "bools as advantages": (
        ESTIMATE,
        'batch.tokens["advantages"] = batch.tokens["advantages"] > 0',
        "advantages after Mine.estimate has the type bool",
    ),
    "an array as row column": (
        SCORE,
        'batch.rows["mine"] = numpy.zeros(len(batch))',
        "row column mine after Mine.score is a ndarray",
    ),
    "mixed types in a row column": (
        SCORE,
        'batch.rows["mine"] = [1, "a"] * (len(batch) // 2)',
        "row column mine after Mine.score has entries of several types: number, str",
    ),
    "half precision": (
        SCORE,
        'batch.tokens["mine"] = torch.zeros(batch.num_tokens, dtype=torch.bfloat16)',
        "token column mine after Mine.score is torch.bfloat16",
    ),
    "no advantages": (
        ESTIMATE,
        'del batch.tokens["advantages"]',
        "no stage set the token column advantages",
    ),
    "token losses as a column": (
        TOKEN_LOSSES,
        "super().token_losses(batch, current, metrics)[:, None]",
        "Mine.Objective.token_losses returned (",
    ),
    "one token loss": (
        TOKEN_LOSSES,
        "super().token_losses(batch, current, metrics).mean()",
        "Mine.Objective.token_losses returned ()",
    ),
    "no loss": (LOSS, "None", "Mine.Objective.loss returned NoneType"),
    "losses": (LOSS, "current.logprobs", "Mine.Objective.loss returned a tensor of the shape"),
    "a loss that is no number": (
        LOSS,
        "super().loss(batch, current, metrics) + float('nan')",
        "the loss is nan although the gradient norm is",
    ),
    "no gradient": (LOSS, "current.logprobs.detach().sum()", "without gradient"),
    "a key that is no text": (STATE, "{{1: 2}}", "Mine.state() cannot be stored"),
    "an object": (STATE, '{{"a": object()}}', "Mine.state() cannot be stored"),
    "an array": (STATE, '{{"a": numpy.zeros(2)}}', "ndarray cannot be"),
    "a state of None": (STATE, "None", "NoneType is not a dict"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake, tmp_path, monkeypatch, tiny, capsys):
    code, line, message = MISTAKES[mistake]
    assert train_method(tmp_path, monkeypatch, tiny, code, line=line.format()) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err, err
    steps = [one["step"] for one in metrics_of(tmp_path / "runs" / "test")]
    assert steps in ([], [0], [0, 1], [1]), "found in the first step"


@pytest.mark.parametrize(
    "value",
    [
        "batch.rows['reward'].tolist()",
        "batch.rows['reward'].numpy()",
        "batch.rows['reward'].int()",
        "numpy.asarray(batch.rows['reward'] > 2)",
    ],
)
def test_rewards_of_other_types_become_floats(value, tmp_path, monkeypatch, tiny):
    line = f"batch.rows['reward'] = {value}"
    assert train_method(tmp_path, monkeypatch, tiny, SCORE, line=line) == 0
    (first, _) = [one for one in metrics_of(tmp_path / "runs" / "test") if one["step"] > 0]
    assert first["reward/mean"] > 0


def test_a_column_of_several_numbers_per_token_is_not_written(tmp_path, monkeypatch, tiny):
    line = "batch.tokens['table'] = torch.zeros(batch.num_tokens, 3)"
    assert train_method(tmp_path, monkeypatch, tiny, SCORE, line=line) == 0


SETTINGS = """
from dataclasses import dataclass
from postgrad.methods.grpo import Grpo, GrpoSettings

{decorator}
class MySettings(GrpoSettings):
    strength: {kind} = {value}

class Mine(Grpo):
    Settings = MySettings
"""


@pytest.mark.parametrize(
    ("decorator", "kind", "value", "message"),
    [
        ("", "float", "1.0", "MySettings, has no @dataclass, so strength would be no setting"),
        ("@dataclass", "complex", "1j", "a field of MySettings cannot be a setting"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    decorator, kind, value, message, tmp_path, monkeypatch, tiny, capsys
):
    (tmp_path / "mine.py").write_text(SETTINGS.format(decorator=decorator, kind=kind, value=value))
    monkeypatch.chdir(tmp_path)
    settings = overrides_of(tiny, *toy_run(steps=1), "method=mine.py:Mine", "runs=runs")
    assert main(["train", "grpo", *settings, "method.strength=2"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err, err
    assert not (tmp_path / "runs").exists()


# (code, its line, what the error says): these are found before the first step.
REFUSED = {
    "a state that is not read": (
        STATE.partition("    def load")[0],
        '{{"a": 1}}',
        "Mine defines state() and not load(state)",
    ),
    "scales of unknown parameters": (
        LR_SCALES,
        '{{"layers.0": 0.0}}',
        "lr_scales names the parameter layers.0",
    ),
    "negative scales": (LR_SCALES, "dict.fromkeys(names, -1.0)", "it must be 0 or more"),
    "a role of an unknown kind": (ROLES, '{{"other": Role("frozn")}}', "did you mean frozen?"),
    "a stage without a name": (
        STAGES,
        "functools.partial(self.score)",
        "has no name; use a method of the class",
    ),
    "an __init__ without super": (
        "    def __init__(self, config):\n        self.{line} = 1\n",
        "seen",
        "Mine.__init__ does not call super().__init__(config)",
    ),
    "a loss in the method": (
        "    def loss(self, batch, current, metrics):\n        return {line}\n",
        "0",
        "Mine.loss: the loss and what belongs to it run in the model's process",
    ),
    "one list of stages": ("    def stages(self):\n        return {line}\n", "[]", "two lists"),
    "an objective of another method": (
        "    from postgrad.methods.dpo import DpoObjective as Objective{line}\n",
        "",
        "Mine.Objective: DpoObjective is not derived from PolicyObjective",
    ),
    "a misspelled stage": (SCORE.replace("def score", "def scores"), "pass", "did you mean score?"),
    "a misspelled hook": (LOSS.replace("def loss", "def token_loss"), "0", "mean token_losses?"),
    "a stage without step": (STAGES, "lambda batch: batch", "cannot be called as <lambda>(batch"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_in_a_declaration_is_refused(mistake, tmp_path, monkeypatch, tiny, capsys):
    code, line, message = REFUSED[mistake]
    assert train_method(tmp_path, monkeypatch, tiny, code, line=line.format()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err, err


HELPERS = """
    def __init__(self, config):
        Grpo.__init__(self, config)
        self.seen = 0

    def score(self, batch, step):
        batch = super().score(batch, step)
        batch.rows["reward"] = torch.stack([self.scores(one) for one in batch.rows["reward"]])
        return batch

    def scores(self, reward):
        return reward * 2
"""


def test_helpers_may_have_names_like_those_of_stages(tmp_path, monkeypatch, tiny):
    assert train_method(tmp_path, monkeypatch, tiny, HELPERS) == 0


RANDOM = """
    def score(self, batch, step):
        batch = super().score(batch, step)
        step.metrics["noise"] = random.random() + numpy.random.rand() + float(torch.rand(()))
        return batch

    class Objective(PolicyObjective):
        def loss(self, batch, current, metrics):
            return super().loss(batch, current, metrics) * float(torch.rand(()))
"""


def test_global_random_numbers_follow_from_seed_and_step(tmp_path, monkeypatch, tiny):
    seen = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert train_method(tmp_path / name, monkeypatch, tiny, RANDOM) == 0
        lines = [one for one in metrics_of(tmp_path / name / "runs" / "test") if one["step"] > 0]
        seen.append([(line["noise"], line["grad_norm"]) for line in lines])
    assert seen[0] == seen[1] and seen[0][0] != seen[0][1]


PREPARE = """
    class Objective(PolicyObjective):
        def prepare(self, batch):
            batch.tokens["advantages"] *= 10
            with open("sizes.txt", "a") as file:
                file.write(f"{{float(batch.tokens['advantages'].abs().sum())}}\\n")
            return super().prepare(batch)
"""


def test_changes_in_prepare_do_not_add_up_over_epochs(tmp_path, monkeypatch, tiny):
    more = ("training.ppo_epochs=3", "training.updates_per_step=1")
    assert train_method(tmp_path, monkeypatch, tiny, PREPARE, *more) == 0
    sizes = [float(text) for text in (tmp_path / "sizes.txt").read_text().split()]
    assert len(sizes) == 6 and sizes[0] == sizes[1] == sizes[2] > 0


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


def test_a_frozen_model_with_other_tokens_is_refused(tmp_path, monkeypatch, tiny, capsys):
    shutil.copytree(tiny, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    file.write_text(json.dumps(tokenizer))
    line = '{"teacher": Role("frozen", "other")}'
    assert train_method(tmp_path, monkeypatch, tiny, ROLES, line=line) == 2
    assert "the model teacher (other) has another tokenizer" in capsys.readouterr().err


def test_a_frozen_model_may_have_further_tokens(tmp_path, monkeypatch, tiny):
    shutil.copytree(tiny, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path / "other")
    line = '{"teacher": Role("frozen", "other")}'
    assert train_method(tmp_path, monkeypatch, tiny, ROLES, line=line) == 0


@pytest.mark.parametrize(("loss", "is_noted"), [("geo_mean", True), ("ppo_clip", False)])
def test_an_aggregation_that_a_formula_does_not_assume_is_noted(
    loss, is_noted, tmp_path, monkeypatch, tiny, capsys
):
    assert train_method(tmp_path, monkeypatch, tiny, "    pass", f"method.loss={loss}") == 0
    note = "method.loss=geo_mean assumes method.aggregation=seq-mean-token-mean; this run has token"
    captured = capsys.readouterr()
    assert (note in captured.out + captured.err) == is_noted
