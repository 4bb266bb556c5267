"""Win rates: how often a judge prefers the model's answer to a reference answer.

The length-controlled win rate estimates the rate for answers as long as the reference's.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from postgrad.results.metrics import Row, Z, group_by_problem, mean_with_interval

# Without a ridge penalty, a model that always wins would have no finite fit.
RIDGE = 0.1
# The coefficient of the length is pulled to SLOPE with this weight per problem, because the data of
# a model with short answers say little about equal lengths. AlpacaEval pulls its own coefficient to
# comparisons of answers made longer and shorter on purpose, with a weight of 0.2 per problem. These
# two numbers were chosen to be close to its leaderboard (docs/evaluate.md).
SLOPE = 1.0
SLOPE_WEIGHT = 0.05
MAX_STEPS = 200
MAX_STEP_SIZE = 2.0
CONVERGED = 1e-10


def win_rates(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the win rates of rows that a pairwise judge has scored.

    A tie is half a win. A response without a verdict is counted in `failed` and nowhere else.
    A problem's value is the mean of its samples. Lengths are in characters.
    """
    judged = [row for row in rows if not row["failure"]]
    wins = [row["parts"]["win"] for row in judged]
    result: dict[str, Any] = {
        "failed": len(rows) - len(judged),
        "rate": None,
        "length_controlled": None,
        "problems": 0,
        "won": sum(win > 0.5 for win in wins),
        "tied": wins.count(0.5),
        "lost": sum(win < 0.5 for win in wins),
    }
    if not judged:
        return result
    groups = group_by_problem(judged)
    rates: list[float] = []
    length_differences: list[float] = []
    for group in groups:
        rates.append(statistics.fmean(row["parts"]["win"] for row in group))
        differences = [len(row["response"]) - len(row["ground_truth"]) for row in group]
        length_differences.append(statistics.fmean(differences))
    result["problems"] = len(groups)
    result["rate"] = mean_with_interval(rates, max(map(len, groups)))
    result["length_controlled"] = length_controlled(rates, length_differences)
    result["characters"] = {
        "own": statistics.fmean(len(row["response"]) for row in judged),
        "reference": statistics.fmean(len(row["ground_truth"]) for row in judged),
    }
    return result


def length_controlled(
    rates: Sequence[float], length_differences: Sequence[float]
) -> dict[str, float] | None:
    """Return the win rate at equal lengths with its 95% interval, or None if it is undetermined.

    A logistic regression predicts the preference from a constant and from
    tanh(length difference / its standard deviation). At difference zero the prediction is the
    logistic of the constant.

    AlpacaEval 2 has the same two terms, also with lengths in characters, and a third one: the
    difficulty of each instruction, which it estimates from all models of its leaderboard. It also
    chooses an L1 penalty by cross-validation. docs/evaluate.md has the distance from its
    published figures. For the leaderboard itself, give the answers to AlpacaEval.

    Args:
        rates: (problems,) 1 if the model's answer was preferred, 0 if not, 0.5 for a tie.
        length_differences: (problems,) length of the answer minus length of the reference.

    Returns:
        value, low and high. None for a single problem, or if all differences are equal and
        not zero.
    """
    differences = np.asarray(length_differences, dtype=float)
    targets = np.asarray(rates, dtype=float)
    if len(differences) < 2:
        return None
    if differences[0] != 0 and np.all(differences == differences[0]):
        return None
    scale = differences.std(ddof=1) or 1.0
    features = np.stack([np.ones_like(differences), np.tanh(differences / scale)], axis=1)
    (constant, _), covariance = _fit_logistic(features, targets)  # features: (problems, 2)
    margin = Z * math.sqrt(covariance[0, 0])
    return {
        "value": float(_logistic(constant)),
        "low": float(_logistic(constant - margin)),
        "high": float(_logistic(constant + margin)),
    }


def _fit_logistic(features: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients (constant, length) and covariance of a penalized logistic regression.

    Newton's method with bounded steps.
    """
    center = np.array([0.0, SLOPE])
    strength = np.array([RIDGE, RIDGE + SLOPE_WEIGHT * len(targets)])
    weights = center
    inverse = np.eye(len(weights))
    for _ in range(MAX_STEPS):
        predicted = _logistic(features @ weights)
        variance = predicted * (1 - predicted)
        gradient = features.T @ (targets - predicted) - strength * (weights - center)
        hessian = (features * variance[:, None]).T @ features + np.diag(strength)
        inverse = np.linalg.inv(hessian)
        step = inverse @ gradient
        size = np.abs(step).max()
        weights = weights + step * min(1.0, MAX_STEP_SIZE / max(size, CONVERGED))
        if size < CONVERGED:
            break
    return weights, inverse


def _logistic(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))
