"""Metrics and per-token statistics of an update, added up over micro-batches and ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postgrad.model.port import TokenOutputs
from postgrad.types import Batch


class MetricAccumulator:
    """Metrics of one update as sums and counts, divided once at the end.

    So each token has the same weight, whatever its micro-batch or rank.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}
        self.totals: dict[str, Any] = {}
        self.peaks: dict[str, Any] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add `values`, where the mask is true, to an average."""
        values = values.detach().double()
        if mask is None:
            mask = torch.ones_like(values, dtype=torch.bool)
        # Sums stay on the device, and no mask selects elements: both would make the host wait.
        self.sums[name] = self.sums.get(name, 0.0) + torch.where(mask, values, 0.0).sum()
        self.counts[name] = self.counts.get(name, 0.0) + mask.sum()

    def total(self, name: str, value: float | Tensor) -> None:
        """Add to a plain sum, such as a loss whose terms are already weighted."""
        if isinstance(value, Tensor):
            value = value.detach().double()
        self.totals[name] = self.totals.get(name, 0.0) + value

    def peak(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Update the maximum with `values`, where the mask is true."""
        values = values.detach()
        if mask is not None:
            values = torch.where(mask, values, -torch.inf)
        if values.numel():
            peak = torch.as_tensor(self.peaks.get(name, -torch.inf))
            self.peaks[name] = torch.maximum(values.max(), peak)

    def result(self) -> dict[str, float]:
        """Return the metrics by name; averages and maxima of nothing are left out."""
        metrics: dict[str, float] = {}
        for name, total in self.sums.items():
            if self.counts[name] > 0:
                metrics[name] = float(total) / float(self.counts[name])
        for name, total in self.totals.items():
            metrics[name] = float(total)
        for name, peak in self.peaks.items():
            if peak > -torch.inf:
                metrics[name] = float(peak)
        return metrics

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return everything as numbers, for another process."""
        return {
            "sums": _as_floats(self.sums),
            "counts": _as_floats(self.counts),
            "totals": _as_floats(self.totals),
            "peaks": _as_floats(self.peaks),
        }

    @staticmethod
    def merge(parts: Sequence[dict[str, dict[str, float]]]) -> "MetricAccumulator":
        """Return the accumulator of all rows from those of several ranks, given by to_dict()."""
        merged = MetricAccumulator()
        for part in parts:
            _add_values(merged.sums, part["sums"])
            _add_values(merged.counts, part["counts"])
            _add_values(merged.totals, part["totals"])
            for name, value in part["peaks"].items():
                merged.peaks[name] = max(merged.peaks.get(name, -torch.inf), value)
        return merged


def _as_floats(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _add_values(totals: dict[str, Any], values: dict[str, float]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + value


class TokenStats:
    """Collects the per-token entropy of one update's forward passes.

    It stays on the device until columns() is called, so no pass waits for a copy.
    """

    # A row's position in the update's batch: methods drop rows and change their order.
    ROW_NUMBER = "row_number"

    def __init__(self, batch: Batch | None = None) -> None:
        self.response = None if batch is None else batch.response
        self.entropies: list[tuple[Tensor, Tensor]] = []  # (row numbers, entropy of their tokens)
        self.is_open = True

    def number_rows(self, batch: Batch) -> Batch:
        """Return the batch with a column of row numbers."""
        rows = {**batch.rows, self.ROW_NUMBER: torch.arange(len(batch))}
        return Batch(batch.prompt, batch.response, dict(batch.tokens), rows)

    def add(self, batch: Batch, rows: Sequence[int], current: TokenOutputs) -> None:
        """Keep the entropy that one pass computed for these rows of a numbered batch."""
        is_numbered = self.ROW_NUMBER in batch.rows
        if self.is_open and is_numbered and isinstance(current, TokenOutputs):
            numbers = batch.rows[self.ROW_NUMBER][torch.tensor(rows)]
            self.entropies.append((numbers, current.entropy.detach()))

    def close(self) -> None:
        """Ignore further passes: the columns are those of the first pass over the batch."""
        self.is_open = False

    def columns(self) -> dict[str, Tensor]:
        """Return (tokens,) columns of the update's batch, NaN in rows that no pass computed."""
        if self.response is None:
            return {}
        entropy = torch.full((self.response.values.numel(),), torch.nan)
        if self.entropies:
            rows = torch.cat([numbers for numbers, _ in self.entropies])
            values = torch.cat([values for _, values in self.entropies])
            entropy[self.response.positions(rows)] = values.float().cpu()
        return {"entropy": entropy}
