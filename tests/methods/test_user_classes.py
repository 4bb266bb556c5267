"""Checks of a user's classes: what belongs to the objective, and what a loss may see."""

import pytest
from method_runs import bound
from refused import refused
from tiny_runs import config_of, overrides_of, toy_run

from postgrad.cli.main import main
from postgrad.methods.grpo import Grpo
from postgrad.methods.support.policy_objective import PolicyObjective

HEAD = """
import torch

from postgrad.methods.bupo import BupoObjective
from postgrad.methods.grpo import Grpo
from postgrad.methods.support.policy_objective import PolicyObjective


class Mine(Grpo):
"""
SETS_AN_ATTRIBUTE = """
    class Objective(PolicyObjective):
        def token_losses(self, batch, current, metrics):
            return super().token_losses(batch, current, metrics) * self.scale

    def estimate(self, batch, step):
        self.scale = float(step.number)
        return super().estimate(batch, step)
"""
SETS_A_SETTING = """
    def score(self, batch, step):
        self.settings.entropy_coef = 0.1 * step.number
        return super().score(batch, step)
"""
SETS_IT_IN_THE_LOSS = """
    class Objective(PolicyObjective):
        def prepare(self, batch):
            self.settings.entropy_coef = 0.1
            return super().prepare(batch)
"""
SETS_A_COLUMN = """
    class Objective(PolicyObjective):
        def token_losses(self, batch, current, metrics):
            scale = batch.expand(batch.rows["scale"])
            return super().token_losses(batch, current, metrics) * scale

    def estimate(self, batch, step):
        self.scale = float(step.number)
        batch.rows["scale"] = torch.full((len(batch),), self.scale)
        return super().estimate(batch, step)
"""
OWN_LOSS = """
    pass


class Cubed(PolicyObjective):
    options = ("tau",)

    def token_losses(self, batch, current, metrics):
        tau = self.settings.loss_options.get("tau", 1.0)
        return -batch.tokens["advantages"] * current.logprobs.exp() ** (3 * tau)


class Inner(BupoObjective):
    pass
"""


# (code, further settings, exit code, what the error says)
CASES = {
    "an attribute of a stage": (SETS_AN_ATTRIBUTE, "", 1, "Mine.Objective has no attribute scale"),
    "a setting in a stage": (SETS_A_SETTING, "", 1, "settings do not change during a run"),
    "a setting in the loss": (SETS_IT_IN_THE_LOSS, "", 1, "settings do not change during a run"),
    "a column": (SETS_A_COLUMN, "", 0, ""),
    "an objective alone": (
        OWN_LOSS,
        "method=grpo method.objective=mine.py:Cubed method.loss_options.tau=2",
        0,
        "",
    ),
    "an option that it does not declare": (
        OWN_LOSS,
        "method=grpo method.objective=mine.py:Cubed method.loss_options.tua=2",
        2,
        "its options: clip_low, clip_high, dual_clip, tau",
    ),
    "an objective that drops what the method trains": (
        OWN_LOSS,
        "method=bupo method.num_blocks=1 method.objective=mine.py:Cubed",
        2,
        "has no class derived from BupoObjective Cubed; known: BupoObjective, Inner",
    ),
    "no such objective": (OWN_LOSS, "method.objective=mine.py:Cubd", 2, "did you mean Cubed?"),
}


@pytest.mark.parametrize("where", ["local", "process"])
@pytest.mark.parametrize("case", CASES)
def test_what_a_loss_of_a_user_may_see(case, where, tmp_path, monkeypatch, tiny, capsys):
    code, words, exit_code, message = CASES[case]
    if where == "process" and exit_code == 2:
        pytest.skip("refused before there is a process")
    (tmp_path / "mine.py").write_text(HEAD + code)
    monkeypatch.chdir(tmp_path)
    settings = (
        *toy_run(steps=1, response_tokens=3),
        *("method=mine.py:Mine", "runs=runs", f"cluster.backend={where}"),
        "reward.verifier=mine_reward.py:score",
    )
    (tmp_path / "mine_reward.py").write_text("def score(text, problem): return len(text)\n")
    overrides = overrides_of(tiny, *settings, *words.split())
    assert main(["train", "grpo", *overrides]) == exit_code
    assert message in capsys.readouterr().err


class OwnEstimate(Grpo):
    def estimate(self, batch, step):
        batch.tokens["advantages"] = batch.expand(batch.rows["reward"])
        return batch


def test_own_advantages_need_no_group(tiny):
    config = config_of("grpo", tiny, "rollout.samples=1")
    OwnEstimate(config).check()
    with refused("conflict", "rollout.samples"):
        Grpo(config).check()


def test_the_driver_and_the_model_read_one_configuration(tiny):
    b = bound("grpo", tiny)
    assert isinstance(b.method.objective, PolicyObjective)
    assert b.host.policy.objective.config is b.method.objective.config is b.method.config
