"""Runs of several methods and seeds on a real model and one GPU, as a table and curves.

    python benchmarks/research.py addition  --model SMOLLM2 --out FOLDER
    python benchmarks/research.py gsm8k     --model SMOLLM2 --data GSM8K_FOLDER --out FOLDER
    python benchmarks/research.py classmate --model SMOLLM2 --out FOLDER
    python benchmarks/research.py draw FOLDER/addition.json docs/addition.png

SMOLLM2 is a folder of SmolLM2-135M-Instruct (or `smollm2`); GSM8K_FOLDER holds train.jsonl and
test.jsonl. Each run is one `postgrad train` command, printed before it starts. FOLDER/addition.json
(gsm8k.json, classmate.json) holds the commands and the metrics.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve()
METRICS = (
    "validation/",
    "reward/",
    "entropy",
    "response/length",
    "internal/",
    "bupo/",
    "classmate/",
    "cot/",
    "kl/",
    "grad_norm",
    "step_s",
)


def boxed_sum(response: str, problem: object) -> dict[str, float]:
    """Return 1 for the right sum in the last box plus 0.1 for any box, as the TRL script does."""
    boxes = re.findall(r"boxed\{([^}]*)\}", response)
    right = float(bool(boxes) and boxes[-1].strip() == str(problem.ground_truth))  # type: ignore[attr-defined]
    boxed = float(bool(boxes) and bool(boxes[-1].strip()))
    return {"score": right + 0.1 * boxed, "right": right, "boxed": boxed}


def addition(options: argparse.Namespace) -> dict[str, list[str]]:
    common = [
        "data.train=arithmetic:2:boxed:train",
        f"reward.verifier={HERE}:boxed_sum",
        "rollout.samples=16",
        "training.problems_per_step=32",
        "rollout.max_response_tokens=64",
        "optimizer.lr=2e-5",
        f"training.steps={options.steps or 60}",
    ]
    as_grpo = [
        "training.updates_per_step=1",
        "training.token_budget=0",
        "training.validate_every=0",
        "training.checkpoint_every=100000",
    ]
    bupo = ["bupo", *common, *as_grpo, "method.phase_one_steps=15", "data.max_prompt_tokens=512"]
    return {
        "GRPO": ["grpo", *common],
        "BuPO after 8 of 30 blocks": [*bupo, "method.num_blocks=8"],
        "BuPO after 24 of 30 blocks": [*bupo, "method.num_blocks=24"],
    }


def gsm8k(options: argparse.Namespace) -> dict[str, list[str]]:
    steps = options.steps or 60
    common = [
        f"data.train={options.data}/train.jsonl",
        f"data.validation={options.data}/test.jsonl",
        "training.validation_problems=1319",
        "rollout.max_response_tokens=256",
        "training.problems_per_step=32",
        f"training.steps={steps}",
        "data.overlong=drop",
    ]
    rl = [*common, "rollout.samples=8", "optimizer.lr=1e-5"]
    sft = [
        f"training.steps={steps}",
        "training.problems_per_step=32",
        "optimizer.lr=2e-5",
        "optimizer.warmup_steps=5",
        "method.validate_accuracy=true",
    ]
    quoted = ",".join(f"'{override}'" for override in sft)
    warmup = f"warmup.overrides=[{quoted}]"
    return {
        "SFT": [
            "sft",
            *common,
            "optimizer.lr=2e-5",
            "optimizer.warmup_steps=5",
            "method.validate_accuracy=true",
        ],
        "GRPO": ["grpo", *rl],
        "LUFFY": ["luffy_small", *rl],
        "RL with SFT loss": ["luffy_rl_sft_small", *rl],
        "SFT then RL": ["luffy_sft_rl_small", *rl, warmup],
    }


def classmate(options: argparse.Namespace) -> dict[str, list[str]]:
    common = [
        "data.train=arithmetic:2:boxed:train",
        f"reward.verifier={HERE}:boxed_sum",
        "rollout.samples=8",
        "training.problems_per_step=32",
        "rollout.max_response_tokens=96",
        "optimizer.lr=2e-5",
        f"training.steps={options.steps or 60}",
    ]
    return {
        "classmate": ["classmate", *common],
        "without classmate": ["classmate_baseline_small", *common],
    }


def values_by_step(results: list[dict], method: str, key: str) -> dict[int, list[float]]:
    """Return the values of all seeds of one method, by step."""
    by_step: dict[int, list[float]] = {}
    for result in results:
        if result["method"] != method:
            continue
        for line in result["lines"]:
            if key in line:
                by_step.setdefault(int(line["step"]), []).append(line[key])
    return by_step


def draw(source: str, target: str) -> None:
    """Draw each method's curves: a line for the mean over seeds, a band from lowest to highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [r for r in json.loads(Path(source).read_text()) if r["lines"]]
    candidates = ["reward/right", "reward/mean", "reward/classmate", "entropy", "response/length"]
    present = {key for result in results for line in result["lines"] for key in line}
    keys = [key for key in candidates if key in present][:4]
    figure, axes = pyplot.subplots(1, len(keys), figsize=(4.2 * len(keys), 3.2), squeeze=False)
    for axis, key in zip(axes[0], keys, strict=True):
        for name in dict.fromkeys(r["method"] for r in results):
            by_step = values_by_step(results, name, key)
            steps = sorted(by_step)
            (curve,) = axis.plot(
                steps, [statistics.mean(by_step[s]) for s in steps], label=name, linewidth=1.4
            )
            low = [min(by_step[s]) for s in steps]
            high = [max(by_step[s]) for s in steps]
            axis.fill_between(steps, low, high, alpha=0.15, color=curve.get_color())
        axis.set_title(key)
        axis.set_xlabel("step")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


class Run(NamedTuple):
    """One `postgrad train` command of a method and a seed."""

    method: str
    seed: int
    label: str
    arguments: list[str]


class RunningRun(NamedTuple):
    run: Run
    process: "subprocess.Popen[bytes]"
    start: float


def plan_runs(options: argparse.Namespace, out: Path) -> list[Run]:
    """Return the runs of all methods and seeds."""
    methods = {"addition": addition, "gsm8k": gsm8k, "classmate": classmate}[options.what](options)
    runs: list[Run] = []
    for seed in options.seeds:
        for method, overrides in methods.items():
            if options.only and method not in options.only:
                continue
            label = f"{options.what}-{re.sub('[^a-z0-9]+', '-', method.lower())}-{seed}"
            common = [
                f"model.path={options.model}",
                f"seed={seed}",
                f"runs={out / 'runs'}",
                f"name={label}",
                "training.checkpoint_every=100000",
            ]
            recipe = overrides[0]
            arguments = ["train", recipe, *common, *overrides[1:], *options.overrides]
            runs.append(Run(method, seed, label, arguments))
    return runs


def start_run(run: Run, out: Path) -> RunningRun:
    print("postgrad " + " ".join(run.arguments), flush=True)
    log = (out / f"{run.label}.log").open("w")
    command = [sys.executable, "-m", "postgrad.cli.main", *run.arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    return RunningRun(run, process, time.time())


def read_result(finished: RunningRun, out: Path) -> dict:
    """Return the command, the time and the metrics of a run that has ended."""
    run = finished.run
    lines: list[dict] = []
    if finished.process.returncode == 0:
        metrics = (out / "runs" / run.label / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in metrics.splitlines()]
    else:
        print(f"FAILED {run.label}: {(out / f'{run.label}.log').read_text()[-400:]}", flush=True)
    kept = [
        {name: value for name, value in line.items() if name == "step" or name.startswith(METRICS)}
        for line in lines
    ]
    return {
        "method": run.method,
        "seed": run.seed,
        "command": run.arguments,
        "seconds": time.time() - finished.start,
        "lines": kept,
    }


def main() -> None:
    if sys.argv[1:2] == ["draw"]:
        return draw(*sys.argv[2:4])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("addition", "gsm8k", "classmate"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", default="../shared/data/gsm8k")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=9, help="runs at a time")
    parser.add_argument("--only", nargs="+", help="some of the methods")
    parser.add_argument("overrides", nargs="*", help="key=value for all runs")
    options = parser.parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    waiting = plan_runs(options, out)
    running: list[RunningRun] = []
    results: list[dict] = []
    start = time.time()
    while waiting or running:
        while waiting and len(running) < options.jobs:
            running.append(start_run(waiting.pop(0), out))
        time.sleep(0.5)
        for finished in [item for item in running if item.process.poll() is not None]:
            running.remove(finished)
            result = read_result(finished, out)
            results.append(result)
            elapsed = time.time() - start
            print(f"{finished.run.label}: {result['seconds']:.0f} s of {elapsed:.0f}", flush=True)
            (out / f"{options.what}.json").write_text(json.dumps(results))
    print_table(results, options.what)


def mean_of_last(result: dict, key: str, count: int = 5) -> float:
    """Return the mean of a metric over the last steps that have it."""
    values = [line[key] for line in result["lines"] if key in line][-count:]
    return statistics.mean(values) if values else float("nan")


def print_table(results: list[dict], what: str) -> None:
    """Print, per method, the last values of each seed and their mean."""
    keys = {
        "addition": [("reward/right", 5)],
        "gsm8k": [
            ("validation/accuracy", 1),
            ("validation/sampled_accuracy", 1),
            ("response/length", 5),
        ],
        "classmate": [("reward/mean", 5), ("reward/classmate", 5)],
    }[what]
    for method in dict.fromkeys(result["method"] for result in results):
        by_seed = [result for result in results if result["method"] == method]
        by_seed.sort(key=lambda result: result["seed"])
        cells = []
        for key, count in keys:
            values = [mean_of_last(result, key, count) for result in by_seed]
            numbers = " ".join(f"{value:.3f}" for value in values)
            cells.append(f"{key} {numbers} (mean {statistics.mean(values):.3f})")
        print(f"RESULT {method:<28} " + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
