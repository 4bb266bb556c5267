"""PPO with a critic: token-level advantages by GAE, a clipped value loss, critic-only warm-up steps."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from postgrad.algorithms.aggregation import token_weights
from postgrad.algorithms.value import explained_variance, value_loss
from postgrad.config.schema import setting
from postgrad.methods.base import Role, Stage, Step
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.model.policy import MetricAccumulator
from postgrad.types import Batch


@dataclass
class PpoSettings(GrpoSettings):
    advantage: str = setting(
        "gae", "estimator of the advantages; gae reads the critic", choices=("gae",)
    )
    lam: float = setting(
        1.0, "GAE's lambda: 1 trusts the rewards, 0 the critic", at_least=0.0, at_most=1.0
    )
    critic_path: str = setting("", "model the critic starts from; empty: model.path")
    critic_lr: float = setting(1e-5, "the critic's learning rate", above=0.0)
    critic_clip: float = setting(
        0.5, "values may move this far from the old ones before the loss is clipped", above=0.0
    )
    critic_warmup: int = setting(0, "steps that train the critic alone", at_least=0)


class Ppo(Grpo):
    Settings = PpoSettings

    def roles(self) -> dict[str, Role]:
        return super().roles() | {
            "critic": Role("critic", self.settings.critic_path, self.settings.critic_lr)
        }

    def stages(self) -> list[Stage]:
        stages = super().stages()
        stages.insert(stages.index(self.estimate), self.value)
        return stages

    def value(self, batch: Batch, step: Step) -> Batch:
        """What the critic expects before each token."""
        batch.tokens["values"] = self.ports.critic.values(batch)
        return batch

    def estimate_options(self) -> dict[str, Any]:
        return {"lam": self.settings.lam}

    def estimate(self, batch: Batch, step: Step) -> Batch:
        batch = super().estimate(batch, step)
        variance = explained_variance(
            batch.tokens["values"], batch.tokens["returns"], batch.tokens["loss_mask"]
        )
        step.metrics["critic/explained_variance"] = float(variance)
        return batch

    def update(self, batch: Batch, step: Step) -> Batch:
        step.metrics |= self.ports.critic.update(batch, step.number)
        return super().update(batch, step) if step.number > self.settings.critic_warmup else batch

    # ---- beside the critic

    def prepare_values(self, batch: Batch) -> Batch:
        mode, length = self.settings.aggregation, self.config.rollout.max_response_tokens
        batch.tokens["loss_weight"] = token_weights(
            mode, batch.tokens["loss_mask"], batch.row_index, len(batch), length
        )
        return batch

    def value_loss(self, batch: Batch, values: Tensor, metrics: MetricAccumulator) -> Tensor:
        out = value_loss(
            values, batch.tokens["values"], batch.tokens["returns"], clip=self.settings.critic_clip
        )
        for name, column in out.metrics.items():
            metrics.mean(f"critic/{name}", column, batch.tokens["loss_mask"])
        return (out.values * batch.tokens["loss_weight"]).sum()
