"""SFT with each memory-saving option beside full fine-tuning: loss curve, memory and time.

    python benchmarks/gpu/low_memory.py --model MODEL_FOLDER --steps 60
    python benchmarks/gpu/low_memory.py --shape 4b --rows 8 --tokens 2048 --steps 20
    python benchmarks/gpu/low_memory.py --model tiny --data arithmetic:1 --steps 5 --tokens 16

Every option starts from the same weights and sees the same rows. Each runs in a child process with
a time limit; its line is printed, and appended to --out, when it ends. An option that --out has is
not run again. With --jobs N that many run at the same time, so their seconds say nothing. `--model
tiny` runs on a CPU, where the options that need a GPU are left out. With --shape the weights are
random (sizes.py) and so are the rows; --data names any data set with demonstrations instead.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FULL = "optimizer.kind=adamw"
LORA = ("model.lora.rank=16", "model.lora.alpha=32")
RECOMPUTE = "model.activation_checkpointing=true"
OPTIONS: dict[str, tuple[str, ...]] = {
    "full": (FULL,),
    "full, checkpointing": (FULL, RECOMPUTE),
    "full, 8-bit optimizer": ("optimizer.kind=adamw_8bit",),
    "full, offloaded optimizer": ("optimizer.kind=adamw_offloaded",),
    "LoRA": (FULL, *LORA),
    "LoRA, 4-bit base": (FULL, *LORA, "model.quantization=4bit"),
    "LoRA, 4-bit base, all": (
        "optimizer.kind=adamw_8bit",
        *LORA,
        "model.quantization=4bit",
        RECOMPUTE,
    ),
}


def run_child(args: argparse.Namespace, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train in this process; return the loss per step, peak memory and median seconds per step."""
    import torch
    from long_rows import make_batch

    from postgrad.cluster.host import build_host
    from postgrad.config.compose import compose
    from postgrad.methods import find_method
    from postgrad.training.resolve import resolve

    lr = args.lora_lr if any("lora.rank" in word for word in overrides) else args.lr
    settings = [
        f"model.path={args.model}",
        f"data.train={args.data or 'arithmetic:1'}",
        "data.template=plain",
        f"rollout.max_response_tokens={args.tokens}",
        f"training.steps={args.steps}",
        f"optimizer.lr={lr}",
        "name=low_memory",
        *overrides,
    ]
    config = resolve(compose("sft", settings, lambda name: find_method(name).Settings))
    host = build_host(config)
    policy = host.policy
    batches = read_batches(config, args) if args.data else None
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    losses: list[float] = []
    seconds: list[float] = []
    metrics: dict[str, float] = {}
    for step in range(1, args.steps + 1):
        # Random rows repeat every four steps, so that there is something to learn.
        batch = batches[step - 1] if batches else None
        if batch is None:
            batch = make_batch(args.rows, args.tokens, vocabulary, seed=step % 4)
        start = time.perf_counter()
        metrics = policy.update(batch, step)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(round(metrics["loss"], 4))
    return {
        "loss": losses,
        "memory_gib": round(metrics["memory_gib"], 2),
        "step_s": round(statistics.median(seconds[1:] or seconds), 4),
    }


def read_batches(config: Any, args: argparse.Namespace) -> list[Any]:
    """Return the rows of each step from --data, encoded as `postgrad train sft` encodes them."""
    from postgrad.training.prepare import prepare
    from postgrad.types import Batch, Trajectory

    config.training.problems_per_step = args.rows
    inputs = prepare(config)
    encode = partial(inputs.method.encode_row, inputs.encoder)
    rows: list[Trajectory] = []
    for number in range(args.steps * args.rows):
        problem = inputs.train[number % len(inputs.train)]
        row = encode(problem)
        rows.append(
            Trajectory(problem.uid, row.prompt, row.response, number, 0, loss_mask=row.loss_mask)
        )
    starts = range(0, len(rows), args.rows)
    return [Batch.of(rows[start : start + args.rows]) for start in starts]


def run_option(name: str, argv: list[str], limit_s: float) -> dict[str, Any]:
    """Run one option in a child process; return its result or why there is none."""
    command = [sys.executable, str(Path(__file__).resolve()), *argv, "--child", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {limit_s:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"failed": done.stderr.strip().splitlines()[-1:] or done.returncode}
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="", help="model folder, or tiny")
    parser.add_argument("--shape", default="", help="random weights of a shape of sizes.py")
    parser.add_argument("--data", default="", help="data set with demonstrations; else random rows")
    parser.add_argument("--rows", type=int, default=8, help="rows per step")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per random row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--lora-lr", type=float, default=1e-4, dest="lora_lr")
    parser.add_argument("--only", default="", help="options to run, separated by semicolons")
    parser.add_argument("--limit-s", type=float, default=120.0, dest="limit_s", help="per option")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where models are written")
    parser.add_argument("--jobs", type=int, default=1, help="options that run at the same time")
    parser.add_argument("--out", type=Path, default=None, help="file of results")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if args.shape:
        from sizes import make_model

        args.model = str(make_model(Path(args.folder), args.shape))
    if not args.model:
        parser.error("give --model or --shape")
    if args.child:
        print(json.dumps(run_child(args, OPTIONS[args.child])), flush=True)
        return
    names = [name.strip() for name in args.only.split(";")] if args.only else list(OPTIONS)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda name: measure_option(args, name), names))


def measure_option(args: argparse.Namespace, name: str) -> None:
    """Run one option unless it has a result; write its result."""
    from rows import is_measured, write_row

    work = f"low memory {args.shape or Path(args.model).name} {args.rows} rows: {name}"
    if is_measured(args.out, work, "postgrad"):
        return
    result = run_option(name, sys.argv[1:], args.limit_s)
    write_row(args.out, work, "postgrad", option=name, alone=args.jobs == 1, **result)


if __name__ == "__main__":
    main()
