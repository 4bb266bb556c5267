"""The problems of the claims, written as JSONL files with the same prompts for every trainer."""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INSTRUCTION = "\nThink step by step, briefly. End with a line: #### and the number."
# Folder of --data: the files of training and test problems, and the text after each question.
TASKS = {
    "gsm8k": ("train.jsonl", "test.jsonl", INSTRUCTION),
    "math": ("deepmath-5k.parquet", "math500.parquet", ""),
}


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_problems(file: Path, source: str, first: int, count: int, instruction: str) -> Path:
    """Write problems of a source with the instruction after the question; count 0: all."""
    from postgrad.data.problems import load_problems

    rows: list[dict[str, Any]] = []
    last = first + count if count else None
    for problem in load_problems(source)[first:last]:
        *before, final = problem.messages
        messages = [*before, {**final, "content": final["content"] + instruction}]
        rows.append(
            {
                "uid": problem.uid,
                "prompt": messages,
                "data_source": problem.data_source,
                "reward_model": {"ground_truth": problem.ground_truth},
            }
        )
    return write_rows(file, rows)


def write_task(options: argparse.Namespace) -> None:
    """Write train.jsonl and test.jsonl of --task from the folder --data."""
    train, test, instruction = TASKS[options.task]
    for name, source in (("train", train), ("test", test)):
        write_problems(
            options.out / f"{name}.jsonl", str(Path(options.data) / source), 0, 0, instruction
        )


def write_sums(options: argparse.Namespace) -> None:
    """Write two-digit additions with a boxed answer."""
    for split in ("train", "test"):
        source = f"arithmetic:2:boxed:{split}"
        write_problems(options.out / f"{split}.jsonl", source, 0, 0, "")


# ---- an operation that no model knows


def apply_operation(a: int, b: int) -> int:
    """Return a @ b: twice `a`, plus `b` with its digits reversed."""
    return 2 * a + int(str(b)[::-1])


def operation_row(a: int, b: int) -> dict[str, Any]:
    """Return the problem a @ b with a demonstration; the prompt does not define @."""
    twice, turned, result = 2 * a, str(b)[::-1], apply_operation(a, b)
    demonstration = (
        f"Reverse the digits of {b}: {turned}. Twice {a} is {twice}. "
        f"{twice} + {int(turned)} = {result}. So {a} @ {b} = \\boxed{{{result}}}."
    )
    question = f"What is {a} @ {b}? Put the final answer in \\boxed{{}}."
    return {
        "uid": f"{a}@{b}",
        "prompt": [{"role": "user", "content": question}],
        "data_source": "arithmetic/boxed",
        "reward_model": {"ground_truth": str(result)},
        "target": [{"role": "assistant", "content": demonstration}],
    }


def write_operation(options: argparse.Namespace) -> None:
    """Write 4,000 problems a @ b with two digits, 256 held out, and 256 with three digits."""
    rng = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    rows = [operation_row(a, b) for a, b in pairs[: 4000 + 256]]
    longer = [operation_row(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(256)]
    write_rows(options.out / "train.jsonl", rows[:4000])
    write_rows(options.out / "test.jsonl", rows[4000:])
    write_rows(options.out / "longer.jsonl", longer)
