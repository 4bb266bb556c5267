"""Supervised fine-tuning: the demonstrations are the rows, the loss is the negative log-prob of their tokens.

Several rows share a forward pass up to the token budget; only response tokens are priced, and the mean is over all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from postgrad.config.schema import setting
from postgrad.errors import ConfigError
from postgrad.methods.base import Group, Method, MethodSettings, Stage, Step
from postgrad.methods.support.checks import refuse_unread
from postgrad.model.passes.head import TokenOutputs
from postgrad.model.policy import MetricAccumulator
from postgrad.types import Batch, Problem


@dataclass
class SftSettings(MethodSettings):
    validate_accuracy: bool = setting(False, "also answer the validation problems and judge them")


class Sft(Method):
    Settings = SftSettings
    trains_on_samples = False
    learns_demonstrations = True

    def judges(self) -> bool:
        return self.settings.validate_accuracy

    def check_used(self) -> None:
        super().check_used()
        if (
            goal := self.config.training.stop_at
        ) is not None and not self.settings.validate_accuracy:
            raise ConfigError(
                f"training.stop_at={goal:g} waits for validation accuracy; add method.validate_accuracy=true"
            )
        if not self.config.data.validation:
            refuse_unread(
                "method",
                self.settings,
                ["validate_accuracy"],
                "without problems to answer",
                "add data.validation=FILE",
            )

    def stages(self) -> list[Stage]:
        return [self.draw, self.compose, self.sample, self.update, self.publish]

    def check_problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if not problem.demonstrations:
                fix = "sft needs a response for every row of data.train"
                raise ConfigError(
                    f"problem {problem.uid} has no demonstration to learn from; {fix}"
                )

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        return [
            Group(problem, num_samples=0, given=[self.demonstration(problem)])
            for problem in problems
        ]

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        metrics.mean("sft/loss", -current.logprobs, batch.tokens["loss_mask"])
        metrics.mean("entropy", current.entropy, batch.tokens["loss_mask"])
        return -(current.logprobs * batch.tokens["loss_weight"]).sum()

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Loss on the demonstrations of held-out problems; accuracy too when asked for."""
        out: dict[str, float] = {}
        rows = [self.demonstration(problem) for problem in problems if problem.demonstrations]
        if rows:
            batch = Batch.of(rows)
            logprobs = self.ports.policy.logprobs(batch)["logprobs"]
            out["validation/loss"] = -float(logprobs.double()[batch.tokens["loss_mask"]].mean())
        if self.settings.validate_accuracy:
            out.update(super().validate(problems))
        return out
