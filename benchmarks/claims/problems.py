"""The problems of the claims, written as JSONL files with the same prompts for every trainer."""

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

INSTRUCTION = "\nThink step by step, briefly. End with a line: #### and the number."
SHARED = Path("../shared/data")
# Default of --data, its files of training and test problems, and the text after each question.
TASKS = {
    "gsm8k": (SHARED / "gsm8k", "train.jsonl", "test.jsonl", INSTRUCTION),
    "math": (SHARED / "bupo", "deepmath-5k.parquet", "math500.parquet", ""),
}


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_problems(
    file: Path,
    source: str,
    first: int,
    count: int,
    instruction: str,
    max_difficulty: float = math.inf,
) -> Path:
    """Write problems of a source with the instruction after the question; count 0: all.

    Those with a column `difficulty` above `max_difficulty` are left out.
    """
    from postgrad.data.problems import load_problems

    rows: list[dict[str, Any]] = []
    last = first + count if count else None
    for problem in load_problems(source)[first:last]:
        if problem.row.get("difficulty", 0) > max_difficulty:
            continue
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
    folder, train, test, instruction = TASKS[options.task]
    folder = options.data or folder
    for name, source in (("train", train), ("test", test)):
        file, highest = options.out / f"{name}.jsonl", options.max_difficulty
        write_problems(file, str(folder / source), 0, 0, instruction, highest)


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
    write_pairs(options.out, lambda a, b, rng: operation_row(a, b))


def write_pairs(out: Path, make_row: Callable[[int, int, random.Random], dict[str, Any]]) -> None:
    rng = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    longer = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(256)]
    parts = {"train": pairs[:4000], "test": pairs[4000 : 4000 + 256], "longer": longer}
    for name, some in parts.items():
        write_rows(out / f"{name}.jsonl", [make_row(a, b, rng) for a, b in some])


# ---- an operation of a known form with unknown numbers

SECRET = (36, 58)
OTHER_SYMBOLS = "#&%~!?"
NUM_EXAMPLES = 3


def secret_solution(a: int, symbol: str, b: int, numbers: tuple[int, int]) -> str:
    """Return the solution of an operation that adds a number of its own to each side."""
    first, second = a + numbers[0], b + numbers[1]
    return (
        f"{a} + {numbers[0]} = {first} and {b} + {numbers[1]} = {second}. "
        f"So {a} {symbol} {b} = \\boxed{{({first}, {second})}}."
    )


def secret_row(a: int, b: int, rng: random.Random) -> dict[str, Any]:
    """Return the problem a @ b with a demonstration.

    The prompt shows the written form by other operations with other numbers, drawn for each
    problem, so that each token of the demonstration is plausible. The numbers of @ are in the
    demonstrations only: a policy that does not know them has to guess both at once.
    """
    lines = ["Each operation adds two numbers of its own."]
    for symbol in rng.sample(OTHER_SYMBOLS, NUM_EXAMPLES):
        x, y = (rng.randrange(10, 100) for _ in range(2))
        numbers = rng.randrange(10, 100), rng.randrange(10, 100)
        lines += [f"What is {x} {symbol} {y}?", secret_solution(x, symbol, y, numbers)]
    return {
        "uid": f"{a}@{b}",
        "prompt": [{"role": "user", "content": "\n".join([*lines, f"What is {a} @ {b}?"])}],
        "data_source": "arithmetic/boxed",
        "reward_model": {"ground_truth": f"({a + SECRET[0]}, {b + SECRET[1]})"},
        "target": [{"role": "assistant", "content": secret_solution(a, "@", b, SECRET)}],
    }


def write_secret(options: argparse.Namespace) -> None:
    """Write problems of `secret_row` in the numbers of `write_operation`."""
    write_pairs(options.out, secret_row)
