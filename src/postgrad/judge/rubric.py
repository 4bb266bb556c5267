"""A language model that scores responses by the rubric of each problem.

A problem's column `rubric` lists criteria: {"criterion": text, "weight": number, "name": text}. The
judge is asked once per criterion and gives a rating, which is scaled to a score from 0 to 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from postgrad.errors import Conflict, Missing, WrongValue
from postgrad.judge.llm import LlmJudge, parse_rating, question_of
from postgrad.judge.templates import fill
from postgrad.problem import Failure, Problem, Score


@dataclass(frozen=True)
class Criterion:
    """One line of a rubric. A negative weight is for something that the response must not do."""

    text: str
    weight: float
    name: str


def rubric_of(problem: Problem) -> list[Criterion]:
    """Return the criteria of a problem's `rubric`. Raises ConfigError that names the problem."""
    rows = find_rubric(problem)
    if not isinstance(rows, list) or not rows:
        raise Missing(
            f"problem {problem.uid} has no rubric; reward.judge.template=rubric needs the column "
            'rubric, a list such as [{"criterion": "names the year", "weight": 2, "name": "year"}]',
            at="rubric",
        )
    criteria = [_read_criterion(row, number, problem) for number, row in enumerate(rows, 1)]
    names = [criterion.name for criterion in criteria]
    if len(set(names)) < len(names):
        raise Conflict(
            f"problem {problem.uid}: two criteria of its rubric have the same name; "
            "each name is a part of the reward",
            at="rubric",
        )
    if not any(criterion.weight > 0 for criterion in criteria):
        raise WrongValue(
            f"problem {problem.uid}: its rubric has no positive weight, so no response could earn "
            "a reward; give at least one criterion a weight above 0",
            at="rubric",
        )
    return criteria


def find_rubric(problem: Problem) -> Any:
    """Return the column `rubric` of a row, also inside verl's extra_info or reward_model."""
    for place in (
        problem.extra,
        problem.extra.get("extra_info"),
        problem.extra.get("reward_model"),
    ):
        if isinstance(place, dict) and place.get("rubric") is not None:
            rubric = place["rubric"]
            # Parquet gives lists as arrays.
            return rubric.tolist() if hasattr(rubric, "tolist") else rubric
    return None


def _read_criterion(row: Any, number: int, problem: Problem) -> Criterion:
    fields: dict[str, Any] = row if isinstance(row, dict) else {}
    text = fields.get("criterion")
    weight = fields.get("weight", 1.0)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not isinstance(text, str) or not text.strip() or not is_number or not isfinite(weight):
        raise WrongValue(
            f"problem {problem.uid}: line {number} of its rubric is {row!r}; it needs a text "
            "criterion and a number weight",
            at="rubric",
        )
    return Criterion(text, float(weight), str(fields.get("name") or f"criterion-{number}"))


class RubricJudge(LlmJudge):
    """Scores each response by every criterion of its problem's rubric."""

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score | Failure]:
        """Return one Score or Failure per response, in order.

        The value is the sum of weight · score over the criteria, divided by the sum of the positive
        weights: at most 1, and below 0 only by criteria with a negative weight. The parts are the
        scores by name. A criterion without a rating makes the response a Failure.
        """
        rubrics = [rubric_of(problem) for problem in problems]
        prompts: list[str] = []
        for problem, response, rubric in zip(problems, responses, rubrics, strict=True):
            for criterion in rubric:
                texts = {"question": question_of(problem), "response": response}
                prompts.append(fill(self.template, criterion=criterion.text, **texts))
        lowest, highest = self.config.lowest, self.config.highest
        ratings = iter(
            self.ask_all(prompts, lambda reply: parse_rating(reply, lowest, highest), "rating")
        )
        scores: list[Score | Failure] = []
        for rubric in rubrics:
            own = [next(ratings) for _ in rubric]
            scores.append(rubric_score(rubric, own, lowest, highest))
        return scores


def rubric_score(
    rubric: Sequence[Criterion], ratings: Sequence[int | Failure], lowest: int, highest: int
) -> Score | Failure:
    """Return the weighted mean of the criteria's scores, or the first Failure."""
    parts: dict[str, float] = {}
    total = 0.0
    for criterion, rating in zip(rubric, ratings, strict=True):
        if isinstance(rating, Failure):
            return Failure(rating.kind, f"{criterion.name}: {rating.reason}")
        score = (rating - lowest) / (highest - lowest)
        parts[criterion.name] = score
        total += criterion.weight * score
    return Score(total / sum(max(0.0, criterion.weight) for criterion in rubric), parts)
