"""Two results on the same problems: the paired difference with its interval, and who was right where the other was wrong."""

import json
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from postgrad.config.compose import differences
from postgrad.errors import ConfigError, did_you_mean
from postgrad.evaluation.folder import read_rows, set_names
from postgrad.evaluation.report import aligned

DRAWS, SEED = 10_000, 20_000
METHOD = (
    f"95 % percentile interval of a paired bootstrap over problems ({DRAWS} draws with replacement, fixed seed); "
    "sign test: two-sided, exact, on the problems that differ"
)


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Per set: both means, second minus first with its interval, and counts. Only problems that both have answered are used.

    Raises:
        ConfigError: a folder is no evaluation, or the two have no set or no problem in common.
    """
    settings = _settings(first), _settings(second)
    names = [set_names(folder) for folder in (first, second)]
    shared = [name for name in names[0] if name in names[1]]
    if not shared:
        raise ConfigError(
            f"{first} and {second} have no set in common: {', '.join(names[0]) or 'none'} and {', '.join(names[1]) or 'none'}"
        )
    model = ("model.path", "model.weights", "data.sets.")
    apart = [key for key in differences(*settings) if not key.startswith(model)]
    sets = {name: _compare_files(name, first, second) for name in shared}
    return {
        "a": str(first),
        "b": str(second),
        "method": METHOD,
        "other_settings": apart,
        "sets": sets,
    }


def compare_set(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], name: str = "set"
) -> dict[str, Any]:
    """Uid -> whether each sample was right, of both, or what it won. A problem's value is the mean of its samples."""
    uids = [uid for uid in a if uid in b]
    if not uids:
        raise ConfigError(
            f"set {name}: the two evaluations have no problem in common, so nothing can be paired"
        )
    left, right = (np.array([sum(side[uid]) / len(side[uid]) for uid in uids]) for side in (a, b))
    difference = right - left
    low, high = bootstrap_interval(difference)
    a_ahead, b_ahead = int((difference < 0).sum()), int((difference > 0).sum())
    return {
        "problems": len(uids),
        "only_a": len(a) - len(uids),
        "only_b": len(b) - len(uids),
        "a": float(left.mean()),
        "b": float(right.mean()),
        "difference": {"value": float(difference.mean()), "low": low, "high": high},
        "a_right_b_wrong": a_ahead,
        "b_right_a_wrong": b_ahead,
        "sign_test": sign_test(a_ahead, b_ahead),
    }


def bootstrap_interval(difference: np.ndarray) -> tuple[float, float]:
    """95 % percentile interval of the mean, problems drawn with replacement."""
    random = np.random.Generator(np.random.Philox(key=SEED))
    size = len(difference)
    step = max(1, 4_000_000 // size)  # numbers held at once
    counts = [min(step, DRAWS - start) for start in range(0, DRAWS, step)]
    means = np.concatenate(
        [difference[random.integers(0, size, (count, size))].mean(1) for count in counts]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def sign_test(ahead: int, behind: int) -> float:
    """Two-sided exact p-value of a fair coin showing a split at least as uneven as this one."""
    total, few = ahead + behind, min(ahead, behind)
    return min(1.0, 2 * sum(comb(total, i) for i in range(few + 1)) / 2**total)


def table(result: dict[str, Any]) -> str:
    """The comparison for people."""
    rows = [
        [
            "set",
            "problems",
            "A",
            "B",
            "B - A",
            "A right, B wrong",
            "B right, A wrong",
            "sign test p",
        ]
    ]
    for name, one in result["sets"].items():
        gap = one["difference"]
        shown = f"{100 * gap['value']:+.1f} [{100 * gap['low']:+.1f}, {100 * gap['high']:+.1f}]"
        counts = [
            str(one["a_right_b_wrong"]),
            str(one["b_right_a_wrong"]),
            f"{one['sign_test']:.3g}",
        ]
        rows.append(
            [
                name,
                str(one["problems"]),
                f"{100 * one['a']:.1f}%",
                f"{100 * one['b']:.1f}%",
                shown,
                *counts,
            ]
        )
    lines = [
        f"A  {result['a']}",
        f"B  {result['b']}",
        "",
        aligned(rows),
        "",
        f"B - A in points: {result['method']}.",
    ]
    lines.append(
        "With several samples, right means: more of a problem's samples right than the other's."
    )
    if won := [name for name, one in result["sets"].items() if one["win_rates"]]:
        lines.append(
            f"A and B are win rates against the reference, and right means: ahead of the other there, in {', '.join(won)}."
        )
    for name, one in result["sets"].items():
        if one["only_a"] or one["only_b"]:
            lines.append(
                f"{name}: {one['only_a']} problems only in A and {one['only_b']} only in B are left out."
            )
    if result["other_settings"]:
        lines.append(
            f"The two differ in more than the model: {', '.join(result['other_settings'][:6])}."
        )
    return "\n".join(lines)


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "settings.json"
    if not file.is_file():
        beside = (
            [path.name for path in folder.parent.iterdir() if (path / "settings.json").is_file()]
            if folder.parent.is_dir()
            else []
        )
        raise ConfigError(
            f"{folder} is no folder of an evaluation (it has no settings.json); {did_you_mean(folder.name, beside)}"
        )
    return json.loads(file.read_text())


def _compare_files(name: str, *folders: Path) -> dict[str, Any]:
    """By what was won, where a judge compared both sides with a reference, and else by what was right."""
    sides = [_values(folder / f"{name}.jsonl") for folder in folders]
    won = all(wins for _, wins in sides)
    a, b = (wins if won else rights for rights, wins in sides)
    return compare_set(a, b, name) | {"win_rates": won}


def _values(file: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Uid -> whether each response was right, and uid -> what each won; one without a verdict has neither won nor lost."""
    rights: dict[str, list[float]] = {}
    wins: dict[str, list[float]] = {}
    for _, row in read_rows(file):
        rights.setdefault(row["uid"], []).append(float(row["right"]))
        if "win" in row.get("parts", {}):
            wins.setdefault(row["uid"], []).append(row["parts"]["win"])
    return rights, wins
