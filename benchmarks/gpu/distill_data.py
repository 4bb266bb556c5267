"""The data of distill.py: a student made by removing blocks, samples of a teacher, pairs."""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_PAIRS = 3  # per problem


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


def evaluate_teacher(options: argparse.Namespace, model: str, folder: Path | None) -> None:
    """Sample from the model on both halves and, greedily, on the test problems, all at once.

    `folder` gets the greedy answers, which are what the student can hope for; None: without them.
    """
    tokens = f"max_response_tokens={options.tokens}"
    commands: list[list[str]] = []
    if folder is not None and not (folder / "summary.json").is_file():
        data = f"data={options.out / 'test.jsonl'}"
        commands.append(["eval", model, data, "temperature=0", tokens, f"out={folder}"])
    for name in ("first", "second"):
        out = options.out / f"samples-{name}"
        if not (out / "summary.json").is_file():
            data = f"data={options.out / name}.jsonl"
            sampling = [f"n={options.samples}", "temperature=1", tokens]
            commands.append(["eval", model, data, *sampling, f"out={out}"])
    run_commands(*commands)


def teacher_samples(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Return scored samples of a half's problems, one per response, with the messages."""
    rows = [json.loads(line) for line in (options.out / f"{name}.jsonl").read_text().splitlines()]
    messages = {row["uid"]: row["prompt"] for row in rows}
    file = options.out / f"samples-{name}" / f"{name}.jsonl"
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [sample for sample in samples if sample["finish"] == "stop" and sample["response"]]
    return [sample | {"messages": messages[sample["uid"]]} for sample in kept]


def sft_rows(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples as demonstrations."""
    return [
        {
            "uid": f"{sample['uid']}-{sample['sample']}",
            "prompt": sample["messages"],
            "response": sample["response"],
            "data_source": sample["data_source"],
        }
        for sample in samples
    ]


def pair_rows(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return pairs of a right and a wrong response to the same problem."""
    by_problem: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by_problem.setdefault(sample["uid"], []).append(sample)
    rows: list[dict[str, Any]] = []
    for uid, group in by_problem.items():
        right = [sample for sample in group if sample["right"]]
        wrong = [sample for sample in group if not sample["right"] and not sample["failure"]]
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
