"""GRPO and its family: sample a group per problem, turn rewards into advantages, train the policy.

`method.advantage` and `method.loss` name entries of algorithms.ADVANTAGES and algorithms.LOSSES, or
a function of your own. RLOO, ReMax, REINFORCE++, OPO, GSPO, CISPO and DAPO are this method with
other settings. support/policy_update.py has the loss.

If one update follows each rollout, the old policy is the current policy. Its log-probs are then the
current ones without gradient, and no second forward pass runs.
"""

from typing import Any, ClassVar

import torch

from postgrad.config.schema import Config
from postgrad.methods.base import Role, Stage, Step
from postgrad.methods.support import grpo_checks
from postgrad.methods.support.advantage_columns import advantage_columns, is_alone
from postgrad.methods.support.correction import (
    check_correction,
    correct,
    correction_on,
    needs_trainer_logprobs,
)
from postgrad.methods.support.covariance import uniforms
from postgrad.methods.support.declarations import call_advantage, find_advantage
from postgrad.methods.support.dynamic_sampling import refill
from postgrad.methods.support.greedy_baseline import add_greedy_rewards
from postgrad.methods.support.grpo_settings import GrpoSettings
from postgrad.methods.support.length_penalty import add_overlong_penalty, mask_truncated
from postgrad.methods.support.policy_update import PolicyUpdate
from postgrad.methods.support.scoring import reward_metrics
from postgrad.methods.support.synced_reference import check_reference, reference_role
from postgrad.model.metrics import MetricAccumulator
from postgrad.types import Batch


class Grpo(PolicyUpdate):
    Settings = GrpoSettings
    supports_tools = True
    supports_environments = True
    supports_truncated_sampling = True
    offers: ClassVar[tuple[str, ...]] = grpo_checks.OFFERS

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kl_coef: float = self.settings.kl_coef  # changes if method.kl_target is set
        self.advantage = find_advantage(self.settings.advantage)

    def check(self) -> None:
        super().check()
        grpo_checks.check_advantage(self)
        grpo_checks.check_kl(self)
        grpo_checks.check_loss_options(self)
        grpo_checks.check_overlong_buffer(self)
        grpo_checks.check_maxrl(self)
        check_correction(self.config)

    def check_unread(self) -> None:
        super().check_unread()
        grpo_checks.check_unread(self)
        check_reference(self, "with method.kl=none", "add method.kl=loss")

    def roles(self) -> dict[str, Role]:
        return {"reference": reference_role(self.settings)} if self.settings.kl != "none" else {}

    def reward_parts(self) -> dict[str, str]:
        return grpo_checks.reward_parts(self)

    def stages(self) -> list[Stage]:
        stages: list[Stage] = [self.draw, self.compose, self.sample, self.enrich, self.score]
        if self.settings.max_refills:
            stages.append(self.refill)
        if "greedy" in self.advantage.needs:
            stages.append(self.sample_greedy)
        if self.needs_old_logprobs():
            stages.append(self.compute_old_logprobs)
        if self.settings.kl != "none":
            stages.append(self.compute_reference_logprobs)
        if correction_on(self.settings, self.ports.engine):
            stages.append(self.correct)
        return [*stages, self.estimate, self.update, self.publish]

    def needs_old_logprobs(self) -> bool:
        """Whether a stage before the update, or a second update, reads the old log-probs."""
        has_second_update = self.num_updates() > 1 and self.settings.correction != "bypass"
        return (
            has_second_update
            or "old_logprobs" in self.advantage.reads
            or "cov_selected" in self.policy_loss.reads
            or self.settings.kl == "reward"
            or self.settings.top_entropy < 1
            or needs_trainer_logprobs(self.settings, self.ports.engine)
        )

    # ---- stages, on the driver

    def score(self, batch: Batch, step: Step) -> Batch:
        """Adds DAPO's length penalty to the verifier's reward; masks truncated responses."""
        batch = super().score(batch, step)
        if self.settings.mask_truncated:
            step.metrics["response/masked"] = mask_truncated(batch)
        if self.settings.overlong_buffer:
            limit = self.config.rollout.max_response_tokens
            add_overlong_penalty(batch, limit, self.settings.overlong_buffer)
        return batch

    def refill(self, batch: Batch, step: Step) -> Batch:
        """DAPO's dynamic sampling. Rewards are logged over all scored rows, as without it."""
        kept, scored = refill(self, batch, step)
        self.log_rewards(scored, step)
        return kept

    def log_rewards(self, batch: Batch, step: Step) -> None:
        step.metrics |= reward_metrics(batch)

    def sample_greedy(self, batch: Batch, step: Step) -> Batch:
        """ReMax's baseline: the reward of one greedy response per problem."""
        return add_greedy_rewards(self, batch, step)

    def compute_old_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Log-probs of the policy before its updates, of the view that is trained."""
        old = self.ports.policy.logprobs(batch, self.view(step.number))
        batch.tokens["old_logprobs"] = old["logprobs"]
        batch.tokens["sum_probs_squared"] = old["sum_squares"]
        batch.tokens["entropy"] = old["entropy"]
        metrics = MetricAccumulator()
        self.log_gap(batch, old["logprobs"], metrics)
        step.metrics |= metrics.result()
        return batch

    def compute_reference_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Log-probs of the reference, of the same view."""
        reference = self.ports.reference.logprobs(batch, self.view(step.number))
        batch.tokens["reference_logprobs"] = reference["logprobs"]
        return batch

    def correct(self, batch: Batch, step: Step) -> Batch:
        """Importance weights for an engine with its own weights."""
        return correct(self.settings, batch, step)

    def estimate(self, batch: Batch, step: Step) -> Batch:
        columns = self.advantage_columns(batch, step)
        options = {name: getattr(self.settings, name) for name in self.advantage.options}
        key = f"method.advantage={self.settings.advantage}"
        result = call_advantage(self.advantage, key, batch, columns, options)
        batch.tokens["advantages"] = result.advantages
        if step.failed and "groups" in self.advantage.reads:
            lone = batch.expand(is_alone(batch))
            batch.tokens["advantages"] = torch.where(lone, 0.0, result.advantages)
        if self.advantage.level == "token":
            batch.tokens["returns"] = result.returns
        if "cov_selected" in self.policy_loss.reads:
            batch.tokens["uniforms"] = uniforms(batch, self.config.seed, step.number)
        return batch

    def advantage_columns(self, batch: Batch, step: Step) -> dict[str, Any]:
        """The columns that an advantage may read, by name."""
        return advantage_columns(self, batch, step)

    # ---- state

    def state(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    def load(self, state: dict[str, Any]) -> None:
        self.kl_coef = state["kl_coef"]
