"""Tables from the results.jsonl of distill.py."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claims.distillation import REPORTS
from claims.draw import table
from claims.results import Results, labels_by_arm

TEACHER = "teacher"  # folder of the teacher's evaluation on the test problems
SIZES = ("steps", "seeds", "jobs", "rows", "samples", "tokens", "problems", "test_problems")


def describe(options: argparse.Namespace, name: str, arms: Sequence[str]) -> dict[str, Any]:
    """Return the entry of results.jsonl that says what was run, without paths."""
    sizes: dict[str, Any] = {key: getattr(options, key) for key in (*SIZES, "overrides")}
    if name == "reward_model":
        sizes["steps"] = 0  # as many as its epochs have
    described = {"model": Path(str(options.model)).name, **sizes, "arms": list(arms)}
    return {"claim": name, "label": "", "options": described}


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
    texts = [teacher_accuracy(options)]
    for name, shown in REPORTS.items():
        own = [
            entry
            for entry in entries
            if entry.get("claim") == name or entry["label"].startswith(f"{name}-")
        ]
        if labels_by_arm(own):
            texts.append(table(shown, own))
    text = "\n\n".join(part for part in texts if part) + "\n"
    (options.out / "table.md").write_text(text)
    print(text, flush=True)
