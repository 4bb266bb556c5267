"""The data of distill.py: a student made by removing blocks, samples of a teacher, pairs."""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_PAIRS = 4  # per problem


def cut_layers(source: str, target: Path, num_layers: int) -> Path:
    """Write the model with its first `num_layers - 1` blocks and its last one."""
    if (target / "config.json").is_file():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    blocks = model.model.layers
    kept = [*range(num_layers - 1), len(blocks) - 1]
    model.model.layers = type(blocks)([blocks[i] for i in kept])
    model.config.num_hidden_layers = num_layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in kept]
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target


def evaluate_teacher(options: argparse.Namespace, model: str, folder: Path) -> None:
    """Sample from the model on both halves and, greedily, on the test problems, all at once.

    `folder` gets the greedy answers. What an earlier call sampled for the same problems is kept.
    """
    tokens = f"max_response_tokens={options.tokens}"
    greedy = ["temperature=0"]
    sampled = [f"n={options.samples}", "temperature=1"]
    commands: list[list[str]] = []
    for name, settings, out in (
        ("test", greedy, folder),
        ("first", sampled, options.out / "samples-first"),
        ("second", sampled, options.out / "samples-second"),
    ):
        data = options.out / f"{name}.jsonl"
        num_samples = 1 if name == "test" else options.samples
        if not is_sampled(data, out, num_samples, options.tokens):
            shutil.rmtree(out, ignore_errors=True)
            commands.append(["eval", model, f"data={data}", *settings, tokens, f"out={out}"])
    run_commands(*commands)


def is_sampled(data: Path, folder: Path, num_samples: int, tokens: int) -> bool:
    """Return whether the folder has this many samples of every problem, with this limit."""
    if not (folder / "summary.json").is_file():
        return False
    settings = json.loads((folder / "settings.json").read_text())
    found = Counter(row["uid"] for row in read_rows(sample_file(folder)))
    wanted = Counter({row["uid"]: num_samples for row in read_rows(data)})
    return found == wanted and settings["rollout"]["max_response_tokens"] == tokens


def sample_file(folder: Path) -> Path:
    """Return the file of an evaluation that has its responses."""
    (file,) = folder.glob("*.jsonl")
    return file


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def teacher_samples(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Return scored samples of a half's problems, one per response, with the messages."""
    messages = {row["uid"]: row["prompt"] for row in read_rows(options.out / f"{name}.jsonl")}
    samples = read_rows(sample_file(options.out / f"samples-{name}"))
    kept = [sample for sample in samples if sample["response"] and not sample["failure"]]
    return [sample | {"messages": messages[sample["uid"]]} for sample in kept]


def is_finished(sample: dict[str, Any]) -> bool:
    """Return whether the response ended by itself, before the limit of tokens."""
    return sample["finish"] == "stop"


def sft_rows(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the finished samples as demonstrations."""
    return [
        {
            "uid": f"{sample['uid']}-{sample['sample']}",
            "prompt": sample["messages"],
            "response": sample["response"],
            "data_source": sample["data_source"],
        }
        for sample in samples
        if is_finished(sample)
    ]


def pair_rows(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return pairs of a right and a wrong response to the same problem.

    The right one is finished. `cut` says that the wrong one is not: it reached the limit of tokens.
    """
    by_problem: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by_problem.setdefault(sample["uid"], []).append(sample)
    rows: list[dict[str, Any]] = []
    for uid, group in by_problem.items():
        right = [sample for sample in group if sample["right"] and is_finished(sample)]
        wrong = [sample for sample in group if not sample["right"]]
        # Along the diagonals, so that few pairs share a response.
        pairs = sorted(
            itertools.product(range(len(right)), range(len(wrong))),
            key=lambda pair: (pair[1] - pair[0]) % max(len(right), len(wrong)),
        )
        for chosen, rejected in pairs[:MAX_PAIRS]:
            rows.append(
                {
                    "uid": f"{uid}-{chosen}-{rejected}",
                    "prompt": right[chosen]["messages"],
                    "chosen": right[chosen]["response"],
                    "rejected": wrong[rejected]["response"],
                    "cut": not is_finished(wrong[rejected]),
                }
            )
    return rows


def run_commands(*commands: Sequence[str]) -> None:
    """Run postgrad commands at the same time and wait for all."""
    start = time.time()
    processes: list[subprocess.Popen[bytes]] = []
    for arguments in commands:
        print("postgrad " + " ".join(arguments), flush=True)
        command = [sys.executable, "-m", "postgrad.cli.main", *arguments]
        processes.append(subprocess.Popen(command))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"exit codes {codes} of the commands above")
    print(f"  {time.time() - start:.0f} s", flush=True)
