"""The policy update of GRPO's family: which rows have a gradient, and the loss of their tokens.

All of it runs beside the model. The stages of the methods are in their own files.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from postgrad.algorithms.entropy import highest
from postgrad.algorithms.kl import kl_penalty
from postgrad.algorithms.losses import log_ratio
from postgrad.config.schema import Config
from postgrad.data.render import Prompts
from postgrad.errors import RunError
from postgrad.methods.base import Method
from postgrad.methods.support.correction import (
    log_engine_gap,
    near_rollout_policy,
    weights_for,
)
from postgrad.methods.support.covariance import select_by_covariance
from postgrad.methods.support.declarations import (
    call_loss,
    check_shape,
    expand_rows,
    find_loss,
)
from postgrad.methods.support.grpo_settings import GrpoSettings, kl_estimator, loss_options
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.types import Batch, Problem


class PolicyUpdate(Method):
    """Trains the policy by `method.loss`, with a KL penalty and an entropy bonus if set."""

    Settings = GrpoSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.policy_loss = find_loss(self.settings.loss)

    def data_notes(self, prompts: Prompts, problems: Sequence[Problem]) -> list[str]:
        notes = super().data_notes(prompts, problems)
        assumed, chosen = self.policy_loss.aggregation, self.settings.aggregation
        if assumed not in (None, chosen):
            notes.append(
                f"the formula of method.loss={self.settings.loss} assumes "
                f"method.aggregation={assumed}; this run has {chosen}"
            )
        return notes

    def prepare(self, batch: Batch) -> Batch:
        """Skips rows without gradient. They count in the denominators but are not computed."""
        if "advantages" not in batch.tokens:
            raise RunError(
                f"{type(self).__name__}.estimate set no token column advantages; set "
                'batch.tokens["advantages"], for a number per row batch.expand(numbers)'
            )
        batch = super().prepare(batch)
        if "cov_selected" in self.policy_loss.reads:
            batch.tokens["cov_selected"] = select_by_covariance(
                batch, {**self.policy_loss.selection, **self.settings.loss_options}
            )
        if self.settings.top_entropy < 1:
            batch.tokens["entropy_selected"] = highest(
                batch.tokens["entropy"], batch.tokens["loss_mask"], self.settings.top_entropy
            )
        if not bool(batch.tokens["loss_mask"].any()):
            return batch.select([])
        if self.needs_all_rows():
            return batch
        weighted = batch.tokens["advantages"] * batch.tokens["loss_weight"]
        has_gradient = batch.sum_tokens(weighted.abs()) > 0
        return batch.select(torch.nonzero(has_gradient)[:, 0])

    def needs_all_rows(self) -> bool:
        """Whether rows whose advantages are all zero have a gradient too.

        True for a user's own `loss` or `token_losses`; override this to skip such rows.
        """
        has_bonus = self.settings.kl == "loss" or self.settings.entropy_coef > 0
        return has_bonus or self.policy_loss.needs_all_rows or self.has_user_loss()

    def has_user_loss(self) -> bool:
        """Whether `loss` or `token_losses` is defined outside Postgrad."""
        functions = (type(self).loss, type(self).token_losses)
        return any(one.__module__.partition(".")[0] != "postgrad" for one in functions)

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        mask = batch.tokens["loss_mask"]
        weight = batch.tokens["loss_weight"]
        if self.is_on_policy(batch):
            self.log_gap(batch, current.logprobs, metrics)
        # Without a second update no stage computes them: the current ones are the old ones.
        batch.tokens.setdefault("old_logprobs", current.logprobs.detach())
        values = self.token_losses(batch, current, metrics)
        check_shape(values, batch.num_tokens, "token", f"{type(self).__name__}.token_losses")
        metrics.mean("entropy", current.entropy, mask)
        if "rollout_weights" in batch.tokens:
            values = values * weights_for(self.policy_loss, batch)
        if self.settings.sequence_mask is not None:
            keep = near_rollout_policy(batch, current.logprobs, self.settings.sequence_mask)
            metrics.mean("policy/sequence_masked", (~keep).float(), mask)
            values = torch.where(keep, values, 0.0)
        if "entropy_selected" in batch.tokens:
            values = torch.where(batch.tokens["entropy_selected"], values, 0.0)
        if self.settings.kl == "loss":
            values = values + self.kl_losses(batch, current.logprobs, metrics)
        total = torch.where(mask, values * weight, 0.0).sum()
        if self.settings.entropy_coef:
            # A method may set another denominator for the bonus.
            entropy_weight = batch.tokens.get("entropy_weight", weight)
            bonus = torch.where(mask, current.entropy * entropy_weight, 0.0).sum()
            total = total - self.settings.entropy_coef * bonus
        return total

    def kl_losses(self, batch: Batch, logprobs: Tensor, metrics: MetricAccumulator) -> Tensor:
        """(tokens,) the KL penalty to the reference, times its coefficient."""
        reference = batch.tokens["reference_logprobs"]
        kl = kl_penalty(logprobs, reference, kl_estimator(self.settings))
        metrics.mean("kl/reference", kl, batch.tokens["loss_mask"])
        if self.settings.kl_ratio:
            kl = kl * log_ratio(logprobs, batch.tokens["old_logprobs"]).exp()
        return self.settings.kl_coef * kl

    def token_losses(
        self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
    ) -> Tensor:
        """(tokens,) the policy loss of every token, before weights, bonus and penalty."""
        mask = batch.tokens["loss_mask"]
        key = f"method.loss={self.settings.loss}"
        columns = {
            **expand_rows(batch, self.policy_loss.reads, key),
            **dict(batch.tokens),
            "mask": mask,
            "rows": batch.row_index,
            "num_rows": len(batch),
            "logprobs": current.logprobs,
        }
        result = call_loss(self.policy_loss, key, columns, self.loss_options(batch))
        for name, column in result.metrics.items():
            metrics.mean(f"policy/{name}", column, mask)
        return result.values

    def num_updates(self) -> int:
        """Optimizer steps per training step."""
        return self.config.training.updates_per_step * self.config.training.ppo_epochs

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
