"""GRPO: sample a group for each problem, compare within the group, move by the clipped ratio.

When one update follows one rollout the old policy is the current one, so its log-probs are the current ones without gradient and no
second forward pass runs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from postgrad.algorithms.advantages import grpo
from postgrad.algorithms.losses import ppo_clip
from postgrad.config.schema import setting
from postgrad.errors import ConfigError
from postgrad.methods.base import Method, MethodSettings, Stage, Step
from postgrad.model.head import TokenOutputs
from postgrad.model.policy import Tally
from postgrad.types import POLICY, Batch


@dataclass
class GrpoSettings(MethodSettings):
    normalise_by_std: bool = setting(True, "divide a group's advantages by its standard deviation; false is Dr. GRPO")
    clip_low: float = setting(0.2, "ratio clipped below 1 - this", at_least=0.0)
    clip_high: float = setting(0.2, "ratio clipped above 1 + this", at_least=0.0)
    dual_clip: float = setting(3.0, "bound on the ratio where the advantage is negative", above=1.0)


class Grpo(Method):
    Settings = GrpoSettings

    def check(self) -> None:
        super().check()
        if self.config.rollout.samples < 2:
            raise ConfigError(
                f"rollout.samples={self.config.rollout.samples}: a group of one has nothing to compare with; use rollout.samples=8"
            )

    def stages(self) -> list[Stage]:
        stages = super().stages()
        if self.config.training.updates_per_step > 1:
            stages.insert(stages.index(self.update), self.remember)
        return stages

    def estimate(self, batch: Batch, step: Step) -> Batch:
        advantages = grpo(batch.rows["reward"], batch.rows["group"], normalise_by_std=self.settings.normalise_by_std)
        batch.tokens["advantages"] = batch.spread(advantages) * batch.tokens["loss_mask"]
        return batch

    def remember(self, batch: Batch, step: Step) -> Batch:
        """Log-probs of the policy before its updates, of the view that is trained."""
        old = self.ports.policy.logprobs(batch, self.view(step.number))
        batch.tokens["old_logprobs"] = old["logprobs"]
        return batch

    def prepare(self, batch: Batch) -> Batch:
        """Rows whose advantage is zero everywhere move nothing: they count in the denominators and are not computed."""
        batch = super().prepare(batch)
        moves = batch.sum_tokens((batch.tokens["advantages"] * batch.tokens["loss_weight"]).abs()) > 0
        return batch.select(torch.nonzero(moves)[:, 0])

    def loss(self, batch: Batch, current: TokenOutputs, tally: Tally) -> Tensor:
        old = batch.tokens["old_logprobs"] if "old_logprobs" in batch.tokens else current.logprobs.detach()
        settings, mask = self.settings, batch.tokens["loss_mask"]
        out = ppo_clip(
            current.logprobs,
            old,
            batch.tokens["advantages"],
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )
        for name, column in out.metrics.items():
            tally.mean(f"policy/{name}", column, mask)
        tally.mean("entropy", current.entropy, mask)
        if "old_logprobs" not in batch.tokens:
            log_engine_gap(batch, current.logprobs, tally)
        return (out.values * batch.tokens["loss_weight"]).sum()


def log_engine_gap(batch: Batch, logprobs: Tensor, tally: Tally) -> None:
    """How far the engine's log-probs are from the trainer's on sampled tokens: kl/engine estimates KL(engine, trainer)."""
    sampled = batch.tokens["token_source"] == POLICY
    gap = batch.tokens["behaviour_logprobs"] - logprobs.detach()
    tally.mean("kl/engine", gap, sampled)
    tally.mean("engine/gap_mean", gap.abs(), sampled)
    tally.peak("engine/gap_max", gap.abs(), sampled)
