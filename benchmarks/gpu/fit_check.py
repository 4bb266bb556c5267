"""How close `postgrad doctor --fit` is on this GPU: its memory beside measured memory and time.

    python benchmarks/gpu/fit_check.py --limit-s 540 --out speed.jsonl
    python benchmarks/gpu/fit_check.py --rows rollout-4b step-4b --limit-s 300 --out speed.jsonl
    python benchmarks/gpu/fit_check.py --rows try-update try-step      # on a CPU

The rows are those of docs/results.md and benchmarks/NOTES.md, with random weights of Qwen3's shapes
and prompts of 100 tokens. The memory of each row is estimated for an H200 as `postgrad doctor
--fit` does; then the row is run by sizes.py or update.py. Results are written after every row; a
row that has a result in --out is not run again. --estimate needs no GPU: it prints the estimates
only. speed_table.py writes the results into docs/results.md.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import is_measured, write_row
from sizes import make_config

HERE = Path(__file__).resolve().parent
PROMPT = 100
GIB = 2**30


LORA = "model.lora.rank=16"
OFFLOADED = "optimizer.kind=adamw_offloaded"
SHORT = "training.token_budget=4096"
ONE_STEP = ("--warmup", "0", "--steps", "1")


def recompute(kept: int) -> tuple[str, ...]:
    """Return the settings of checkpointing with this many blocks whose attention is kept."""
    return "model.activation_checkpointing=true", f"model.kept_attention_blocks={kept}"


LORA_4BIT = (LORA, "model.quantization=4bit", *recompute(0))


@dataclass(frozen=True)
class Row:
    """One measurement: a rollout, an update, or a whole GRPO step."""

    work: str  # rollout, update or step
    shape: str
    problems: int
    samples: int
    tokens: int
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # of the script that measures it

    @property
    def name(self) -> str:
        size = f"{self.problems} x {self.samples} x {self.tokens}"
        return " ".join([self.work, self.shape, size, *self.overrides])


ROWS = {
    "rollout-4b": Row("rollout", "4b", 32, 8, 1024, options=("--steps", "1")),
    "rollout-1.7b": Row("rollout", "1.7b", 128, 8, 512, options=("--steps", "1")),
    "step-4b": Row("step", "4b", 32, 8, 1024, options=("--steps", "1")),
    "step-1.7b": Row("step", "1.7b", 64, 16, 512, options=("--steps", "1")),
    "step-8b": Row("step", "8b", 16, 8, 512, (OFFLOADED,), ("--steps", "1")),
    "step-8b-short": Row("step", "8b", 16, 8, 512, (OFFLOADED, SHORT), ("--steps", "1")),
    # As many blocks keep their attention as stay below the memory that prime-rl published.
    "row-0.6b-16k": Row("update", "0.6b", 1, 1, 16_284, recompute(0)),
    "row-0.6b-65k": Row("update", "0.6b", 1, 1, 65_436, recompute(8)),
    "row-4b-lora-16k": Row("update", "4b", 1, 1, 16_284, (LORA, *recompute(36))),
    "row-4b-lora-65k": Row("update", "4b", 1, 1, 65_436, (LORA, *recompute(30))),
    "step-4b-long": Row("step", "4b", 8, 4, 8192, options=ONE_STEP),
    "row-8b-4bit-110k": Row("update", "8b", 1, 1, 112_540, LORA_4BIT, ("--steps", "0")),
    "row-8b-4bit-160k": Row("update", "8b", 1, 1, 163_740, LORA_4BIT, ("--steps", "0")),
    "row-0.6b-65k-attention": Row("update", "0.6b", 1, 1, 65_436, recompute(28)),
    "row-4b-lora-65k-none": Row("update", "4b", 1, 1, 65_436, (LORA, *recompute(0))),
    "row-0.6b-16k-kept": Row("update", "0.6b", 1, 1, 16_284),
    "row-0.6b-65k-kept": Row("update", "0.6b", 1, 1, 65_436),
    "row-4b-lora-16k-kept": Row("update", "4b", 1, 1, 16_284, (LORA,)),
    "step-4b-lora": Row("step", "4b", 32, 8, 1024, (LORA,), ("--steps", "1")),
    "step-0.6b-small": Row("step", "0.6b", 16, 8, 256),
    "step-1.7b-small": Row("step", "1.7b", 16, 8, 256),
    "update-4b": Row("update", "4b", 4, 8, 1024),
    "update-4b-short": Row("update", "4b", 4, 8, 1024, (SHORT,)),
    "update-4b-recompute": Row("update", "4b", 1, 1, 16_284, recompute(0)),
}
SMALL = ("--steps", "1")
TRY_ROWS = {  # seconds on a CPU
    "try-rollout": Row("rollout", "tiny", 2, 8, 8, options=SMALL),
    "try-update": Row("update", "tiny", 2, 2, 16, options=SMALL),
    "try-row": Row(
        "update", "tiny", 1, 1, 64, (LORA, "model.activation_checkpointing=true"), ("--steps", "0")
    ),
    "try-step": Row("step", "tiny", 2, 2, 8, options=ONE_STEP),
}


def make_plan(row: Row) -> Any:
    """Return the plan of a row as `postgrad doctor --fit` makes it from a run's settings."""
    from postgrad.config.compose import compose
    from postgrad.methods import find_method
    from postgrad.model.passes.layout import default_token_budget
    from postgrad.sizing.workload import GroupLengths, Plan, Workload

    model = make_config(row.shape)
    settings = {
        "model.path": "qwen3",
        "data.train": "problems.jsonl",
        "model.device": "cuda",
        "model.dtype": "bfloat16",
        "rollout.max_rows": 2048,
        "rollout.samples": row.samples,
        "rollout.max_response_tokens": row.tokens,
        "training.problems_per_step": row.problems,
        "optimizer.kind": "adamw_fused",
    }
    overrides = [*(f"{key}={value}" for key, value in settings.items()), *row.overrides]
    config = compose("grpo", overrides, lambda name: find_method(name).Settings)
    if not config.training.token_budget:
        import torch

        eager = bool(config.model.lora.rank or config.model.activation_checkpointing)
        budget = default_token_budget(torch.device("cuda"), eager)
        config.training.token_budget = budget
    groups = [GroupLengths(PROMPT, (), row.samples)] * row.problems
    return Plan(config, model, Workload(groups, PROMPT), packed=True)


def estimate(row: Row, gpu: Any) -> float:
    """Return the estimated GiB of what the row measures."""
    from postgrad.sizing import memory

    estimated = memory.estimate(make_plan(row), gpu)
    rollout_held = estimated.held.get("KV cache", 0) + estimated.held.get("decode graphs", 0)
    if row.work == "rollout":
        rollout = sum(estimated.phases["rollout"].values())
        return (estimated.held["weights"] + rollout_held + rollout) / GIB
    if row.work == "update":
        return (estimated.bytes_in("update") - rollout_held) / GIB
    return estimated.peak / GIB


def command_of(row: Row, folder: str, limit_s: float) -> list[str]:
    """Return the command that measures the row."""
    shared = ["--shape", row.shape, "--tokens", str(row.tokens), "--folder", folder]
    script = HERE / ("update.py" if row.work == "update" else "sizes.py")
    command = [sys.executable, str(script)]
    if row.work == "update":
        command += ["--problems", str(row.problems), "--samples", str(row.samples)]
    elif row.work == "rollout":
        command += ["rollout", "--rows", str(row.problems * row.samples)]
    else:
        command += ["step", "--problems", str(row.problems), "--samples", str(row.samples)]
        command += ["--limit-s", str(round(limit_s))]
    return [*command, *shared, *row.options, *row.overrides]


def measure(row: Row, folder: str, limit_s: float) -> dict[str, Any]:
    """Run the row; return its GiB and seconds and all that its script prints, or what failed."""
    command = command_of(row, folder, limit_s)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + 10)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {limit_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"failed": (done.stderr or done.stdout)[-500:]}
    result = json.loads(lines[-1])
    if "failed" in result:
        return {"failed": str(result["failed"])[:500], "log": str(result.get("log", ""))[-500:]}
    figures: dict[str, Any] = {"memory_gib": result["memory_gib"]}
    if row.work == "rollout":
        figures["sample_s"] = result["seconds"]
    elif row.work == "update":
        figures["update_s"] = result["update_s"]
    else:
        stages = result["stages"]
        figures["sample_s"] = stages.get("stage/sample_s", 0.0)
        figures["update_s"] = stages.get("stage/update_s", 0.0)
        figures["step_s"] = result["step_s"]
    return {"measured": figures, "result": result}


def show(row: Row, estimated: dict[str, float], measured: dict[str, Any]) -> str:
    """Return one line: estimated / measured and the difference in percent."""
    parts = [f"{row.name:<60}"]
    for key, value in estimated.items():
        part = f"{key} {value:.2f}"
        if measured.get(key):
            part += f" / {measured[key]:.2f} ({100 * (value / measured[key] - 1):+.0f}%)"
        parts.append(part)
    if "failed" in measured:
        parts.append(f"failed: {(str(measured['failed']).splitlines() or [''])[-1][:150]}")
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    names = [*ROWS, *TRY_ROWS]
    parser.add_argument("--rows", nargs="*", choices=names, help="default: all but try-...")
    parser.add_argument("--limit-s", type=float, default=540.0, dest="limit_s")
    parser.add_argument("--row-limit-s", type=float, default=540.0, dest="row_limit_s")
    parser.add_argument("--out", default="speed.jsonl", help="results, one line per row")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where models are written")
    parser.add_argument("--shared", action="store_true", help="others use the GPU: memory only")
    parser.add_argument("--estimate", action="store_true", help="run nothing")
    args = parser.parse_args()
    rows = [(ROWS | TRY_ROWS)[name] for name in args.rows or ROWS]
    from postgrad.sizing.devices import find_gpu

    gpu = find_gpu("h200")
    if args.estimate:
        for row in rows:
            print(show(row, {"memory_gib": estimate(row, gpu)}, {}), flush=True)
        return
    end = time.monotonic() + args.limit_s
    out = Path(args.out)
    for row in rows:
        remaining = min(end - time.monotonic() - 10, args.row_limit_s)
        if is_measured(out, row.name, "postgrad"):
            print(f"{row.name}: measured before", flush=True)
            continue
        if remaining < 20:
            print(f"{row.name}: no time left", flush=True)
            continue
        estimated = {"memory_gib": estimate(row, gpu)}
        result = measure(row, args.folder, remaining)
        command = shlex.join(command_of(row, "FOLDER", 600)[1:]).replace(f"{HERE}/", "")
        figures = {"estimated": estimated, "command": command, "shared": args.shared, **result}
        write_row(out, row.name, "postgrad", **figures)
        print(show(row, estimated, result.get("measured", result)), flush=True)


if __name__ == "__main__":
    main()
