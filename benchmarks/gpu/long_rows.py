"""Training on one long row: tokens per second and memory, and the longest row that fits.

    python benchmarks/gpu/long_rows.py lengths --case 0.6b --lengths 16384,65536
    python benchmarks/gpu/long_rows.py longest --case 8b-4bit --steps 0 --limit-s 500
    python benchmarks/gpu/long_rows.py longest --case tiny --start 64 --stop 512

Cases: full fine-tuning of the 0.6B shape, LoRA of the 4B shape, and LoRA on a 4-bit base of the 8B
shape, all with random weights (sizes.py) in bfloat16. A step is one SFT update over one row of
random tokens: forward, backward and optimizer. `longest` doubles the length until a step fails,
then bisects. Each length runs in a child process with a time limit; a line is printed per length,
and appended to --out, whose lengths are not run again.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rows import read_rows, write_row

PROMPT_TOKENS = 16
TIME_LIMIT = "time limit"
LORA = ("model.lora.rank=16", "model.lora.alpha=32")
RECOMPUTE = ("model.activation_checkpointing=true",)
OFFLOAD = (*RECOMPUTE, "model.activation_offload=true")


class Case(NamedTuple):
    """A shape of sizes.py, or `tiny`, and the settings of its run."""

    shape: str
    overrides: tuple[str, ...]


CASES = {
    "0.6b": Case("0.6b", (*RECOMPUTE, "optimizer.kind=adamw_fused")),
    "0.6b-offload": Case("0.6b", (*OFFLOAD, "optimizer.kind=adamw_fused")),
    "4b-lora": Case("4b", (*RECOMPUTE, *LORA)),
    "4b-lora-offload": Case("4b", (*OFFLOAD, *LORA)),
    "8b-4bit": Case("8b", (*RECOMPUTE, *LORA, "model.quantization=4bit")),
    "8b-4bit-offload": Case("8b", (*OFFLOAD, *LORA, "model.quantization=4bit")),
    "tiny": Case("tiny", (*RECOMPUTE, *LORA, "model.quantization=4bit", "model.device=cpu")),
}


def make_batch(rows: int, tokens: int, vocabulary: int, seed: int = 0) -> Any:
    """Return rows of random tokens; the loss reads all but the first PROMPT_TOKENS."""
    from postgrad.types import Batch, Trajectory

    rng = random.Random(seed)
    trajectories: list[Trajectory] = []
    for group in range(rows):
        ids = [rng.randrange(2, vocabulary) for _ in range(tokens)]
        trajectories.append(
            Trajectory(f"r{group}", ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:], group, 0)
        )
    return Batch.of(trajectories)


def train_row(case: Case, tokens: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train on one row in this process; return tokens per second and peak memory."""
    import torch
    from sizes import make_model

    from postgrad.cluster.host import load_policy
    from postgrad.config.compose import compose
    from postgrad.methods import find_method
    from postgrad.model.device import free_memory_bytes, peak_memory_bytes, synchronize
    from postgrad.model.policy import LocalPolicy
    from postgrad.training.prepare import resolve

    model = case.shape if case.shape == "tiny" else str(make_model(folder, case.shape))
    settings = [
        f"model.path={model}",
        "data.train=arithmetic:1",
        f"training.token_budget={tokens}",
        f"training.steps={steps + 1}",
        "name=long_rows",
        *case.overrides,
    ]
    config = resolve(compose("sft", settings, lambda name: find_method(name).Settings))
    method = find_method("sft")(config)
    policy = LocalPolicy(config, load_policy(config, method), method)
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    batch = make_batch(1, tokens, vocabulary)
    seconds: list[float] = []
    loss = 0.0
    for step in range(1, steps + 2):  # the first one compiles kernels
        start = time.perf_counter()
        loss = policy.update(batch, step)["loss"]
        synchronize(policy.device)
        seconds.append(time.perf_counter() - start)
        line = {"step": step, "loss": loss, "seconds": round(seconds[-1], 2)}
        print(json.dumps(line), file=sys.stderr, flush=True)
    result = {
        "tokens": tokens,
        "tokens_per_second": round(tokens / min(seconds[1:] or seconds), 1),
        "step_s": round(min(seconds[1:] or seconds), 2),
        "memory_gib": round(peak_memory_bytes(policy.device) / 2**30, 2),
        "loss": round(loss, 4),
    }
    if torch.cuda.is_available() and policy.device.type == "cuda":
        result["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
        result["free_gib"] = round(free_memory_bytes(policy.device) / 2**30, 2)
    return result


class Search:
    """Runs lengths in child processes until the time is over."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.deadline = time.monotonic() + args.limit_s
        self.memory: dict[int, float] = {}

    def run(self, tokens: int) -> dict[str, Any]:
        """Train on a row of this length in a child process; print and return its result.

        A length that fits, or does not, according to --out is not run again.
        """
        if known := self.measured(tokens):
            return known
        left = self.deadline - time.monotonic()
        command = [sys.executable, str(Path(__file__).resolve()), "child"]
        command += ["--case", self.args.case, "--lengths", str(tokens)]
        command += ["--steps", str(self.args.steps), "--folder", self.args.folder]
        start = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 1.0))
            lines = done.stdout.splitlines()
            result = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            result = {}
            reason = TIME_LIMIT
        if not result:
            result = {"tokens": tokens, "failed": reason[:300]}
        result["wall_s"] = round(time.monotonic() - start, 1)
        name = f"row {self.args.case} {tokens}"
        write_row(self.args.out, name, "postgrad", case=self.args.case, **result)
        return result

    def measured(self, tokens: int) -> dict[str, Any] | None:
        """Return the result of this length from --out, if it has one."""
        for row in read_rows([self.args.out]) if self.args.out else []:
            is_same = row.get("case") == self.args.case and row.get("tokens") == tokens
            if is_same and row.get("failed") != TIME_LIMIT:
                return row
        return None

    def longest(self) -> None:
        """Double the length until a step fails, then bisect in steps of 1/8 of the last power."""
        good = 0
        bad = 0
        tokens = self.args.start
        while not bad and tokens <= self.args.stop and time.monotonic() < self.deadline:
            result = self.run(tokens)
            if result.get("failed") == TIME_LIMIT:
                break
            if "failed" in result:
                bad = tokens
            else:
                self.memory[tokens] = result["memory_gib"]
                good = tokens
                tokens *= 2
        while bad - good > max(good // 8, 1) and good and time.monotonic() < self.deadline:
            middle = (good + bad) // 2
            result = self.run(middle)
            if result.get("failed") == TIME_LIMIT:
                break
            if "failed" in result:
                bad = middle
            else:
                self.memory[middle] = result["memory_gib"]
                good = middle
        if good:
            name = f"longest row {self.args.case}"
            figures = {
                "longest": good,
                "fails_at": bad or None,
                "memory_gib": self.memory.get(good),
            }
            write_row(self.args.out, name, "postgrad", **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("work", choices=("lengths", "longest", "child"))
    parser.add_argument("--case", choices=sorted(CASES), required=True)
    parser.add_argument("--lengths", default="16384", help="separated by commas")
    parser.add_argument("--start", type=int, default=32_768, help="longest: the first length")
    parser.add_argument("--stop", type=int, default=1 << 20, help="longest: no longer than this")
    parser.add_argument(
        "--steps", type=int, default=1, help="steps after the warm-up; 0: one in all"
    )
    parser.add_argument("--limit-s", type=float, default=540.0, dest="limit_s", help="of the call")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where models are written")
    parser.add_argument("--out", type=Path, default=None, help="file of results")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    if args.work == "child":
        result = train_row(CASES[args.case], lengths[0], args.steps, Path(args.folder))
        print(json.dumps(result), flush=True)
        return
    search = Search(args)
    if args.work == "longest":
        search.longest()
        return
    for length in lengths:
        search.run(length)


if __name__ == "__main__":
    main()
