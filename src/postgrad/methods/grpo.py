"""GRPO and its family: sample a group per problem, turn rewards into advantages, train the policy.

`method.advantage` and `method.loss` name entries of algorithms.ADVANTAGES and algorithms.LOSSES, or
a function of your own. RLOO, ReMax, REINFORCE++, OPO, GSPO, CISPO and DAPO are this method with
other settings.

If one update follows each rollout, the old policy is the current policy. Its log-probs are then the
current ones without gradient, and no second forward pass runs.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from postgrad.algorithms.kl import kl_penalty
from postgrad.algorithms.losses import log_ratio
from postgrad.config.schema import Config
from postgrad.methods.base import Method, Role, Stage, Step
from postgrad.methods.support import grpo_checks
from postgrad.methods.support.advantage_columns import advantage_columns
from postgrad.methods.support.correction import (
    check_correction,
    correct,
    correction_on,
    log_engine_gap,
    near_rollout_policy,
    needs_trainer_logprobs,
    weights_for,
)
from postgrad.methods.support.covariance import select_by_covariance, uniforms
from postgrad.methods.support.declarations import (
    call_advantage,
    call_loss,
    find_advantage,
    find_loss,
)
from postgrad.methods.support.dynamic_sampling import refill
from postgrad.methods.support.greedy_baseline import add_greedy_rewards
from postgrad.methods.support.grpo_settings import GrpoSettings as GrpoSettings
from postgrad.methods.support.grpo_settings import loss_options
from postgrad.methods.support.length_penalty import add_overlong_penalty, mask_truncated
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes.head import TokenOutputs
from postgrad.types import Batch


class Grpo(Method):
    Settings = GrpoSettings
    supports_tools = True
    # What this method has for the `needs` of an advantage.
    offers: ClassVar[tuple[str, ...]] = (
        "group>=2",
        "named_rewards",
        "greedy",
        "sum_probs_squared",
        "source",
        "critic",
        "environment",
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kl_coef: float = self.settings.kl_coef  # changes if method.kl_target is set
        self.advantage = find_advantage(self.settings.advantage)
        self.policy_loss = find_loss(self.settings.loss)

    def check(self) -> None:
        super().check()
        grpo_checks.check_advantage(self)
        grpo_checks.check_kl(self)
        grpo_checks.check_loss_options(self)
        grpo_checks.check_overlong_buffer(self)
        check_correction(self.config)

    def check_unread(self) -> None:
        super().check_unread()
        grpo_checks.check_unread(self)

    def roles(self) -> dict[str, Role]:
        return {"reference": Role("frozen")} if self.settings.kl != "none" else {}

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

    def num_updates(self) -> int:
        """Optimizer steps per training step."""
        return self.config.training.updates_per_step * self.config.training.ppo_epochs

    def needs_old_logprobs(self) -> bool:
        """Whether a stage before the update, or a second update, reads the old log-probs."""
        has_second_update = self.num_updates() > 1 and self.settings.correction != "bypass"
        return (
            has_second_update
            or "old_logprobs" in self.advantage.reads
            or "cov_selected" in self.policy_loss.reads
            or self.settings.kl == "reward"
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
        """DAPO's dynamic sampling."""
        return refill(self, batch, step)

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
        if self.advantage.level == "token":
            batch.tokens["returns"] = result.returns
        if "cov_selected" in self.policy_loss.reads:
            batch.tokens["uniforms"] = uniforms(batch, self.config.seed, step.number)
        return batch

    def advantage_columns(self, batch: Batch, step: Step) -> dict[str, Any]:
        """The columns that an advantage may read, by name."""
        return advantage_columns(self, batch, step)

    # ---- beside the model

    def prepare(self, batch: Batch) -> Batch:
        """Skips rows without gradient. They count in the denominators but are not computed."""
        batch = super().prepare(batch)
        if "cov_selected" in self.policy_loss.reads:
            batch.tokens["cov_selected"] = select_by_covariance(
                batch, {**self.policy_loss.selection, **self.settings.loss_options}
            )
        if self.needs_all_rows():
            return batch
        weighted = batch.tokens["advantages"] * batch.tokens["loss_weight"]
        has_gradient = batch.sum_tokens(weighted.abs()) > 0
        return batch.select(torch.nonzero(has_gradient)[:, 0])

    def needs_all_rows(self) -> bool:
        """Whether rows whose advantages are all zero have a gradient too."""
        has_bonus = self.settings.kl == "loss" or self.settings.entropy_coef > 0
        return has_bonus or self.policy_loss.needs_all_rows

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        settings = self.settings
        mask = batch.tokens["loss_mask"]
        weight = batch.tokens["loss_weight"]
        values = self.token_losses(batch, current, metrics)
        metrics.mean("entropy", current.entropy, mask)
        if "rollout_weights" in batch.tokens:
            values = values * weights_for(self.policy_loss, batch)
        if settings.sequence_mask is not None:
            keep = near_rollout_policy(batch, current.logprobs, settings.sequence_mask)
            metrics.mean("policy/sequence_masked", (~keep).float(), mask)
            values = torch.where(keep, values, 0.0)
        if settings.kl == "loss":
            reference = batch.tokens["reference_logprobs"]
            kl = kl_penalty(current.logprobs, reference, settings.kl_estimator)
            metrics.mean("kl/reference", kl, mask)
            if settings.kl_ratio:
                old = batch.tokens.get("old_logprobs", current.logprobs.detach())
                kl = kl * log_ratio(current.logprobs, old).exp()
            values = values + settings.kl_coef * kl
        total = torch.where(mask, values * weight, 0.0).sum()
        if settings.entropy_coef:
            # A method may set another denominator for the bonus.
            entropy_weight = batch.tokens.get("entropy_weight", weight)
            bonus = torch.where(mask, current.entropy * entropy_weight, 0.0).sum()
            total = total - settings.entropy_coef * bonus
        return total

    def token_losses(
        self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
    ) -> Tensor:
        """(tokens,) the policy loss of every token, before weights, bonus and penalty."""
        mask = batch.tokens["loss_mask"]
        columns = {
            **dict(batch.tokens),
            "mask": mask,
            "rows": batch.row_index,
            "num_rows": len(batch),
            "logprobs": current.logprobs,
        }
        if "old_logprobs" not in batch.tokens:
            columns["old_logprobs"] = current.logprobs.detach()
        if self.is_on_policy(batch):
            self.log_gap(batch, current.logprobs, metrics)
        key = f"method.loss={self.settings.loss}"
        result = call_loss(self.policy_loss, key, columns, self.loss_options(batch))
        for name, column in result.metrics.items():
            metrics.mean(f"policy/{name}", column, mask)
        return result.values

    def is_on_policy(self, batch: Batch) -> bool:
        """Whether the current log-probs are those before updates, and no stage computed them."""
        settings = self.settings
        bypasses = settings.correction == "bypass" and not settings.rejection
        return "old_logprobs" not in batch.tokens or (bypasses and self.num_updates() == 1)

    def log_gap(self, batch: Batch, logprobs: Tensor, metrics: MetricAccumulator) -> None:
        """Logs the difference between the engine's log-probs and the policy's, before updates."""
        log_engine_gap(batch, logprobs, metrics)

    def loss_options(self, batch: Batch) -> dict[str, float]:
        """The options of the loss that are set."""
        return loss_options(self.settings, self.policy_loss)

    # ---- state

    def state(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    def load(self, state: dict[str, Any]) -> None:
        self.kl_coef = state["kl_coef"]
