"""Two answers to each instruction, ours and a reference's: how often ours is preferred, also with the length of the answers held equal."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from postgrad.evaluation.metrics import Row, Z, groups_of, mean_with_interval

RIDGE = 0.1  # weight of the squared coefficients; without it a judge that follows length alone would have no finite fit
MOST_STEPS, LONGEST_STEP, CLOSE = 200, 2.0, 1e-10


def win_rates(rows: Sequence[Row]) -> dict[str, Any]:
    """What lines of a result file say that a judge of two answers has scored.

    A tie is half a win. A response without a verdict is neither won nor lost: it is counted in `failed` and left out of all else. A problem
    counts once, with the mean of its samples. Lengths are in characters.
    """
    judged = [row for row in rows if not row["failure"]]
    out: dict[str, Any] = {
        "failed": len(rows) - len(judged),
        "rate": None,
        "length_controlled": None,
        "problems": 0,
    }
    wins = [row["parts"]["win"] for row in judged]
    out |= {
        "won": sum(w > 0.5 for w in wins),
        "tied": wins.count(0.5),
        "lost": sum(w < 0.5 for w in wins),
    }
    if not judged:
        return out
    groups = groups_of(judged)
    out["problems"] = len(groups)
    shares = [statistics.fmean(row["parts"]["win"] for row in group) for group in groups]
    out["rate"] = mean_with_interval(shares, max(map(len, groups)))
    out["length_controlled"] = length_controlled(
        shares,
        [
            statistics.fmean(len(row["response"]) - len(row["ground_truth"]) for row in group)
            for group in groups
        ],
    )
    out["characters"] = {
        "own": statistics.fmean(len(row["response"]) for row in judged),
        "reference": statistics.fmean(len(row["ground_truth"]) for row in judged),
    }
    return out


def length_controlled(
    shares: Sequence[float], differences: Sequence[float]
) -> dict[str, float] | None:
    """The win rate that answers as long as the reference's would have, with its 95 % interval; None where the data cannot tell.

    A logistic regression of the preference on a constant and on tanh(difference / its standard deviation), read off at difference zero:
    the logistic of the constant. AlpacaEval 2's own figure has these two terms, also with lengths in characters. Its third one, how hard
    each instruction is, was estimated from the many models of its leaderboard and cannot be had from one comparison. It also adds
    comparisons with answers that were made longer and shorter on purpose, and chooses an L1 penalty by cross-validation where this has a
    weak ridge. So the two are not the same number: for a place on the leaderboard give the answers to their tool.

    Args:
        shares: (problems,) 1 where ours was preferred, 0 where the reference was, 0.5 for a tie.
        differences: (problems,) length of ours minus length of the reference's.

    Returns:
        value, low and high. None with one problem, or where all answers are longer or shorter by the same amount.
    """
    gaps, wanted = np.asarray(differences, dtype=float), np.asarray(shares, dtype=float)
    if len(gaps) < 2 or (gaps[0] != 0 and np.all(gaps == gaps[0])):
        return None
    features = np.stack(
        [np.ones_like(gaps), np.tanh(gaps / (gaps.std(ddof=1) or 1.0))], axis=1
    )  # (problems, 2)
    (constant, _), covariance = _logistic_fit(features, wanted)
    margin = Z * math.sqrt(covariance[0, 0])
    value, low, high = (
        float(_logistic(np.asarray(at))) for at in (constant, constant - margin, constant + margin)
    )
    return {"value": value, "low": low, "high": high}


def _logistic_fit(features: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(coefficients, their covariance) of a logistic regression with a ridge, by Newton's method with bounded steps."""
    weights = np.zeros(features.shape[1])
    inverse = np.eye(len(weights))
    for _ in range(MOST_STEPS):
        predicted = _logistic(features @ weights)
        slope = features.T @ (wanted - predicted) - RIDGE * weights
        curvature = (
            features * (predicted * (1 - predicted))[:, None]
        ).T @ features + RIDGE * np.eye(len(weights))
        inverse = np.linalg.inv(curvature)
        step = inverse @ slope
        weights = weights + step * min(1.0, LONGEST_STEP / max(np.abs(step).max(), CLOSE))
        if np.abs(step).max() < CLOSE:
            break
    return weights, inverse


def _logistic(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))
