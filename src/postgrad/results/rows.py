"""One line of a result file, and the check that not too many responses failed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.errors import RunError
from postgrad.problem import Failure, Problem, Score
from postgrad.results.votes import can_vote, vote


def result_row(
    problem: Problem,
    sample: int,
    response: str,
    verdict: Score | Failure,
    *,
    verifier: str,
    pass_score: float,
    prompt: str,
    tokens: Sequence[int] = (),
    finish: str = "",
    length: int = 0,
    seed: int | None = None,
) -> dict[str, Any]:
    """Return one line of a result file. It contains no times, so that results can be repeated."""
    score: float | None = None
    parts: Mapping[str, float] = {}
    failure: dict[str, str] | None = None
    if isinstance(verdict, Failure):
        failure = {"kind": verdict.kind, "reason": verdict.reason}
    else:
        score = verdict.value
        parts = verdict.parts
    pictures = [picture.key for picture in problem.prompt_images]
    return {
        "uid": problem.uid,
        "sample": sample,
        "data_source": problem.data_source,
        "prompt": prompt,
        **({"images": pictures} if pictures else {}),
        "response": response,
        "tokens": list(tokens),
        "ground_truth": problem.ground_truth,
        "verifier": verifier,
        "score": score,
        "right": score is not None and _reaches(score, pass_score),
        "parts": parts,
        "failure": failure,
        "answer": vote(verifier, response, problem),
        "can_vote": can_vote(verifier),
        "finish": finish,
        "length": length,
        "seed": seed,
    }


def _reaches(score: float, pass_score: float) -> bool:
    """Return whether a score is at least pass_score, up to rounding: 0.7 + 0.2 + 0.1 is 1."""
    return score >= pass_score or math.isclose(score, pass_score)


def check_failure_rate(
    name: str, batch: Sequence[dict[str, Any]], failure_rate: float, limit: float
) -> None:
    """Raise RunError if more responses of a set than the limit could not be scored."""
    if failure_rate > limit:
        failure = next(row["failure"] for row in batch if row["failure"])
        raise RunError(
            f"set {name}: {failure_rate:.0%} of the responses could not be scored "
            f"(reward.max_failure_rate={limit:g}); first failure of the last batch: "
            f"{failure['kind']}: {failure['reason']}"
        )
