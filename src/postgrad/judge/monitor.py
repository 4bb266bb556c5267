"""Metrics of a monitor: how well ratings were predicted from the question and the thought alone."""

from collections.abc import Sequence
from math import sqrt

# name -> (the prediction is positive, the actual value is positive)
CONFUSION_CELLS = {
    "true_positives": (True, True),
    "true_negatives": (False, False),
    "false_positives": (True, False),
    "false_negatives": (False, True),
}


def monitor_metrics(
    predicted: Sequence[float | None], actual: Sequence[float | None], binary: bool
) -> dict[str, float]:
    """Return the metrics of the pairs where both values are there; the others are counted.

    Ratings on a scale give the mean squared error, its root and both means. Binary values give
    the confusion counts, precision, recall, F1 and accuracy.
    """
    pairs = [
        (prediction, value)
        for prediction, value in zip(predicted, actual, strict=True)
        if prediction is not None and value is not None
    ]
    counts = {"pairs": float(len(pairs)), "dropped": float(len(predicted) - len(pairs))}
    if not pairs:
        return counts
    return counts | (_binary_metrics(pairs) if binary else _scale_metrics(pairs))


def _scale_metrics(pairs: list[tuple[float, float]]) -> dict[str, float]:
    mse = sum((prediction - value) ** 2 for prediction, value in pairs) / len(pairs)
    return {
        "mse": mse,
        "rmse": sqrt(mse),
        "prediction_mean": sum(prediction for prediction, _ in pairs) / len(pairs),
        "rating_mean": sum(value for _, value in pairs) / len(pairs),
    }


def _binary_metrics(pairs: list[tuple[float, float]]) -> dict[str, float]:
    cells = [(prediction > 0.5, value > 0.5) for prediction, value in pairs]
    counts = {name: float(cells.count(cell)) for name, cell in CONFUSION_CELLS.items()}
    true_positives = counts["true_positives"]
    false_positives = counts["false_positives"]
    false_negatives = counts["false_negatives"]
    return counts | {
        "precision": _ratio(true_positives, true_positives + false_positives),
        "recall": _ratio(true_positives, true_positives + false_negatives),
        "f1": _ratio(2 * true_positives, 2 * true_positives + false_positives + false_negatives),
        "accuracy": (true_positives + counts["true_negatives"]) / len(pairs),
    }


def _ratio(part: float, total: float) -> float:
    return part / total if total else 0.0
