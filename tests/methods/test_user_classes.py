"""Checks of a user's method class: attributes for the loss, and settings that nothing reads."""

import pytest
from tiny_runs import config_of

from postgrad.errors import ConfigError
from postgrad.methods.grpo import Grpo
from postgrad.methods.ppo import Ppo


class Reads(Grpo):
    """Its loss reads `scale`, which the subclasses set in several places."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = 1.0

    def token_losses(self, batch, current, metrics):
        return super().token_losses(batch, current, metrics) * self.factor()

    def factor(self):
        return self.scale


class SetInAStage(Reads):
    def estimate(self, batch, step):
        self.scale = float(step.number)
        return super().estimate(batch, step)


class SetByAnIndex(Reads):
    def measure(self, batch, step):
        self.scale[step.number] += 1.0
        return batch


class SetInLoad(Reads):
    def load(self, state):
        super().load(state)
        (self.scale, self.other) = state["scale"], 1


class SetsASetting(Grpo):
    def score(self, batch, step):
        self.settings.clip_high = 0.1 * step.number
        return super().score(batch, step)


class SetBesideTheModel(Reads):
    def prepare(self, batch):
        self.scale = 2.0
        return super().prepare(batch)

    def estimate(self, batch, step):
        self.scale = 3.0
        return super().estimate(batch, step)


class OtherAttribute(Reads):
    def estimate(self, batch, step):
        self.count = step.number
        self.settings.mine = self.count
        batch.rows["scale"] = batch.rows["reward"]
        return super().estimate(batch, step)


@pytest.mark.parametrize(
    ("method", "function", "attribute"),
    [
        (SetInAStage, "estimate", "scale"),
        (SetByAnIndex, "measure", "scale"),
        (SetInLoad, "load", "scale"),
        (SetsASetting, "score", "settings.clip_high"),
    ],
)
def test_attribute_that_a_stage_sets_for_the_loss_is_refused(method, function, attribute, tiny):
    with pytest.raises(ConfigError, match=rf"{function} sets self\.{attribute}"):
        method(config_of("grpo", tiny)).check()


@pytest.mark.parametrize("method", [Reads, SetBesideTheModel, OtherAttribute, Grpo])
def test_attribute_that_the_loss_sees_is_accepted(method, tiny):
    method(config_of("grpo", tiny)).check()


class OwnTokenLosses(Grpo):
    def token_losses(self, batch, current, metrics):
        return -batch.tokens["advantages"] * current.logprobs


class OwnTokenLossesWithClip(Grpo):
    def token_losses(self, batch, current, metrics):
        settings = self.settings
        return -batch.tokens["advantages"] * current.logprobs.clamp(max=settings.clip_high)


class AddedTokenLosses(Grpo):
    def token_losses(self, batch, current, metrics):
        return super().token_losses(batch, current, metrics) - 0.1 * current.logprobs


class HelpedTokenLosses(Grpo):
    def token_losses(self, batch, current, metrics):
        return helped(self.settings, batch, current)


class OwnLoss(Grpo):
    def loss(self, batch, current, metrics):
        return -(current.logprobs * batch.tokens["loss_weight"]).sum()


class AddedLoss(Grpo):
    def loss(self, batch, current, metrics):
        return super().loss(batch, current, metrics) + current.logprobs.square().sum()


class OwnEstimate(Grpo):
    def estimate(self, batch, step):
        batch.tokens["advantages"] = batch.expand(batch.rows["reward"])
        return batch


class DiscountedEstimate(Grpo):
    def estimate(self, batch, step):
        batch.tokens["advantages"] = batch.expand(batch.rows["reward"]) * self.settings.gamma
        return batch


class TokenLossesWithOption(Grpo):
    def token_losses(self, batch, current, metrics):
        return -batch.tokens["advantages"] * current.logprobs * self.settings.loss_options["tau"]


class OwnScore(Grpo):
    def score(self, batch, step):
        batch.rows["reward"] = batch.response.lengths.float()
        return batch


def helped(settings, batch, current):
    return -batch.tokens["advantages"] * current.logprobs * settings.clip_high


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (OwnTokenLosses, "clip_high=0.3"),
        (OwnTokenLosses, "loss=gspo"),
        (OwnTokenLossesWithClip, "clip_low=0.3"),
        (OwnLoss, "clip_high=0.3"),
        (OwnLoss, "entropy_coef=0.1"),
        (OwnEstimate, "normalize_by_std=false"),
        (OwnEstimate, "advantage=rloo"),
        (OwnScore, "mask_truncated=true"),
    ],
)
def test_setting_that_an_override_does_not_read_is_refused(method, setting, tiny):
    config = config_of("grpo", tiny, f"method.{setting}")
    Grpo(config).check()
    with pytest.raises(
        ConfigError, match=rf"method\.{setting} has no effect with {method.__name__}"
    ):
        method(config).check()


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (OwnTokenLosses, "entropy_coef=0.1"),
        (OwnTokenLosses, "advantage=rloo"),
        (OwnTokenLossesWithClip, "clip_high=0.3"),
        (AddedTokenLosses, "clip_high=0.3"),
        (HelpedTokenLosses, "clip_high=0.3"),
        (AddedLoss, "entropy_coef=0.1"),
        (OwnEstimate, "clip_high=0.3"),
        (OwnEstimate, "advantage=remax"),
        (DiscountedEstimate, "gamma=0.9"),
        (TokenLossesWithOption, "loss_options.tau=2"),
    ],
)
def test_setting_that_a_method_may_read_is_accepted(method, setting, tiny):
    method(config_of("grpo", tiny, f"method.{setting}")).check()


@pytest.mark.parametrize("setting", ["gamma=0.9", "loss_options.tau=2"])
def test_setting_of_another_loss_or_advantage_is_refused_for_the_built_in_ones(setting, tiny):
    with pytest.raises(ConfigError, match=r"method\.(gamma|loss)"):
        AddedTokenLosses(config_of("grpo", tiny, f"method.{setting}")).check()


class PpoEstimate(Ppo):
    def estimate(self, batch, step):
        batch.tokens["returns"] = batch.tokens["advantages"] = batch.tokens["values"]
        return batch


def test_lambda_of_ppo_that_own_advantages_do_not_read_is_refused(tiny):
    config = config_of("ppo", tiny, "method.lam=0.9")
    Ppo(config).check()
    with pytest.raises(ConfigError, match=r"method\.lam=0\.9 has no effect with PpoEstimate"):
        PpoEstimate(config).check()


def test_values_of_a_recipe_are_accepted(tiny):
    OwnTokenLosses(config_of("gspo", tiny)).check()


def test_own_advantages_need_no_group(tiny):
    config = config_of("grpo", tiny, "rollout.samples=1")
    OwnEstimate(config).check()
    with pytest.raises(ConfigError, match=r"rollout\.samples=1"):
        OwnTokenLosses(config).check()
