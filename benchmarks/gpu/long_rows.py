"""Training on one long row: tokens per second and memory, and the longest row that fits.

    python benchmarks/gpu/long_rows.py lengths --case 0.6b --lengths 16384,65536
    python benchmarks/gpu/long_rows.py longest --case 8b-4bit --memory-gib 24 --limit-s 300
    python benchmarks/gpu/long_rows.py longest --case tiny --start 64 --stop 512

Cases: full fine-tuning of the 0.6B shape, LoRA of the 4B shape, and LoRA on a 4-bit base of the 8B
shape, all with random weights (sizes.py) in bfloat16, every block recomputed. A step is one SFT
update over one row of random tokens: forward, backward and optimizer. `lengths` runs each length in
a child process. `longest` doubles the length until a step fails, then bisects, one step per length
in this process; --memory-gib gives torch no more memory than that, as on a smaller GPU. A line is
printed per length, and appended to --out, whose lengths are not run again.
"""

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rows import is_measured, read_rows, write_row

PROMPT_TOKENS = 16
TIME_LIMIT = "time limit"
GIB = 2**30
LORA = ("model.lora.rank=16", "model.lora.alpha=32")
RECOMPUTE = ("model.activation_checkpointing=true", "model.kept_attention_blocks=0")


class Case(NamedTuple):
    """A shape of sizes.py, or `tiny`, and the settings of its run."""

    shape: str
    overrides: tuple[str, ...]


CASES = {
    "0.6b": Case("0.6b", (*RECOMPUTE, "optimizer.kind=adamw_fused")),
    "4b-lora": Case("4b", (*RECOMPUTE, *LORA)),
    "8b-4bit": Case("8b", (*RECOMPUTE, *LORA, "model.quantization=4bit")),
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


class RowTrainer:
    """A policy that trains on one row of random tokens per step."""

    def __init__(self, case: Case, max_tokens: int, folder: Path) -> None:
        from sizes import make_model

        from postgrad.cluster.host import load_policy
        from postgrad.config.compose import compose
        from postgrad.methods import find_method
        from postgrad.model.policy import LocalPolicy
        from postgrad.training.resolve import resolve

        model = case.shape if case.shape == "tiny" else str(make_model(folder, case.shape))
        settings = [
            f"model.path={model}",
            "data.train=arithmetic:1",
            f"training.token_budget={max_tokens}",
            "training.steps=100",
            "name=long_rows",
            *case.overrides,
        ]
        config = resolve(compose("sft", settings, lambda name: find_method(name).Settings))
        method = find_method("sft")(config)
        self.policy = LocalPolicy(config, load_policy(config, method), method.objective)

    def train(self, tokens: int, steps: int) -> dict[str, Any]:
        """Train on one row; return tokens per second of the fastest step and peak memory."""
        import torch

        from postgrad.model.device import peak_memory_bytes, synchronize

        device = self.policy.device
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        vocabulary = int(self.policy.model.config.get_text_config().vocab_size)
        batch = make_batch(1, tokens, vocabulary)
        seconds: list[float] = []
        loss = 0.0
        for step in range(1, steps + 2):  # the first one compiles kernels
            start = time.perf_counter()
            loss = self.policy.update(batch, step)["loss"]
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        best = min(seconds[1:] or seconds)
        reserved = {}
        if on_gpu:
            reserved["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / GIB, 2)
        return {
            "tokens": tokens,
            "tokens_per_second": round(tokens / best, 1),
            "step_s": round(best, 2),
            "memory_gib": round(peak_memory_bytes(device) / GIB, 2),
            "loss": round(loss, 4),
            **reserved,
        }

    def fits(self, tokens: int) -> dict[str, Any]:
        """Train one step, or return why it failed; either leaves the memory as it was."""
        import torch

        from postgrad.errors import RunError

        try:
            result = self.train(tokens, 0)
        except (torch.OutOfMemoryError, RunError) as error:
            result = {"tokens": tokens, "failed": str(error).split("\n")[0][:300]}
        masters = self.policy.optimizer.masters.values()
        for weight in [*self.policy.model.parameters(), *masters]:
            weight.grad = None
        if self.policy.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        return result


class Search:
    """Runs lengths until the time is over."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.deadline = time.monotonic() + args.limit_s
        self.case = args.case + (f" in {args.memory_gib:g} GiB" if args.memory_gib else "")
        self.trainer: RowTrainer | None = None

    def run(self, tokens: int) -> dict[str, Any]:
        """Train on a row of this length; print and return its result.

        A length that fits, or does not, according to --out is not run again.
        """
        for row in read_rows([self.args.out]) if self.args.out else []:
            is_same = row.get("case") == self.case and row.get("tokens") == tokens
            if is_same and row.get("failed") != TIME_LIMIT:
                return row
        start = time.monotonic()
        result = self.try_here(tokens) if self.args.work == "longest" else self.try_apart(tokens)
        result["wall_s"] = round(time.monotonic() - start, 1)
        write_row(self.args.out, f"row {self.case} {tokens}", "postgrad", case=self.case, **result)
        return result

    def try_here(self, tokens: int) -> dict[str, Any]:
        """Train one step in this process, whose model is loaded once."""
        if self.trainer is None:
            limit_memory(self.args.memory_gib)
            case = CASES[self.args.case]
            self.trainer = RowTrainer(case, self.args.stop, Path(self.args.folder))
            self.trainer.fits(2 * PROMPT_TOKENS)  # so that there is optimizer state
        return self.trainer.fits(tokens)

    def try_apart(self, tokens: int) -> dict[str, Any]:
        """Train in a child process, which has all memory and a time limit."""
        left = self.deadline - time.monotonic()
        command = [sys.executable, str(Path(__file__).resolve()), "child"]
        command += ["--case", self.args.case, "--lengths", str(tokens)]
        command += ["--steps", str(self.args.steps), "--folder", self.args.folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 1.0))
        except subprocess.TimeoutExpired:
            return {"tokens": tokens, "failed": TIME_LIMIT}
        lines = done.stdout.splitlines()
        if done.returncode == 0 and lines:
            return json.loads(lines[-1])
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"tokens": tokens, "failed": reason[:300]}

    def longest(self) -> None:
        """Double the length until a step fails, then bisect in steps of 1/8 of the last power."""
        good = 0
        bad = 0
        memory = 0.0
        tokens = self.args.start
        while tokens <= self.args.stop and time.monotonic() < self.deadline:
            result = self.run(tokens)
            if "failed" in result:
                bad = tokens
            else:
                good = tokens
                memory = result["memory_gib"]
            if bad and (not good or bad - good <= max(good // 8, 1)):
                break
            tokens = (good + bad) // 2 if bad else 2 * tokens
        name = f"longest row {self.case}"
        is_complete = tokens > self.args.stop or bool(bad and bad - good <= max(good // 8, 1))
        if good and is_complete and not is_measured(self.args.out, name, "postgrad"):
            figures = {"longest": good, "fails_at": bad or None, "memory_gib": memory}
            write_row(self.args.out, name, "postgrad", **figures)


def limit_memory(gib: float) -> None:
    """Give torch no more than this much of the GPU's memory; 0: all of it."""
    import torch

    if not gib:
        return
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(gib * GIB / total, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("work", choices=("lengths", "longest", "child"))
    parser.add_argument("--case", choices=sorted(CASES), required=True)
    parser.add_argument("--lengths", default="16384", help="separated by commas")
    parser.add_argument("--start", type=int, default=32_768, help="longest: the first length")
    parser.add_argument("--stop", type=int, default=1 << 20, help="longest: no longer than this")
    parser.add_argument(
        "--steps", type=int, default=1, help="lengths: steps after the warm-up; 0: one in all"
    )
    parser.add_argument(
        "--memory-gib", type=float, default=0.0, dest="memory_gib", help="longest: 0: all there is"
    )
    parser.add_argument("--limit-s", type=float, default=540.0, dest="limit_s", help="of the call")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where models are written")
    parser.add_argument("--out", type=Path, default=None, help="file of results")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    if args.work == "child":
        trainer = RowTrainer(CASES[args.case], lengths[0], Path(args.folder))
        result = trainer.train(lengths[0], args.steps)
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
