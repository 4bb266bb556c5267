"""Mistakes in a user's method: one line that names the method, before the weights change."""

import pytest
from tiny_runs import metrics_of, overrides_of, toy_run

from postgrad.cli.main import main

HEAD = """
import numpy
import torch

from postgrad.methods.grpo import Grpo


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
    def loss(self, batch, current, metrics):
        return {line}
"""
STATE = """
    def state(self):
        return {line}
"""


def train_method(home, monkeypatch, model, code: str, **values: str) -> int:
    """Train two steps with a method of this code; return the exit code."""
    (home / "mine.py").write_text(HEAD + code.format(**values))
    (home / "reward.py").write_text("def score(response, problem):\n    return len(response)\n")
    monkeypatch.chdir(home)
    own = ("method=mine.py:Mine", "reward.verifier=reward.py:score", "runs=runs")
    settings = (*toy_run(steps=2, response_tokens=3), *own, "training.checkpoint_every=2")
    return main(["train", "grpo", *overrides_of(model, *settings, "name=test")])


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
        "rewards after score are not finite numbers",
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
    "no loss": (LOSS, "None", "Mine.loss returned NoneType"),
    "losses": (LOSS, "current.logprobs", "Mine.loss returned a tensor of the shape"),
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
