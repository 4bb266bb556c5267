"""Reward models: learn from pairs which response people prefer, and save a stock classifier.

The score of a response is a number that the model computes at its last token. The Bradley-Terry
loss raises the chosen response's score above the rejected one's. The checkpoints are
sequence-classification folders, which `reward.verifier=model:PATH` and transformers read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from postgrad.algorithms.preference import bradley_terry
from postgrad.config.schema import setting
from postgrad.data.encode.encoder import EncodedRow, Encoder
from postgrad.errors import Unsupported, WrongValue
from postgrad.methods.method import MethodSettings
from postgrad.methods.step import Group, Stage, Step
from postgrad.methods.support.pairs import PAIR, GivenPairs, GivenPairsObjective, split_pairs
from postgrad.model.metrics import MetricAccumulator
from postgrad.problem import problem_label
from postgrad.types import DEMONSTRATION, Batch, Problem, Trajectory


@dataclass
class RewardModelSettings(MethodSettings):
    centering: float = setting(
        0.01,
        "coefficient of (chosen + rejected)^2, which keeps the mean score near 0; 0 is off",
        at_least=0.0,
    )


class RewardModelObjective(GivenPairsObjective):
    def loss(self, batch: Batch, current: Any, metrics: MetricAccumulator) -> Tensor:
        chosen, rejected = split_pairs(batch, response_scores(batch, current.scores))
        margins, _ = split_pairs(batch, batch.rows["margin"])
        result = bradley_terry(chosen, rejected, margins, centering=self.settings.centering)
        for name, column in result.metrics.items():
            metrics.mean(f"reward_model/{name}", column)
        return (result.values * batch.rows["pair_weight"][: len(chosen)]).sum()


class RewardModel(GivenPairs):
    Settings = RewardModelSettings
    Objective = RewardModelObjective
    traits = replace(GivenPairs.traits, scores=True)

    # ---- checks

    def check(self) -> None:
        super().check()
        if self.config.cluster.backend == "ray":
            raise Unsupported(
                "cluster.backend=ray: reward models are trained in one process; "
                "use cluster.backend=local"
            )

    def check_problems(self, problems: Sequence[Problem]) -> None:
        super().check_problems(problems)
        for problem in problems:
            margin_of(problem)

    def encode_row(self, encoder: Encoder, problem: Problem) -> EncodedRow:
        texts = [str(problem.extra[name]) for name in PAIR if name in problem.extra]
        responses = [encoder.scored_row(problem, text).response for text in texts]
        longest = max(responses, key=len, default=[])
        return replace(encoder.prompt_row(problem), response=longest)

    # ---- stages, on the driver

    def learning_stages(self) -> list[Stage]:
        return [self.update, self.publish]

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        return [Group(problem, 0, self.pair_rows(problem)) for problem in problems]

    def pair_rows(self, problem: Problem) -> list[Trajectory]:
        """Return the chosen row, then the rejected one.

        A row's last token is never read by the model: scores are computed before each response
        token, so one token is added, and the score before it is the score of the response.
        """
        encoder = cast(Encoder, self.ports.encoder)
        rows: list[Trajectory] = []
        for index, name in enumerate(PAIR):
            scored = encoder.scored_row(problem, str(problem.extra[name]))
            response = [*scored.response, encoder.eos_token_id()]
            row = Trajectory(
                problem.uid, scored.prompt, response, source=DEMONSTRATION, finish="given"
            )
            row.index = index
            row.images = scored.images
            row.rows["margin"] = margin_of(problem)
            rows.append(row)
        return rows

    def update(self, batch: Batch, step: Step) -> Batch:
        step.metrics.update(self.ports.policy.update(batch, step.number))
        return batch

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """How often the chosen response of a held-out pair has the higher score."""
        batch = self.sample(self.compose(problems, Step(0)), Step(0))
        scores = self.ports.policy.logprobs(batch)["scores"]
        chosen, rejected = split_pairs(batch, response_scores(batch, scores))
        metrics = bradley_terry(chosen, rejected, torch.zeros_like(chosen)).metrics
        return {
            "validation/accuracy": float(metrics["accuracy"].mean()),
            "validation/margin": float(metrics["margin"].mean()),
        }


def response_scores(batch: Batch, scores: Tensor) -> Tensor:
    """(rows,) the score of each response: the one at its last token."""
    last = batch.response.lengths.cumsum(0) - 1
    return scores[last.to(scores.device)]


def margin_of(problem: Problem) -> float:
    """Return the optional column `margin`: how much better the chosen response is; 0 without it."""
    margin = problem.extra.get("margin", 0.0)
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin):
        raise WrongValue(
            f"{problem_label(problem)} has margin {margin!r}; "
            "the column margin needs a number in every row, or remove it",
            at="margin",
        )
    return float(margin)
