"""Reward models as verifiers: `reward.verifier=model:PATH`, alone or as a term of a sum."""

import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from postgrad.data.encode.encoder import Encoder
from postgrad.problem import Failure, Problem, Score


class RewardModelPort(Protocol):
    """A reward model in this process or another one."""

    def scores(self, rows: Sequence[Sequence[int]]) -> Tensor: ...


class ModelVerifier:
    """Scores responses with a reward model, whose own tokenizer and chat template are used."""

    def __init__(self, model: RewardModelPort, encoder: Encoder) -> None:
        self.model = model
        self.encoder = encoder

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score | Failure]:
        """One Score per response; a Failure for a conversation longer than the context."""
        pairs = zip(problems, responses, strict=True)
        rows = [self.encoder.scored(problem, text) for problem, text in pairs]
        values = self.model.scores(rows).tolist()
        return [_as_score(value, row) for value, row in zip(values, rows, strict=True)]


def _as_score(value: float, row: Sequence[int]) -> Score | Failure:
    if math.isfinite(value):
        return Score(value)
    return Failure("reward_model", f"no score for a conversation of {len(row)} tokens")
