"""Process reward models: learn which steps of a response are right, and save a stock classifier.

Rows have a prompt, the steps of one response (`completions`) and whether each is right (`labels`),
as TRL's stepwise supervision. The score of a step is a number that the model computes at the
separator after it; the loss is the cross-entropy of the labels. The checkpoints are
token-classification folders with two labels, which `reward.verifier=model:PATH` and transformers
read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from postgrad.algorithms.preference import step_cross_entropy
from postgrad.config.schema import setting
from postgrad.data.render import Prompts
from postgrad.data.scored_rows import ScoredRows, stepwise_ids
from postgrad.errors import ConfigError
from postgrad.methods.base import MethodSettings
from postgrad.methods.step import Group, Stage, Step
from postgrad.methods.support.preferences import GivenResponses
from postgrad.model.metrics import MetricAccumulator
from postgrad.problem import named
from postgrad.types import DEMONSTRATION, Batch, Problem, Trajectory

NO_STEP, WRONG, RIGHT = -1.0, 0.0, 1.0  # values of the token column `step_label`


@dataclass
class ProcessRewardModelSettings(MethodSettings):
    step_separator: str = setting(
        "\n", "text that ends each step; the folder keeps it, and scoring splits responses at it"
    )


class ProcessRewardModel(GivenResponses):
    Settings = ProcessRewardModelSettings
    trains_scores = "step"

    # ---- checks

    def check(self) -> None:
        super().check()
        if self.config.cluster.backend == "ray":
            raise ConfigError(
                "cluster.backend=ray: process reward models are trained in one process; "
                "use cluster.backend=local"
            )
        if not self.settings.step_separator:
            raise ConfigError("method.step_separator is empty; give the text that ends a step")

    def check_problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            steps_of(problem)

    check_validation_problems = check_problems

    def row_encoder(self, prompts: Prompts) -> ScoredRows:
        def count_tokens(problem: Problem) -> int:
            separator = self.settings.step_separator
            ids, _ = stepwise_ids(prompts, problem, steps_of(problem)[0], separator)
            return len(ids) - len(prompts.encode(problem))

        return ScoredRows(prompts, "steps", count_tokens)

    # ---- stages, on the driver

    def stages(self) -> list[Stage]:
        return [self.draw, self.compose, self.sample, self.update, self.publish]

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        return [Group(problem, 0, [self.stepwise_row(problem)]) for problem in problems]

    def stepwise_row(self, problem: Problem) -> Trajectory:
        """The steps as one response; `step_label` has a label at the token after each step.

        Scores are computed before each response token, so the score of a step is the one before
        the token that follows it. One token is added after the last step.
        """
        prompts = cast(Prompts, self.ports.prompts)
        steps, labels = steps_of(problem)
        ids, ends = stepwise_ids(prompts, problem, steps, self.settings.step_separator)
        start = len(prompts.encode(problem))
        response = [*ids[start:], prompts.eos_token_id()]
        row = Trajectory(problem.uid, ids[:start], response, source=DEMONSTRATION, finish="given")
        step_labels = [NO_STEP] * len(response)
        for end, label in zip(ends, labels, strict=True):
            step_labels[end - start] = RIGHT if label else WRONG
        row.tokens["step_label"] = step_labels
        return row

    def update(self, batch: Batch, step: Step) -> Batch:
        step.metrics.update(self.ports.policy.update(batch, step.number))
        return batch

    # ---- beside the model

    def prepare(self, batch: Batch) -> Batch:
        """Sets the weight of a step: 1 / number of steps of the optimizer step."""
        is_step = batch.tokens["step_label"] != NO_STEP
        batch.tokens["step_weight"] = is_step / is_step.sum().clamp(min=1)
        return batch

    def loss(self, batch: Batch, current: Any, metrics: MetricAccumulator) -> Tensor:
        labels = batch.tokens["step_label"]
        result = step_cross_entropy(current.scores, labels == RIGHT)
        for name, column in result.metrics.items():
            metrics.mean(f"process_reward_model/{name}", column, labels != NO_STEP)
        return (result.values * batch.tokens["step_weight"]).sum()

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """The share of held-out steps whose label is the more likely one, and the mean loss."""
        batch = self.sample(self.compose(problems, Step(0)), Step(0))
        labels = batch.tokens["step_label"]
        scores = self.ports.policy.logprobs(batch)["scores"].to(labels.device)
        result = step_cross_entropy(scores, labels == RIGHT)
        is_step = labels != NO_STEP
        return {
            "validation/accuracy": float(result.metrics["accuracy"][is_step].mean()),
            "validation/loss": float(result.values[is_step].mean()),
        }


def steps_of(problem: Problem) -> tuple[list[str], list[bool]]:
    """The steps of a row and whether each is right. Raises ConfigError."""
    steps = problem.extra.get("completions")
    labels = problem.extra.get("labels")
    if not isinstance(steps, list) or not isinstance(labels, list):
        steps, labels = [], []
    if not steps or len(steps) != len(labels):
        raise ConfigError(
            f"{named(problem)} has no steps with a label each; process_reward_model needs "
            "the columns prompt, completions (a list of texts) and labels (true or false for each)"
        )
    for step, label in zip(steps, labels, strict=True):
        if not isinstance(step, str) or not step.strip() or label not in (True, False):
            raise ConfigError(
                f"{named(problem)} has the step {step!r} with the label {label!r}; a step is "
                "a text, and its label is true or false"
            )
    return list(steps), [bool(label) for label in labels]
