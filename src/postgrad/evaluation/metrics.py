"""From judged responses to numbers: avg@k, pass@k, maj@k, their intervals, classes, lengths. Pure; rows are lines of a result file."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from postgrad.algorithms.passk import pass_at_k

Z = 1.959963984540054  # of the normal distribution, for 95 %
INTERVAL = (
    "95 % Wilson score interval over problems; several samples of a problem count as the number of independent answers "
    "that their spread between problems is worth, at most all of them"
)

Row = dict[str, Any]


def interval(values: Sequence[float], samples: int = 1) -> tuple[float, float]:
    """95 % interval of the mean of per-problem values in [0, 1], each from `samples` responses.

    Wilson's score interval with p(1 - p) / variance of the mean in the place of the number of trials: for right-or-wrong values that is
    the number of problems, and the interval is Wilson's own, also sensible at 0 and 1; less spread between problems is worth
    more trials, up to the number of responses.
    """
    count = len(values)
    p = sum(values) / count
    variance = sum((value - p) ** 2 for value in values) / count / count
    trials = float(count * samples)
    if 0.0 < p < 1.0 and variance > 0.0:
        trials = min(trials, p * (1 - p) / variance)
    elif p in (0.0, 1.0):
        trials = float(count)
    middle = (p + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = (
        Z / (1 + Z * Z / trials) * math.sqrt(p * (1 - p) / trials + Z * Z / (4 * trials * trials))
    )
    return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))


def majority(votes: Sequence[str | None], right: Sequence[bool]) -> float:
    """Whether the most frequent answer is right; where several are most frequent, the share of them that is: a fair draw's mean.

    An answer's own correctness is the share of its responses that were judged right. Without any vote it is 0.
    """
    counts = Counter(answer for answer in votes if answer is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    share = sum(ok for answer, ok in zip(votes, right, strict=True) if answer in winners) / most
    return share / len(winners)


def maj_at_k(votes: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """The mean of `majority` over the n // k blocks of k samples in their order: samples are exchangeable, so it has no bias."""
    blocks = range(0, len(votes) - k + 1, k)
    return sum(majority(votes[i : i + k], right[i : i + k]) for i in blocks) / len(blocks)


def ladder(samples: int) -> list[int]:
    """k = 1, 2, 4, ... up to the number of samples, which is always there."""
    return sorted({*(1 << i for i in range(samples.bit_length())), samples})


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything a set's result says. Rows stand problem by problem; each problem has the same number of samples.

    What could not be judged counts as wrong, and is counted in `failures`.
    """
    groups = groups_of(rows)
    samples = len(groups[0])
    rights = [[bool(row["right"]) for row in group] for group in groups]
    out: dict[str, Any] = {"problems": len(groups), "samples": samples}
    out["avg"] = mean_with_interval([sum(right) / samples for right in rights], samples)
    out["pass"] = {
        str(k): mean_with_interval([pass_at_k(samples, sum(right), k) for right in rights], samples)
        for k in ladder(samples)
    }
    out["maj"] = _majorities(groups, rights, samples)
    out["score"] = sum(row["score"] or 0.0 for row in rows) / len(rows)
    out["parts"] = _parts(rows)
    out["classes"] = _classes(rows)
    out["length"] = _lengths(rows)
    out["truncated"] = sum(row["finish"] == "length" for row in rows) / len(rows)
    out["failures"] = dict(
        sorted(Counter(row["failure"]["kind"] for row in rows if row["failure"]).items())
    )
    sources = sorted({row["data_source"] for row in rows})
    if len(sources) > 1:
        out["sources"] = {
            name: _source([group for group in groups if group[0]["data_source"] == name])
            for name in sources
        }
        out["mean_of_sources"] = sum(
            source["avg"]["value"] for source in out["sources"].values()
        ) / len(sources)
    return out


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each problem."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["uid"], []).append(row)
    return list(groups.values())


def mean_with_interval(values: Sequence[float], samples: int) -> dict[str, float]:
    """value, low and high, as the summary writes a share."""
    low, high = interval(values, samples)
    return {"value": sum(values) / len(values), "low": low, "high": high}


def _source(groups: Sequence[list[Row]]) -> dict[str, Any]:
    samples = len(groups[0])
    return {
        "problems": len(groups),
        "avg": mean_with_interval(
            [sum(row["right"] for row in group) / samples for group in groups], samples
        ),
    }


def _majorities(
    groups: Sequence[list[Row]], rights: Sequence[list[bool]], samples: int
) -> dict[str, Any] | None:
    if samples == 1 or not all(row["votes"] for group in groups for row in group):
        return None
    votes = [[row["answer"] for row in group] for group in groups]
    ks = [k for k in ladder(samples) if k > 1]
    return {
        str(k): mean_with_interval(
            [maj_at_k(v, r, k) for v, r in zip(votes, rights, strict=True)], samples // k
        )
        for k in ks
    }


def _parts(rows: Sequence[Row]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row["parts"]})
    return {
        name: statistics.fmean(row["parts"][name] for row in rows if name in row["parts"])
        for name in names
    }


def _classes(rows: Sequence[Row]) -> dict[str, int] | None:
    """Responses by (format, answer): 11 both right, 10 the form alone, 01 the answer alone, 00 neither; None without a part `format`."""
    judged = [row for row in rows if "format" in row["parts"]]
    if not judged:
        return None
    counts = Counter(
        f"{int(row['parts']['format'] > 0)}{int(row['parts'].get('answer', row['right']) > 0)}"
        for row in judged
    )
    return {name: counts[name] for name in ("11", "10", "01", "00")}


def _lengths(rows: Sequence[Row]) -> dict[str, float | None]:
    def mean(lengths: Sequence[int]) -> float | None:
        return statistics.fmean(lengths) if lengths else None

    lengths = [row["length"] for row in rows]
    return {
        "mean": mean(lengths),
        "median": statistics.median(lengths),
        "max": max(lengths),
        "right": mean([row["length"] for row in rows if row["right"]]),
        "wrong": mean([row["length"] for row in rows if not row["right"]]),
    }
