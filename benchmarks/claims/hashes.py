"""Claim 7: the same seed on several machines: what is identical, and what is not.

    python benchmarks/research.py hashes --model smollm2 --out x86.jsonl
    python benchmarks/research.py hashes --compare x86.jsonl arm.jsonl h200.jsonl

Trains GRPO for a few steps and writes a line per step: hashes of the problems, the sampled tokens,
the rewards, the log-probs and the weights, and numbers that show how far apart machines are. The
reward depends on the length of a response, so that every step changes the weights.
"""

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LENGTH_REWARD = Path(__file__).resolve().parents[1] / "speed.py"
HASHES = ("problems", "tokens", "rewards", "logprobs", "weights")


def digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()[:16]


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the results may depend on."""
    import torch
    import transformers

    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    return {
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "seed": options.seed,
    }


def settings(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the `postgrad train` command of the run."""
    return [
        "train",
        "grpo",
        f"model.path={options.model}",
        f"model.device={options.device}",
        f"model.dtype={options.dtype}",
        "model.threads=1",
        f"data.train={options.data}",
        f"reward.verifier={LENGTH_REWARD}:length_reward",
        f"seed={options.seed}",
        f"runs={folder}",
        "name=run",
        f"training.steps={options.steps}",
        f"training.problems_per_step={options.problems}",
        f"rollout.samples={options.samples}",
        f"rollout.max_response_tokens={options.tokens}",
        f"optimizer.lr={options.lr}",
        "training.checkpoint_every=1",
        f"training.keep_checkpoints={options.steps}",
        "training.max_flat_steps=100000",
        *options.overrides,
    ]


def step_hashes(run: Path, step: int) -> dict[str, Any]:
    """Return the hashes of one step and a few of its numbers."""
    import numpy
    import pyarrow.parquet as parquet

    table = parquet.read_table(run / "rollouts" / f"step-{step:06d}.parquet")
    rows = sorted(table.to_pylist(), key=lambda row: (row["uid"], row["index"]))
    tokens = [numpy.array(row["response"], dtype="int64") for row in rows]
    rewards = numpy.array([row["reward"] for row in rows], dtype="float64")
    logprobs = [numpy.array(row["behavior_logprobs"], dtype="float32") for row in rows]
    weights, norm = hash_weights(run / "checkpoints" / f"step-{step}" / "policy")
    return {
        "step": step,
        "problems": digest(row["uid"].encode() for row in rows),
        "tokens": digest(one.tobytes() for one in tokens),
        "rewards": digest([rewards.tobytes()]),
        "logprobs": digest(one.tobytes() for one in logprobs),
        "weights": weights,
        "mean_reward": float(rewards.mean()),
        "num_tokens": sum(map(len, tokens)),
        "mean_logprob": float(numpy.concatenate(logprobs).astype("float64").mean()),
        "weight_norm": norm,
    }


def hash_weights(folder: Path) -> tuple[str, float]:
    """Return the hash of all tensors in the order of their names, and their norm."""
    import torch
    from safetensors import safe_open

    parts: list[bytes] = []
    square = 0.0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name)
                parts += [name.encode(), tensor.view(torch.uint8).numpy().tobytes()]
                square += float(tensor.double().square().sum())
    return digest(parts), square**0.5


def record(options: argparse.Namespace) -> None:
    """Train, and write a line about the machine and one per step."""
    with tempfile.TemporaryDirectory() as temporary:
        command = settings(options, Path(temporary))
        print("postgrad " + " ".join(command), flush=True)
        subprocess.run(
            [sys.executable, "-m", "postgrad.cli.main", *command],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        run = Path(temporary) / "run"
        lines = [machine(options)]
        lines += [step_hashes(run, step) for step in range(1, options.steps + 1)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    Path(options.out).write_text(text)
    print(text, end="", flush=True)


def compare(files: list[Path]) -> str:
    """Return a Markdown table: per file and column, the number of first steps that are equal."""
    recorded = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    first_machine, *reference = recorded[0]
    heads = ["machine", *HASHES, "mean log-prob of the last step", "weight norm"]
    rows = [heads, ["---"] * len(heads)]
    for about, *lines in recorded:
        cells = [f"{about['machine']}, {about['device']}, torch {about['torch']}, {about['dtype']}"]
        if (about["model"], about["seed"]) != (first_machine["model"], first_machine["seed"]):
            raise SystemExit("the files have other models or seeds; record them again")
        steps = min(len(lines), len(reference))
        for name in HASHES:
            equal = [lines[i][name] == reference[i][name] for i in range(steps)]
            count = equal.index(False) if False in equal else steps
            cells.append(f"{count} of {steps} steps")
        cells += [f"{lines[-1]['mean_logprob']:.6f}", f"{lines[-1]['weight_norm']:.6f}"]
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compare", nargs="+", type=Path, help="files of earlier calls")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--data", default="", help="default: two-digit sums")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--problems", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--out", default="hashes.jsonl")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args(arguments)
    if options.compare:
        print(compare(options.compare))
        return 0
    style = "" if options.model == "tiny" else ":boxed"
    options.data = options.data or f"arithmetic:2{style}"
    record(options)
    return 0
