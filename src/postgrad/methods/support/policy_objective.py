"""The policy objective of GRPO's family: a policy loss, a KL penalty and an entropy bonus.

    loss = sum of weight · (policy loss + kl_coef · KL) - entropy_coef · sum of weight · entropy

The weights come from global counts, so no split of the batch changes the gradient.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from postgrad.algorithms.covariance import cov_selection
from postgrad.algorithms.kl import kl_penalty
from postgrad.algorithms.losses import log_ratio
from postgrad.config.schema import Config
from postgrad.errors import RunError
from postgrad.methods.objective import Objective
from postgrad.methods.support.correction import log_engine_gap, weights_for
from postgrad.methods.support.declarations import call_loss, check_shape, expand_rows, find_loss
from postgrad.methods.support.grpo_settings import kl_estimator, loss_options
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.types import Batch


class PolicyObjective(Objective):
    """Trains the policy by `method.loss`. For a loss of your own override `token_losses`."""

    # Names in method.loss_options that an own loss reads.
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.policy_loss = find_loss(self.settings.loss)

    def prepare(self, batch: Batch) -> Batch:
        """Skip rows without gradient. They count in the denominators but are not computed."""
        if "advantages" not in batch.tokens:
            raise RunError(
                'no stage set the token column advantages; set batch.tokens["advantages"], '
                "for a number per row batch.expand(numbers)"
            )
        batch = super().prepare(batch)
        self.select_tokens(batch)
        if not bool(batch.tokens["loss_mask"].any()):
            return batch.select([])
        if self.needs_all_rows():
            return batch
        weighted = batch.tokens["advantages"] * batch.tokens["loss_weight"]
        has_gradient = batch.sum_tokens(weighted.abs()) > 0
        return batch.select(torch.nonzero(has_gradient)[:, 0])

    def select_tokens(self, batch: Batch) -> None:
        """Set `cov_selected`, the tokens of clip_cov and kl_cov, by the whole optimizer step."""
        tokens = batch.tokens
        if "cov_selected" in self.policy_loss.reads:
            options = {**self.policy_loss.selection, **self.settings.loss_options}
            tokens["cov_selected"] = cov_selection(
                tokens["old_logprobs"],
                tokens["advantages"],
                tokens["loss_mask"],
                share=options["cov_share"],
                band=(options["cov_low"], options["cov_high"]) if "cov_low" in options else None,
                uniforms=tokens["uniforms"],
            )

    def needs_all_rows(self) -> bool:
        """Return whether rows whose advantages are all zero have a gradient too.

        Assumed for a loss of the user's own, which may not be proportional to the advantage.
        """
        has_bonus = self.settings.kl == "loss" or self.settings.entropy_coef > 0
        functions = (type(self).loss, type(self).token_losses)
        is_own = any(one.__module__.partition(".")[0] != "postgrad" for one in functions)
        return has_bonus or self.policy_loss.needs_all_rows or is_own

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        """Return the policy loss with its weights, the KL penalty and the entropy bonus."""
        mask = batch.tokens["loss_mask"]
        weight = batch.tokens["loss_weight"]
        if self.is_on_policy(batch):
            self.log_gap(batch, current.logprobs, metrics)
        # Without a second update no stage computes them: the current ones are the old ones.
        batch.tokens.setdefault("old_logprobs", current.logprobs.detach())
        values = self.token_losses(batch, current, metrics)
        check_shape(values, batch.num_tokens, "token", f"{type(self).__qualname__}.token_losses")
        values = self.weigh(batch, values)
        if self.settings.kl == "loss":
            values = values + self.kl_losses(batch, current.logprobs, metrics)
        total = torch.where(mask, values * weight, 0.0).sum()
        metrics.mean("entropy", current.entropy, mask)
        if self.settings.entropy_coef:
            # An objective may set another denominator for the bonus.
            entropy_weight = batch.tokens.get("entropy_weight", weight)
            bonus = torch.where(mask, current.entropy * entropy_weight, 0.0).sum()
            total = total - self.settings.entropy_coef * bonus
        return total

    def token_losses(
        self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
    ) -> Tensor:
        """Return (tokens,) the policy loss of each token, before weights, bonus and penalty."""
        key = f"method.loss={self.settings.loss}"
        columns: dict[str, Any] = {
            **expand_rows(batch, self.policy_loss.reads, key),
            **dict(batch.tokens),
            "mask": batch.tokens["loss_mask"],
            "rows": batch.row_index,
            "num_rows": len(batch),
            "logprobs": current.logprobs,
        }
        result = call_loss(self.policy_loss, key, columns, self.loss_options(batch))
        for name, column in result.metrics.items():
            metrics.mean(f"policy/{name}", column, columns["mask"])
        return result.values

    def weigh(self, batch: Batch, values: Tensor) -> Tensor:
        """Return the token losses with importance weights; 0 where a rule leaves tokens out."""
        if "rollout_weights" in batch.tokens:
            values = values * weights_for(self.policy_loss, batch)
        return values

    def kl_losses(self, batch: Batch, logprobs: Tensor, metrics: MetricAccumulator) -> Tensor:
        """Return (tokens,) the KL penalty to the reference, times its coefficient."""
        reference = batch.tokens["reference_logprobs"]
        kl = kl_penalty(logprobs, reference, kl_estimator(self.settings))
        metrics.mean("kl/reference", kl, batch.tokens["loss_mask"])
        if self.settings.kl_ratio:
            kl = kl * log_ratio(logprobs, batch.tokens["old_logprobs"]).exp()
        return self.settings.kl_coef * kl

    def loss_options(self, batch: Batch) -> dict[str, float]:
        """Return the options of the loss that are set."""
        return loss_options(self.settings, self.policy_loss)

    def num_updates(self) -> int:
        """Return the number of optimizer steps per training step."""
        return self.config.training.updates_per_step * self.config.training.ppo_epochs

    def is_on_policy(self, batch: Batch) -> bool:
        """Return whether the current log-probs are those before updates, and no stage has them."""
        bypasses = self.settings.correction == "bypass" and not self.settings.rejection
        return "old_logprobs" not in batch.tokens or (bypasses and self.num_updates() == 1)

    def log_gap(self, batch: Batch, logprobs: Tensor, metrics: MetricAccumulator) -> None:
        """Log the difference between the engine's log-probs and the policy's, before updates."""
        log_engine_gap(batch, logprobs, metrics)
