"""Supervised fine-tuning: rows are demonstrations, the loss is their negative log-prob.

Only response tokens count, and the mean is over all of them.
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
    validate_accuracy: bool = setting(
        False, "also generate responses to the validation problems and score them"
    )


class Sft(Method):
    Settings = SftSettings
    trains_on_samples = False
    trains_on_demonstrations = True

    def needs_verifier(self) -> bool:
        return self.settings.validate_accuracy

    def check_unread(self) -> None:
        super().check_unread()
        stop_at = self.config.training.stop_at
        if stop_at is not None and not self.settings.validate_accuracy:
            raise ConfigError(
                f"training.stop_at={stop_at:g} needs validation accuracy; "
                "add method.validate_accuracy=true"
            )
        if not self.config.data.validation:
            names = ["validate_accuracy"]
            reason = "without validation problems"
            refuse_unread("method", self.settings, names, reason, "add data.validation=FILE")

    def check_problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if not problem.demonstrations:
                raise ConfigError(
                    f"problem {problem.uid} has no demonstration; "
                    "sft needs a response for every row of data.train"
                )

    def stages(self) -> list[Stage]:
        return [self.draw, self.compose, self.sample, self.update, self.publish]

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        return [Group(problem, 0, [self.demonstration_row(problem)]) for problem in problems]

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        metrics.mean("sft/loss", -current.logprobs, batch.tokens["loss_mask"])
        metrics.mean("entropy", current.entropy, batch.tokens["loss_mask"])
        return -(current.logprobs * batch.tokens["loss_weight"]).sum()

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """The loss on held-out demonstrations, and the accuracy if method.validate_accuracy."""
        metrics: dict[str, float] = {}
        rows = [self.demonstration_row(problem) for problem in problems if problem.demonstrations]
        if rows:
            batch = Batch.of(rows)
            logprobs = self.ports.policy.logprobs(batch)["logprobs"].double()
            metrics["validation/loss"] = -float(logprobs[batch.tokens["loss_mask"]].mean())
        if self.settings.validate_accuracy:
            metrics |= super().validate(problems)
        return metrics
