"""Reward models as verifiers: `reward.verifier=model:PATH`, alone or as a term of a sum."""

import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from postgrad.data.render import Prompts
from postgrad.data.scored_rows import conversation_ids, stepwise_ids
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.model_terms import STEP_SCORES


class RewardModelPort(Protocol):
    """A reward model in this process or another one."""

    def scores(self, rows: Sequence[Sequence[int]]) -> Tensor: ...

    def step_scores(
        self, rows: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]
    ) -> Tensor: ...


class ModelVerifier:
    """Scores responses with a reward model, whose own tokenizer and chat template are used."""

    def __init__(self, model: RewardModelPort, prompts: Prompts) -> None:
        self.model = model
        self.prompts = prompts

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score | Failure]:
        """One Score per response; a Failure for a conversation longer than the context."""
        pairs = zip(problems, responses, strict=True)
        rows = [conversation_ids(self.prompts, problem, text) for problem, text in pairs]
        values = self.model.scores(rows).tolist()
        return [_as_score(value, row) for value, row in zip(values, rows, strict=True)]


class StepVerifier:
    """Scores responses with a process reward model, step by step.

    A step is a text between separators that is not blank. The score is a function of STEP_SCORES
    of the probabilities that the steps are right; 0 for a response without a step.
    """

    def __init__(
        self, model: RewardModelPort, prompts: Prompts, separator: str, step_score: str
    ) -> None:
        self.model = model
        self.prompts = prompts
        self.separator = separator
        self.combine = STEP_SCORES[step_score or "min"]

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score | Failure]:
        """One Score per response; a Failure for a conversation longer than the context."""
        rows: list[list[int]] = []
        ends: list[list[int]] = []
        for problem, text in zip(problems, responses, strict=True):
            steps = [step for step in text.split(self.separator) if step.strip()]
            row, of_row = stepwise_ids(self.prompts, problem, steps, self.separator)
            rows.append(row)
            ends.append(of_row)
        values = self.model.step_scores(rows, ends).tolist()
        results: list[Score | Failure] = []
        for row, of_row in zip(rows, ends, strict=True):
            of_steps = [values.pop(0) for _ in of_row]
            results.append(_as_score(self.combine(of_steps) if of_steps else 0.0, row))
        return results


def _as_score(value: float, row: Sequence[int]) -> Score | Failure:
    if math.isfinite(value):
        return Score(value)
    return Failure("reward_model", f"no score for a conversation of {len(row)} tokens")
