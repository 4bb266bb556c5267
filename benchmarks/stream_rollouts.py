"""Seconds per GRPO step on the CPU when responses have very different lengths: three schedules.

    lock-step     sample, then train
    staleness=1   sample the next step during the update; weights change between steps
    stream        rollout.stream: weights change in flight; a step takes the groups that end first

All three have the same processes: one that trains and one that samples, one thread each. The model
is random, so a response ends with the same small probability after each token: lengths are
geometric. The learning rate is too small to change that. The first steps are warm-up.

    python benchmarks/stream_rollouts.py
    python benchmarks/stream_rollouts.py --steps 4 --width 32     a smoke test
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

MODES = {
    "lock-step": [],
    "staleness=1": ["rollout.staleness=1"],
    "stream, staleness=2": ["rollout.stream=true", "rollout.staleness=2"],
    "stream, staleness=4": ["rollout.stream=true", "rollout.staleness=4"],
}


def length_reward(response: str, problem: object) -> float:
    """Return a reward that differs within every group, so that no row is skipped."""
    return len(response) % 7 / 7


def run_mode(name: str, settings: list[str], model: Path, args: argparse.Namespace) -> str:
    """Train once and return the row of the table."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "postgrad.cli.main", "train", "grpo"]
        command += [f"model.path={model}", "model.device=cpu", "model.dtype=float32"]
        command += ["model.threads=1", "data.train=arithmetic:1", "data.template=plain"]
        command += [f"training.steps={args.steps}", f"training.problems_per_step={args.problems}"]
        command += [f"rollout.samples={args.samples}", "training.max_flat_steps=1000"]
        command += [f"rollout.max_response_tokens={args.tokens}", "optimizer.lr=1e-9"]
        command += [f"reward.verifier={Path(__file__).resolve()}:length_reward", "reward.workers=1"]
        command += ["training.validate_every=0", "training.checkpoint_every=1000"]
        command += ["cluster.backend=process", "cluster.engine_apart=true"]
        command += [f"runs={runs}", "name=run", *settings]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr[-2000:]}")
        seconds = time.perf_counter() - began
        text = (Path(runs) / "run" / "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if "step_s" in line]
    kept = lines[args.warmup :]
    # From the end of the warm-up to the end of the last step, with everything between steps.
    per_step = (kept[-1]["time"] - lines[args.warmup - 1]["time"]) / len(kept)
    ages = [line.get("staleness/mean", line.get("rollout/staleness", 0.0)) for line in kept]
    dropped = sum(line.get("staleness/dropped", 0.0) for line in kept)
    waited = mean(line.get("wait/rollout_s", line.get("stage/sample_s", 0.0)) for line in kept)
    length = mean(line["response/length"] for line in kept)
    longest = max(line["response/length_max"] for line in kept)
    print(f"{name}: {seconds:.0f} s with the start", file=sys.stderr)
    return (
        f"| {name} | {per_step:.2f} | {waited:.2f} | {mean(ages):.2f} | {dropped:.0f} "
        f"| {length:.1f} | {longest:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds per GRPO step of three schedules")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=0, help="default: a quarter of the steps")
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="longest response")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    args.warmup = args.warmup or max(1, args.steps // 4)
    from postgrad.model.tiny import make_tiny

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder) / "tiny", seed=0, layers=args.layers, width=args.width)
        print(
            "| schedule | s per step | waiting for rollouts, s | age in updates | dropped ", end=""
        )
        print("| mean length | longest |\n|---|---|---|---|---|---|---|")
        for name, settings in MODES.items():
            print(run_mode(name, settings, model, args), flush=True)


if __name__ == "__main__":
    main()
