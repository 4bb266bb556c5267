"""Compares two evaluations on the same problems: paired difference, interval, sign test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from postgrad.config.compose import differences
from postgrad.errors import Conflict, Unreadable, did_you_mean
from postgrad.evaluation.folder import read_json_object, read_rows, set_names
from postgrad.evaluation.report import align, percent

NUM_DRAWS = 10_000
SEED = 20_000
MAX_SHOWN = 40  # characters of a ground truth in a message
MAX_NUMBERS = 4_000_000  # numbers drawn at once, to limit memory
METHOD = (
    f"95% percentile interval of a paired bootstrap over problems ({NUM_DRAWS} draws with "
    "replacement, fixed seed); sign test: two-sided, exact, on the problems that differ"
)
# Settings that differ between any two evaluations worth comparing.
MODEL_KEYS = ("model.path", "model.weights", "data.sets.")
HEADER = [
    "set",
    "problems",
    "A",
    "B",
    "B - A",
    "A right, B wrong",
    "B right, A wrong",
    "sign test p",
]

Values = dict[str, list[float]]  # uid -> one value per sample


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Return per set both means, the difference second - first with its interval, and counts.

    Only problems that both evaluations have are used.

    Raises:
        ConfigError: a folder is not an evaluation, the two share no set or no problem, or a
            problem has another ground truth in the other.
    """
    changed = differences(_settings(first), _settings(second))
    first_names = set_names(first)
    second_names = set_names(second)
    shared = [name for name in first_names if name in second_names]
    if not shared:
        raise Conflict(
            f"{first} and {second} have no set in common: the sets are "
            f"{', '.join(first_names) or 'none'} and {', '.join(second_names) or 'none'}"
        )
    return {
        "a": str(first),
        "b": str(second),
        "method": METHOD,
        "other_settings": [key for key in changed if not key.startswith(MODEL_KEYS)],
        "sets": {name: _compare_files(name, first, second) for name in shared},
    }


def compare_set(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], name: str = "set"
) -> dict[str, Any]:
    """Return the paired comparison of two mappings from uid to one value per sample.

    A value is 1 for a right response and 0 for a wrong one, or the response's win rate.
    A problem's value is the mean of its samples.

    Raises: ConfigError when they share no problem.
    """
    uids = [uid for uid in a if uid in b]
    if not uids:
        raise Conflict(f"set {name}: the two evaluations have no problem in common", at=name)
    a_means = np.array([sum(a[uid]) / len(a[uid]) for uid in uids])
    b_means = np.array([sum(b[uid]) / len(b[uid]) for uid in uids])
    difference = b_means - a_means
    low, high = bootstrap_interval(difference)
    a_better = int((difference < 0).sum())
    b_better = int((difference > 0).sum())
    return {
        "problems": len(uids),
        "only_a": len(a) - len(uids),
        "only_b": len(b) - len(uids),
        "a": float(a_means.mean()),
        "b": float(b_means.mean()),
        "difference": {"value": float(difference.mean()), "low": low, "high": high},
        "a_right_b_wrong": a_better,
        "b_right_a_wrong": b_better,
        "sign_test": sign_test(a_better, b_better),
    }


def bootstrap_interval(difference: np.ndarray) -> tuple[float, float]:
    """Return the 95% percentile interval of the mean; draws problems with replacement."""
    random = np.random.Generator(np.random.Philox(key=SEED))
    size = len(difference)
    chunk = max(1, MAX_NUMBERS // size)
    means: list[np.ndarray] = []
    for start in range(0, NUM_DRAWS, chunk):
        count = min(chunk, NUM_DRAWS - start)
        means.append(difference[random.integers(0, size, (count, size))].mean(1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def sign_test(num_a: int, num_b: int) -> float:
    """Return the two-sided exact p-value that a fair coin gives a split this uneven."""
    total = num_a + num_b
    smaller = min(num_a, num_b)
    return min(1.0, 2 * sum(comb(total, i) for i in range(smaller + 1)) / 2**total)


def table(result: dict[str, Any]) -> str:
    """Return the comparison as text: a table of the sets and notes."""
    rows = [HEADER, *(_table_row(name, one) for name, one in result["sets"].items())]
    lines = [
        f"A  {result['a']}",
        f"B  {result['b']}",
        *_other_settings(result),
        "",
        align(rows),
        "",
        f"B - A in percentage points: {result['method']}.",
        "With several samples per problem, right means: a larger fraction of them is right.",
    ]
    with_win_rates = [name for name, one in result["sets"].items() if one["win_rates"]]
    if with_win_rates:
        lines.append(
            "A and B are win rates against the reference, and right means: the higher win rate, "
            f"in {', '.join(with_win_rates)}."
        )
    for name, one in result["sets"].items():
        if one["only_a"] or one["only_b"]:
            lines.append(
                f"{name}: {one['only_a']} problems only in A and {one['only_b']} only in B "
                "are not compared."
            )
    return "\n".join(lines)


def _other_settings(result: dict[str, Any]) -> list[str]:
    """Return a warning if A and B differ in more than the model."""
    keys = result["other_settings"]
    return [f"Warning: other settings differ too: {', '.join(keys[:6])}."] if keys else []


def _table_row(name: str, result: dict[str, Any]) -> list[str]:
    gap = result["difference"]
    return [
        name,
        str(result["problems"]),
        percent(result["a"]),
        percent(result["b"]),
        f"{100 * gap['value']:+.1f} [{100 * gap['low']:+.1f}, {100 * gap['high']:+.1f}]",
        str(result["a_right_b_wrong"]),
        str(result["b_right_a_wrong"]),
        f"{result['sign_test']:.3g}",
    ]


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "settings.json"
    if not file.is_file():
        siblings = folder.parent.iterdir() if folder.parent.is_dir() else ()
        evaluations = [path.name for path in siblings if (path / "settings.json").is_file()]
        hint = f"postgrad eval MODEL data=SET out={folder} writes one"
        if evaluations:
            hint = did_you_mean(folder.name, evaluations)
        raise Unreadable(
            f"{folder} is not the folder of an evaluation (it has no settings.json); {hint}"
        )
    return read_json_object(file)


def _compare_files(name: str, first: Path, second: Path) -> dict[str, Any]:
    """Compare win rates if both evaluations have them, otherwise right and wrong responses."""
    a = _read_values(first / f"{name}.jsonl")
    b = _read_values(second / f"{name}.jsonl")
    for uid, truth in a.truths.items():
        if uid in b.truths and b.truths[uid] != truth:
            raise Conflict(
                f"set {name}: the ground truth of problem {uid} is {_short(truth)} in {first} and "
                f"{_short(b.truths[uid])} in {second}; compare evaluations of the same data",
                at=name,
            )
    if a.wins and b.wins:
        return compare_set(a.wins, b.wins, name) | {"win_rates": True}
    return compare_set(a.rights, b.rights, name) | {"win_rates": False}


@dataclass
class _SetValues:
    """Per uid: whether each response was right, each response's win rate, the ground truth.

    A response without a verdict of the judge has no win rate.
    """

    rights: Values = field(default_factory=dict)
    wins: Values = field(default_factory=dict)
    truths: dict[str, str] = field(default_factory=dict)


def _read_values(file: Path) -> _SetValues:
    values = _SetValues()
    for _, row in read_rows(file):
        uid = row["uid"]
        values.rights.setdefault(uid, []).append(float(row["right"]))
        values.truths[uid] = row.get("ground_truth", "")
        if "win" in row.get("parts", {}):
            values.wins.setdefault(uid, []).append(row["parts"]["win"])
    return values


def _short(text: str) -> str:
    return repr(text[:MAX_SHOWN])
