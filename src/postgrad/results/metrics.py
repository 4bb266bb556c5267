"""Metrics of scored responses: avg@k, pass@k, maj@k with confidence intervals, lengths, failures.

Pure functions. A row is one line of a result file.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from postgrad.algorithms.passk import pass_at_k

Z = 1.959963984540054  # quantile of the normal distribution for 95%
INTERVAL = (
    "95% Wilson score interval over problems; with several samples per problem, the number of "
    "trials is p(1 - p) / variance of the mean, at most the number of responses"
)

Row = dict[str, Any]


def interval(values: Sequence[float], samples: int = 1) -> tuple[float, float]:
    """Return the 95% confidence interval of the mean of per-problem values in [0, 1].

    Each value is the mean of `samples` responses. This is the Wilson score interval with
    p(1 - p) / variance of the mean as the number of trials. If all values are 0 or 1, that is
    the number of problems, so the interval is the usual one. A smaller variance between
    problems gives more trials, at most one per response.
    """
    count = len(values)
    p = sum(values) / count
    variance = sum((value - p) ** 2 for value in values) / count / count
    trials = float(count * samples)
    if 0.0 < p < 1.0 and variance > 0.0:
        trials = min(trials, p * (1 - p) / variance)
    elif p in (0.0, 1.0):
        trials = float(count)
    scale = 1 + Z * Z / trials
    center = (p + Z * Z / (2 * trials)) / scale
    half_width = Z / scale * math.sqrt(p * (1 - p) / trials + Z * Z / (4 * trials * trials))
    return max(0.0, min(p, center - half_width)), min(1.0, max(p, center + half_width))


def majority(votes: Sequence[str | None], right: Sequence[bool]) -> float:
    """Return whether the most frequent answer is right, 0 or 1; 0 without votes.

    With ties, it is the mean over the most frequent answers. If responses with the same answer
    were scored differently, the answer counts with the fraction that was right.
    """
    counts = Counter(answer for answer in votes if answer is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    num_right = sum(ok for answer, ok in zip(votes, right, strict=True) if answer in winners)
    return num_right / most / len(winners)


def maj_at_k(votes: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Return the mean of `majority` over the n // k consecutive blocks of k samples.

    The samples are exchangeable, so the estimate is unbiased.
    """
    starts = range(0, len(votes) - k + 1, k)
    return sum(majority(votes[i : i + k], right[i : i + k]) for i in starts) / len(starts)


def powers_of_two(samples: int) -> list[int]:
    """Return the values of k to report: 1, 2, 4, ... and the number of samples itself."""
    return sorted({*(1 << i for i in range(samples.bit_length())), samples})


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return all metrics of a set. Every problem has the same number of samples.

    A response that could not be scored counts as wrong, and is counted in `failures`.
    """
    groups = group_by_problem(rows)
    samples = len(groups[0])
    rights = [[bool(row["right"]) for row in group] for group in groups]
    summary: dict[str, Any] = {"problems": len(groups), "samples": samples}
    summary["avg"] = mean_with_interval([sum(right) / samples for right in rights], samples)
    summary["pass"] = {}
    for k in powers_of_two(samples):
        values = [pass_at_k(samples, sum(right), k) for right in rights]
        summary["pass"][str(k)] = mean_with_interval(values, samples)
    summary["maj"] = _majorities(groups, rights, samples)
    summary["score"] = sum(row["score"] or 0.0 for row in rows) / len(rows)
    summary["parts"] = _means([row["parts"] for row in rows])
    summary["classes"] = _classes(rows)
    summary["length"] = _lengths(rows)
    summary["truncated"] = _truncated(rows)
    failures = Counter(row["failure"]["kind"] for row in rows if row["failure"])
    summary["failures"] = dict(sorted(failures.items()))
    sources = _sources(groups)
    if len(sources) > 1:
        averages = [source["avg"]["value"] for source in sources.values()]
        summary["sources"] = sources
        summary["mean_of_sources"] = sum(averages) / len(averages)
    return summary


def group_by_problem(rows: Sequence[Row]) -> list[list[Row]]:
    """Return one list of rows per problem, in the order of first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["uid"], []).append(row)
    return list(groups.values())


def mean_with_interval(values: Sequence[float], samples: int) -> dict[str, float]:
    """Return the mean as `value` and its interval as `low` and `high`."""
    low, high = interval(values, samples)
    return {"value": sum(values) / len(values), "low": low, "high": high}


def _sources(groups: Sequence[list[Row]]) -> dict[str, Any]:
    """Return the number of problems and avg@k of each data source."""
    by_source: dict[str, list[list[Row]]] = {}
    for group in groups:
        by_source.setdefault(group[0]["data_source"], []).append(group)
    sources: dict[str, Any] = {}
    for name in sorted(by_source):
        samples = len(by_source[name][0])
        rates = [sum(row["right"] for row in group) / samples for group in by_source[name]]
        sources[name] = {"problems": len(rates), "avg": mean_with_interval(rates, samples)}
    return sources


def _majorities(
    groups: Sequence[list[Row]], rights: Sequence[list[bool]], samples: int
) -> dict[str, Any] | None:
    """Return maj@k per k > 1; None if the verifier's answers cannot vote."""
    if samples == 1 or not all(row["can_vote"] for group in groups for row in group):
        return None
    votes = [[row["answer"] for row in group] for group in groups]
    majorities: dict[str, Any] = {}
    for k in powers_of_two(samples)[1:]:
        values = [maj_at_k(v, r, k) for v, r in zip(votes, rights, strict=True)]
        majorities[str(k)] = mean_with_interval(values, samples // k)
    return majorities


def _means(numbers: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each name, over the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in numbers:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: statistics.fmean(values[name]) for name in sorted(values)}


def _classes(rows: Sequence[Row]) -> dict[str, int] | None:
    """Return the number of responses per class; None if the verifier has no part `format`.

    The first digit of a class says whether the format is right, the second the answer.
    """
    counts: Counter[str] = Counter()
    for row in rows:
        if "format" in row["parts"]:
            has_format = row["parts"]["format"] > 0
            has_answer = row["parts"].get("answer", row["right"]) > 0
            counts[f"{int(has_format)}{int(has_answer)}"] += 1
    if not counts:
        return None
    return {name: counts[name] for name in ("11", "10", "01", "00")}


def _lengths(rows: Sequence[Row]) -> dict[str, float | None]:
    lengths = [row["length"] for row in rows]
    return {
        "mean": _mean(lengths),
        "median": statistics.median(lengths),
        "max": max(lengths),
        "right": _mean([row["length"] for row in rows if row["right"]]),
        "wrong": _mean([row["length"] for row in rows if not row["right"]]),
    }


def _truncated(rows: Sequence[Row]) -> float | None:
    """Return the share of truncated responses; None if it is not known how they ended."""
    if not any(row["finish"] for row in rows):
        return None
    return sum(row["finish"] == "length" for row in rows) / len(rows)


def _mean(values: Sequence[int]) -> float | None:
    return statistics.fmean(values) if values else None
