"""What reward functions of TRL log with `log_extra` and `log_metric` while they score responses."""

import math
from collections.abc import Iterable
from typing import Any

from postgrad.errors import RunError

PREFIX = "log/"  # of these metrics, and of the columns of the rollouts
INT64_BITS = 63


class RewardLog:
    """The columns and metrics that reward functions log.

    Attributes:
        columns: by name, one value per response, each as JSON has it.
        metrics: by name, the numbers of all calls.
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Add values to a column; several calls continue it, as in TRL."""
        if isinstance(values, str | bytes | dict):
            raise TypeError(
                f"log_extra({column!r}, ...) got {type(values).__name__}, not a list with one "
                "value per completion"
            )
        self.columns.setdefault(str(column), []).extend(as_json(value) for value in values)

    def log_metric(self, name: str, value: Any) -> None:
        """Add one number to a metric."""
        self.metrics.setdefault(str(name), []).append(float(value))

    def check(self, label: str, num_responses: int) -> None:
        """Raise RunError if a column does not have one value per response."""
        for column, values in self.columns.items():
            if len(values) != num_responses:
                raise RunError(
                    f"{label} logged {len(values)} values of column {column} for {num_responses} "
                    "completions; call log_extra with one value per completion, in order"
                )

    def add(self, other: "RewardLog") -> None:
        """Take what another function logged. Raises RunError if both have a column."""
        for column, values in other.columns.items():
            if column in self.columns:
                raise RunError(
                    f"two reward functions log a column {column}; give the columns different names"
                )
            self.columns[column] = values
        self.add_metrics(other)

    def add_metrics(self, other: "RewardLog") -> None:
        """Take the metrics of another call, and not its columns, which have other responses."""
        for name, values in other.metrics.items():
            self.metrics.setdefault(name, []).extend(values)

    def row(self, index: int) -> dict[str, Any]:
        """Return the values of one response by column."""
        return {column: values[index] for column, values in self.columns.items()}

    def means(self) -> dict[str, float]:
        """Return the mean of each metric; numbers that are not finite are left out."""
        means: dict[str, float] = {}
        for name, values in self.metrics.items():
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                means[name] = sum(finite) / len(finite)
        return means


def as_json(value: Any) -> Any:
    """Return a value as JSON has it: arrays as lists, NaN as None, objects as their text."""
    if hasattr(value, "tolist"):  # NumPy, torch
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= INT64_BITS else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    # Half a surrogate pair cannot be written to a file.
    return str(value).encode(errors="replace").decode()
