"""How close `postgrad doctor --fit` is on this GPU: estimated and measured memory and time per row.

    python benchmarks/gpu/fit_check.py --limit-s 540 --out fit_check.jsonl
    python benchmarks/gpu/fit_check.py --rows 4 6 --limit-s 300

The rows are those of docs/results.md and measured.json, with random weights of Qwen3's shapes and
prompts of 100 tokens. Each row is estimated by the formulas that `postgrad doctor --fit` uses, with
the rates measured on this GPU, and then run by sizes.py or update.py. Results are written after
every row; a row that has a result in --out is not run again. --estimate needs no GPU: it prints the
estimates for an H200 only.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sizes import make_config

HERE = Path(__file__).resolve().parent
PROMPT = 100
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One measurement: a rollout, an update, or a whole GRPO step."""

    work: str  # rollout, update or step
    shape: str
    problems: int
    samples: int
    tokens: int
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        size = f"{self.problems} x {self.samples} x {self.tokens}"
        return " ".join([self.work, self.shape, size, *self.overrides])


ROWS = [
    Row("rollout", "4b", 32, 8, 1024),
    Row("rollout", "1.7b", 128, 8, 512),
    Row("step", "0.6b", 16, 8, 256),
    Row("step", "1.7b", 16, 8, 256),
    Row("step", "4b", 32, 8, 1024),
    Row("step", "1.7b", 64, 16, 512),
    Row("step", "8b", 16, 8, 512, ("optimizer.kind=adamw_offloaded",)),
    Row("update", "0.6b", 1, 1, 16_284),
    Row("update", "0.6b", 1, 1, 65_436),
    Row("update", "4b", 4, 8, 1024),
    Row("update", "4b", 1, 1, 16_284, ("model.lora.rank=16",)),
    Row("update", "4b", 1, 1, 16_284, ("model.activation_checkpointing=true",)),
    Row("step", "4b", 8, 4, 8192),
]


def make_plan(row: Row) -> Any:
    """Return the plan of a row as `postgrad doctor --fit` makes it from a run's settings."""
    from postgrad.config.compose import compose
    from postgrad.methods import find_method
    from postgrad.model.passes.layout import default_token_budget
    from postgrad.sizing.plan import GroupLengths, Plan, Workload

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

        # update.py composes without resolving, so its passes have the default of captured ones.
        eager = bool(config.model.lora.rank or config.model.activation_checkpointing)
        budget = default_token_budget(torch.device("cuda"), eager and row.work == "step")
        config.training.token_budget = budget
    groups = [GroupLengths(PROMPT, (), row.samples)] * row.problems
    return Plan(config, model, Workload(groups, PROMPT), packed=True)


def estimate(row: Row, gpu: Any, detachable: bool = True) -> dict[str, float]:
    """Return the estimated GiB and seconds of what the row measures."""
    from postgrad.sizing.gpu_memory import GpuEstimator
    from postgrad.sizing.gpu_time import GpuClock
    from postgrad.sizing.plan import lay_out_step

    plan = make_plan(row)
    estimator = GpuEstimator(gpu, detachable)
    memory = estimator.estimate(plan)
    cache = estimator.cache_bytes(plan, sum(memory.held.values()))
    layout = lay_out_step(plan, row.tokens)
    seconds = GpuClock(gpu, plan).step(["sample", "update"], layout, cache)
    held = sum(memory.held.values())
    rollout_held = memory.held.get("KV cache", 0) + memory.held.get("decode graphs", 0)
    if row.work == "rollout":
        peak = memory.held["weights"] + rollout_held + sum(memory.phases["rollout"].values())
        return {"memory_gib": peak / GIB, "sample_s": seconds["sample"]}
    if row.work == "update":
        peak = held - rollout_held + sum(memory.phases["update"].values())
        return {"memory_gib": peak / GIB, "update_s": seconds["update"]}
    return {
        "memory_gib": memory.peak / GIB,
        "sample_s": seconds["sample"],
        "update_s": seconds["update"],
    }


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
    return [*command, *shared, *row.overrides]


def measure(row: Row, folder: str, limit_s: float) -> dict[str, Any]:
    """Run the row; return its GiB and seconds, or what failed."""
    command = command_of(row, folder, limit_s)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + 30)
    except subprocess.TimeoutExpired:
        return {"failed": "time limit"}
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
    return figures


def show(row: Row, estimated: dict[str, float], measured: dict[str, Any]) -> str:
    """Return one line: estimated / measured and the difference in percent."""
    parts = [f"{row.name:<60}"]
    for key, value in estimated.items():
        part = f"{key} {value:.2f}"
        if measured.get(key):
            part += f" / {measured[key]:.2f} ({100 * (value / measured[key] - 1):+.0f}%)"
        parts.append(part)
    if "failed" in measured:
        parts.append(f"failed: {measured['failed'].splitlines()[-1][:150]}")
    return "  ".join(parts)


def read_results(file: Path) -> dict[str, Any]:
    """Return earlier results by the row's name."""
    if not file.is_file():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["name"]: line for line in lines if "failed" not in line["measured"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of rows, from 0; default all")
    parser.add_argument("--limit-s", type=float, default=540.0, dest="limit_s")
    parser.add_argument("--out", default="fit_check.jsonl", help="results, one line per row")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where models are written")
    parser.add_argument("--estimate", action="store_true", help="estimates for an H200 only")
    args = parser.parse_args()
    rows = ROWS if args.rows is None else [ROWS[number] for number in args.rows]
    from postgrad.sizing.devices import find_gpu

    if args.estimate:
        for row in rows:
            print(show(row, estimate(row, find_gpu("h200")), {}), flush=True)
        return
    import torch

    from postgrad.doctor.probe import measure_gpu

    end = time.monotonic() + args.limit_s
    gpu = measure_gpu(torch.device("cuda"))
    torch.cuda.empty_cache()
    print(f"{gpu.name}: {gpu.flops / 1e12:.0f} TFLOP/s, {gpu.bandwidth / 1e12:.2f} TB/s, "
          f"{gpu.memory / GIB:.1f} GiB free", flush=True)  # fmt: skip
    results = read_results(Path(args.out))
    for row in rows:
        estimated = estimate(row, gpu)
        measured = results.get(row.name, {}).get("measured")
        remaining = end - time.monotonic()
        if measured is None and remaining < 30:
            print(f"{row.name}: no time left", flush=True)
            continue
        if measured is None:
            measured = measure(row, args.folder, remaining - 20)
            line = {"name": row.name, "estimated": estimated, "measured": measured}
            with Path(args.out).open("a") as out:
                out.write(json.dumps(line) + "\n")
        print(show(row, estimated, measured), flush=True)


if __name__ == "__main__":
    main()
