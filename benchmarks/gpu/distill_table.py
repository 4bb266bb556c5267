"""Tables from the results.jsonl of distill.py."""

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from claims.results import ACCURACY, Results, series, with_interval

SCORE = "validation/part/reward_model"
TEACHER = "teacher"  # folder of the teacher's evaluation on the test problems


def accuracy_by_tokens(lines: Sequence[dict[str, float]], rows: int) -> list[tuple[float, float]]:
    """Return (response tokens trained on so far, accuracy) of every validation of a run."""
    points: list[tuple[float, float]] = []
    tokens = 0.0
    for line in lines:
        tokens += rows * line.get("response/length", 0.0)
        if ACCURACY in line:
            points.append((tokens, verifier_accuracy(line)))
    return points


def verifier_accuracy(line: dict[str, float]) -> float:
    """Return the verifier's accuracy, also of a run whose reward is a model's score."""
    if SCORE not in line:
        return line[ACCURACY]
    (part,) = [
        value
        for key, value in line.items()
        if key.startswith("validation/part/") and key != SCORE and "." not in key
    ]
    return part


def table(options: argparse.Namespace, part: str, entries: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table of one part; "" if none of its runs has a validation."""
    runs = {
        (entry["arm"], entry["seed"]): entry["label"]
        for entry in entries
        if "metrics" in entry and entry["label"].startswith(f"{part}-")
    }
    points: dict[str, list[list[tuple[float, float]]]] = {}
    scores: dict[str, list[list[float]]] = {}
    for (arm, _), label in sorted(runs.items(), key=lambda item: item[0][1]):
        lines = series(entries, label)
        found = accuracy_by_tokens(lines, options.rows)
        if len(found) > 1:
            points.setdefault(arm, []).append(found)
            model_scores = [line[SCORE] for line in lines if SCORE in line]
            scores.setdefault(arm, []).append(model_scores)
    if not points:
        return ""
    budget = min(run[-1][0] for arm in points.values() for run in arm)
    heads = [
        "arm",
        "start",
        f"at {budget / 1e3:.0f}k tokens: mean ± 95% t interval (seeds)",
        "end: the same",
        "tokens, mean",
    ]
    has_scores = any(run for arm in scores.values() for run in arm)
    if has_scores:
        heads.append("reward model's score, start to end")
    rows = [" | ".join(heads), " | ".join("---" for _ in heads)]
    for arm, arm_points in points.items():
        equal = [[value for tokens, value in run if tokens <= budget][-1] for run in arm_points]
        cells = [
            arm,
            f"{statistics.mean(run[0][1] for run in arm_points):.3f}",
            with_interval(equal),
            with_interval([run[-1][1] for run in arm_points]),
            f"{statistics.mean(run[-1][0] for run in arm_points) / 1e3:.0f}k",
        ]
        if has_scores:
            cells.append(score_change(scores[arm]))
        rows.append(" | ".join(cells))
    return "\n".join(f"| {row} |" for row in rows)


def score_change(runs: Sequence[Sequence[float]]) -> str:
    """Return the mean first and last score of the runs that have scores."""
    scored = [run for run in runs if run]
    if not scored:
        return "-"
    first = statistics.mean(run[0] for run in scored)
    last = statistics.mean(run[-1] for run in scored)
    return f"{first:.2f} to {last:.2f}"


def pair_accuracy(options: argparse.Namespace, entries: Sequence[dict[str, Any]]) -> str:
    """Return a sentence about the reward models' accuracy on held-out pairs."""
    ends: list[tuple[float, float]] = []
    for seed in options.seeds:
        lines = series(entries, f"reward-model-{seed}")
        values = [line[ACCURACY] for line in lines if ACCURACY in line]
        if len(values) > 1:
            ends.append((values[0], values[-1]))
    if not ends:
        return ""
    before, after = zip(*ends, strict=True)
    change = f"{with_interval(before)} before, {with_interval(after)} after training"
    return f"Reward model on held-out pairs: {change}."


def teacher_accuracy(options: argparse.Namespace) -> str:
    """Return a sentence about the teacher's greedy answers to the test problems."""
    file = options.out / TEACHER / "summary.json"
    if not file.is_file():
        return ""
    (found,) = json.loads(file.read_text())["sets"].values()
    accuracy = found["avg"]
    return (
        f"Teacher on the {found['problems']} test problems, greedy: {accuracy['value']:.3f} "
        f"(Wilson {accuracy['low']:.3f} to {accuracy['high']:.3f})."
    )


def report(options: argparse.Namespace, results: Results) -> None:
    """Write table.md from results.jsonl and print it."""
    entries = results.read()
    parts = [
        teacher_accuracy(options),
        table(options, "distill", entries),
        pair_accuracy(options, entries),
        table(
            options, "reward", [e for e in entries if not e["label"].startswith("reward-model-")]
        ),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    (options.out / "table.md").write_text(text)
    print(text, flush=True)
