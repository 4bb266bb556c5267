"""The results of the claims per seed, in a form that is small enough to commit.

`keep FOLDER` writes docs/research/CLAIM.jsonl from FOLDER/results.jsonl: of each run the values
that the claim's table reads. It also draws the claim's figure, CLAIM.png, which needs all steps.
`keep FOLDER --add` adds the runs to those of the file, except runs that it has with more steps, and
leaves the figure as it is; give all folders to draw it.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims.claim import Report
from claims.results import Entry, Results, labels_by_arm, series

DOCS = Path(__file__).resolve().parents[2] / "docs"
ALWAYS_KEPT = ("step", "running")
DIGITS = 5  # significant digits of kept metrics
SIZES = (
    "steps",
    "seeds",
    "jobs",
    "problems",
    "samples",
    "tokens",
    "lr",
    "lr_sft",
    "lora_rank",
    "task",
    "max_difficulty",
    "test_problems",
    "validation_samples",
    "depths",
    "classmate",
    "monitor",
    "engine",
    "overrides",
)
PATHS = ("classmate", "monitor")


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a reader needs, without paths."""
    sizes = {name: getattr(options, name) for name in SIZES}
    sizes |= {name: Path(str(sizes[name])).name for name in PATHS}
    test = options.out / "test.jsonl"
    if test.is_file() and not options.test_problems:
        sizes["test_problems"] = len(test.read_text().splitlines())
    return {"model": Path(str(options.model)).name, **sizes}


def keep(claims: Mapping[str, Report], arguments: list[str]) -> int:
    """Write docs/research/CLAIM.jsonl and CLAIM.png from the results of one or several folders."""
    from claims.draw import figure

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--model", help="the model's name, if its folder has another one")
    parser.add_argument("--add", action="store_true", help="to the runs that are kept already")
    options = parser.parse_args(arguments)
    target = options.docs / "research"
    target.mkdir(parents=True, exist_ok=True)
    folders = [Results(folder).read() for folder in options.folders]
    names = dict.fromkeys(entry["claim"] for entry in merged(folders) if "claim" in entry)
    if options.add:
        files = [target / f"{name}.jsonl" for name in names]
        kept = [read_kept(file) for file in files if file.is_file()]
        for entries in kept:
            check_sizes(entries[0], folders, options.model)
            folders = [without_shorter_runs(new, entries) for new in folders]
        folders = [*kept, *folders]
    entries = merged(folders)
    for name in names:
        lines = thinned(name, claims[name], entries)
        if options.model:
            lines[0]["options"]["model"] = options.model
        file = target / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{file}: {len(lines)} lines")
        if not options.add:
            figure(claims[name], of_claim(name, entries), file.with_suffix(".png"))
    return 0


def check_sizes(kept: Entry, folders: Sequence[Sequence[Entry]], model: str | None) -> None:
    """Stop if runs that would be added have another model or other sizes than those that are kept.

    `model` is their model's name, if it is not that of their folder. Sizes that an older version
    did not write are not compared.
    """
    compared = [name for name in ("model", *SIZES) if name not in ("seeds", "jobs")]
    for header in (entry for entries in folders for entry in entries):
        if header.get("claim") != kept["claim"]:
            continue
        options = header["options"] | ({"model": model} if model else {})
        for name in compared:
            old, new = kept["options"].get(name), options.get(name)
            if name in kept["options"] and old != new:
                hint = "; --model says what a folder's model is" if name == "model" else ""
                raise SystemExit(
                    f"{kept['claim']}: kept runs have {name} = {old}, these {new}{hint}"
                )


def without_shorter_runs(entries: Sequence[Entry], kept: Sequence[Entry]) -> list[Entry]:
    """Return the entries without the runs of which the kept entries have more steps."""
    steps, kept_steps = last_steps(entries), last_steps(kept)
    shorter = {label for label, step in steps.items() if step < kept_steps.get(label, 0)}
    for label in sorted(shorter):
        print(f"{label}: {steps[label]} steps; the kept run with {kept_steps[label]} stays")
    return [entry for entry in entries if entry["label"] not in shorter]


def last_steps(entries: Sequence[Entry]) -> dict[str, int]:
    """Return label -> last step of each run."""
    steps: dict[str, int] = {}
    for entry in entries:
        if "metrics" in entry:
            label, step = entry["label"], int(entry["metrics"]["step"])
            steps[label] = max(step, steps.get(label, 0))
    return steps


def merged(folders: Sequence[Sequence[Entry]]) -> list[Entry]:
    """Return the entries of several folders; of a run that is in several, those of the last.

    The options of a claim become those of its last folder, with the seeds of all of them.
    """
    last = {entry["label"]: i for i, entries in enumerate(folders) for entry in entries}
    kept: list[Entry] = []
    seeds: dict[str, set[int]] = {}
    for i, entries in enumerate(folders):
        for entry in entries:
            if "claim" in entry:
                seeds.setdefault(entry["claim"], set()).update(entry["options"].get("seeds", []))
                all_seeds = {"seeds": sorted(seeds[entry["claim"]])}
                kept.append(entry | {"options": entry["options"] | all_seeds})
            elif last[entry["label"]] == i:
                kept.append(entry)
    return kept


def of_claim(name: str, entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of one claim."""
    return [
        entry
        for entry in entries
        if entry.get("claim") == name or entry["label"].startswith(f"{name}-")
    ]


def thinned(name: str, claim: Report, entries: Sequence[Entry]) -> list[Entry]:
    """Return the options, and an entry per run with the values that the table reads, by step."""
    headers = [entry for entry in entries if entry.get("claim") == name]
    kept: list[Entry] = [headers[-1]]
    for arm, labels in labels_by_arm(entries, f"{name}-").items():
        for seed, label in sorted(labels.items()):
            columns = read_values(claim, series(entries, label))
            kept.append({"arm": arm, "seed": seed, "label": label, "columns": columns})
    return kept


def read_values(claim: Report, lines: Sequence[Mapping[str, float]]) -> Mapping[str, Any]:
    """Return metric -> values at the steps of which the table reads any; the last step is kept."""
    from claims.draw import metric, read_lines

    values: dict[int, dict[str, float]] = {int(lines[-1]["step"]): {}}
    for column in claim.columns:
        for line in read_lines(lines, column):
            found = values.setdefault(int(line["step"]), {})
            keys = [key for key in line if key == column.key or metric({key: 0.0}, column.key) == 0]
            keys += [column.where[0]] if column.where else []
            keys += ["clock_s"] if column.within_s < math.inf else []
            found |= {key: rounded(line[key]) for key in keys}
    most = max(line.get("running", 0) for line in lines)
    names = sorted({name for found in values.values() for name in found})
    steps = sorted(values)
    columns: dict[str, list[float | None]] = {"step": [*steps]}
    if most:
        columns["running"] = [most] * len(steps)
    return columns | {name: [values[step].get(name) for step in steps] for name in names}


def read_kept(file: Path) -> list[Entry]:
    """Return the entries of a kept file, one per step and run."""
    entries: list[Entry] = []
    for text in file.read_text().splitlines():
        run = json.loads(text)
        columns = run.pop("columns", None)
        if columns is None:
            entries.append(run)
            continue
        for values in zip(*columns.values(), strict=True):
            pairs = zip(columns, values, strict=True)
            entries.append(run | {"metrics": {k: v for k, v in pairs if v is not None}})
    return entries


def rounded(value: float) -> float:
    """Return the value with DIGITS significant digits; whole numbers as integers."""
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
