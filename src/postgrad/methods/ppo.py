"""PPO with a critic: advantages by GAE, a clipped value loss, critic-only warm-up steps."""

from dataclasses import dataclass

from torch import Tensor

from postgrad.algorithms.value import explained_variance, value_loss
from postgrad.config.schema import setting
from postgrad.errors import Conflict
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.methods.objective import Objective
from postgrad.methods.ports import Role
from postgrad.methods.step import Stage, Step
from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.model.metrics import MetricAccumulator
from postgrad.types import Batch


@dataclass
class PpoSettings(GrpoSettings):
    advantage: str = setting(
        "gae",
        "advantage estimator: gae reads the critic; or file.py:NAME, package.module:NAME",
        choices=("gae",),
        or_path=True,
    )
    lam: float = setting(
        1.0, "GAE's lambda: 1 uses rewards only, 0 one-step values", at_least=0.0, at_most=1.0
    )
    critic_path: str = setting(
        "",
        "model that the critic starts from; empty: model.path. The head of a saved critic or of "
        "a reward model is the first value head",
    )
    critic_lr: float = setting(1e-5, "learning rate of the critic", above=0.0, at_most=1.0)
    critic_clip: float = setting(
        0.5, "clip of the value loss: largest change of a value from its old one", above=0.0
    )
    critic_warmup: int = setting(0, "first steps that train the critic only", at_least=0)


class PpoObjective(PolicyObjective):
    def prepare_values(self, batch: Batch) -> Batch:
        """Set `loss_weight` for the value loss, from global counts."""
        return Objective.prepare(self, batch)

    def value_loss(self, batch: Batch, values: Tensor, metrics: MetricAccumulator) -> Tensor:
        """Return the weighted sum of value losses over a micro-batch, a scalar."""
        tokens = batch.tokens
        clip = self.settings.critic_clip
        result = value_loss(values, tokens["values"], tokens["returns"], clip=clip)
        for name, column in result.metrics.items():
            metrics.mean(f"critic/{name}", column, tokens["loss_mask"])
        return (result.values * tokens["loss_weight"]).sum()


class Ppo(Grpo):
    Settings = PpoSettings
    Objective = PpoObjective

    def check(self) -> None:
        super().check()
        if self.advantage.level != "token":
            raise Conflict(
                f"method.advantage={self.settings.advantage} has one number per row, and the "
                'critic of ppo needs returns per token; declare level="token", or use grpo'
            )

    def roles(self) -> dict[str, Role]:
        critic = Role("critic", self.settings.critic_path, self.settings.critic_lr)
        return super().roles() | {"critic": critic}

    def logprob_stages(self) -> list[Stage]:
        return [*super().logprob_stages(), self.compute_values]

    # ---- stages, on the driver

    def compute_values(self, batch: Batch, step: Step) -> Batch:
        """Return the critic's value before each token."""
        batch.tokens["values"] = self.ports.critic.values(batch)
        return batch

    def estimate(self, batch: Batch, step: Step) -> Batch:
        batch = super().estimate(batch, step)
        tokens = batch.tokens
        variance = explained_variance(tokens["values"], tokens["returns"], tokens["loss_mask"])
        step.metrics["critic/explained_variance"] = float(variance)
        return batch

    def update(self, batch: Batch, step: Step) -> Batch:
        step.metrics |= self.ports.critic.update(batch, step.number)
        if step.number > self.settings.critic_warmup:
            super().update(batch, step)
        return batch
