"""Scores of what the classmates wrote after a thought."""

import math
from collections.abc import Sequence

from torch import Tensor

from postgrad.algorithms.classmate_rewards import combine
from postgrad.data.ground_truth import with_ground_truth
from postgrad.methods.ports import LIVE
from postgrad.methods.step import Step
from postgrad.methods.support.thinking import Thinking
from postgrad.rollout.panel import Panel
from postgrad.types import Batch, Problem


def score_continuations(
    method: Thinking, classmates: Panel, batch: Batch, targets: Sequence[Problem], step: Step
) -> tuple[Tensor, list[str]]:
    """(rows, classmates, samples) scores, NaN without a text; and per row why scoring failed.

    `targets` has the problem per row that the classmates answered. With reward_type=remove_wo_cot
    the score of each classmate without the thought is subtracted.
    """
    scorer = method.ports.scorer
    texts = batch.rows["classmate_texts"]
    scores, failures = classmates.score(scorer, targets, texts)
    if method.settings.reward_type != "remove_wo_cot":
        return scores, failures
    changes = LIVE in method.settings.classmates
    alone, alone_failures = classmates.score_alone(
        scorer, step.problems(batch), method.no_output_score, again=changes
    )
    failures = [a or b for a, b in zip(failures, alone_failures, strict=True)]
    return scores - alone, failures


def consistency(method: Thinking, classmates: Panel, batch: Batch, step: Step) -> Tensor:
    """(rows,) how often the classmates' answers equal the policy's own output."""
    problems: list[Problem] = []
    for problem, output in zip(step.problems(batch), batch.rows["output"], strict=True):
        problems.append(with_ground_truth(problem, output or "-"))
    texts = batch.rows["classmate_texts"]
    agreement, _ = classmates.score(method.ports.scorer, problems, texts)
    return combine(method.sign * agreement, method.settings.classmate_shares)


def without_nan(scores: Tensor) -> list[list[float | None]]:
    """One list of scores per row for the rollouts; None where there is no score."""
    rows = scores.flatten(1).tolist()
    return [[None if math.isnan(score) else score for score in row] for row in rows]
