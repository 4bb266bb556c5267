"""The research methods on a real model and one GPU: runs of several methods and seeds, side by side, as a table and curves.

    python benchmarks/research.py addition  --model SMOLLM2 --out FOLDER
    python benchmarks/research.py gsm8k     --model SMOLLM2 --data GSM8K_FOLDER --out FOLDER
    python benchmarks/research.py classmate --model SMOLLM2 --out FOLDER
    python benchmarks/research.py draw FOLDER/addition.json docs/addition.png

SMOLLM2 is a folder of SmolLM2-135M-Instruct (or `smollm2`), GSM8K_FOLDER holds train.jsonl and test.jsonl. Each run is one
`postgrad train` command, printed before it starts; FOLDER/results.json keeps the commands, the curves and the last figures.
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

HERE = Path(__file__).resolve()
KEPT = (
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
    """1 for the right sum in the last box, 0.1 for any box: the reward of the TRL script that the figures stand beside."""
    boxes = re.findall(r"boxed\{([^}]*)\}", response)
    right = float(bool(boxes) and boxes[-1].strip() == str(problem.ground_truth))  # type: ignore[attr-defined]
    boxed = float(bool(boxes) and bool(boxes[-1].strip()))
    return {"score": right + 0.1 * boxed, "right": right, "boxed": boxed}


def addition(options: argparse.Namespace) -> dict[str, list[str]]:
    common = [
        "data.train=arithmetic:2:boxed:train", f"reward.verifier={HERE}:boxed_sum", "rollout.samples=16", "training.problems_per_step=32",
        "rollout.max_response_tokens=64", "optimizer.lr=2e-5", f"training.steps={options.steps or 60}",
    ]  # fmt: skip
    same = [
        "training.updates_per_step=1",
        "training.token_budget=0",
        "training.validate_every=0",
        "training.checkpoint_every=100000",
    ]
    bupo = ["bupo", *common, *same, "method.phase_one_steps=15", "data.max_prompt_tokens=512"]
    return {
        "GRPO": ["grpo", *common],
        "BuPO after 8 of 30 blocks": [*bupo, "method.num_blocks=8"],
        "BuPO after 24 of 30 blocks": [*bupo, "method.num_blocks=24"],
    }


def gsm8k(options: argparse.Namespace) -> dict[str, list[str]]:
    steps = options.steps or 60
    common = [
        f"data.train={options.data}/train.jsonl", f"data.validation={options.data}/test.jsonl", "training.validation_problems=1319",
        "rollout.max_response_tokens=256", "training.problems_per_step=32", f"training.steps={steps}", "data.overlong=drop",
    ]  # fmt: skip
    rl = [*common, "rollout.samples=8", "optimizer.lr=1e-5"]
    sft = [
        f"training.steps={steps}",
        "training.problems_per_step=32",
        "optimizer.lr=2e-5",
        "optimizer.warmup_steps=5",
    ]
    first = (
        "warmup.overrides=["
        + ",".join(f"'{word}'" for word in [*sft, "method.validate_accuracy=true"])
        + "]"
    )
    return {
        "SFT": [
            "sft",
            *common,
            "optimizer.lr=2e-5",
            "optimizer.warmup_steps=5",
            "method.validate_accuracy=true",
        ],
        "GRPO": ["grpo", *rl],
        "LUFFY": ["luffy", *rl],
        "RL with SFT loss": ["luffy_rl_sft", *rl],
        "SFT then RL": ["luffy_sft_rl", *rl, first],
    }


def classmate(options: argparse.Namespace) -> dict[str, list[str]]:
    common = [
        "data.train=arithmetic:2:boxed:train", f"reward.verifier={HERE}:boxed_sum", "rollout.samples=8", "training.problems_per_step=32",
        "rollout.max_response_tokens=96", "optimizer.lr=2e-5", f"training.steps={options.steps or 60}",
    ]  # fmt: skip
    return {
        "classmate": ["classmate", *common],
        "without classmate": ["classmate_baseline", *common],
    }


def draw(source: str, target: str) -> None:
    """Curves of all methods: the mean over seeds as a line, the seeds as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [r for r in json.loads(Path(source).read_text()) if r["lines"]]
    wanted = ["reward/right", "reward/mean", "reward/classmate", "entropy", "response/length"]
    keys = [key for key in wanted if any(key in line for r in results for line in r["lines"])][:4]
    figure, axes = pyplot.subplots(1, len(keys), figsize=(4.2 * len(keys), 3.2), squeeze=False)
    for axis, key in zip(axes[0], keys, strict=True):
        for name in dict.fromkeys(r["method"] for r in results):
            by_step: dict[int, list[float]] = {}
            for line in (line for r in results if r["method"] == name for line in r["lines"]):
                if key in line:
                    by_step.setdefault(int(line["step"]), []).append(line[key])
            steps = sorted(by_step)
            (curve,) = axis.plot(
                steps, [statistics.mean(by_step[s]) for s in steps], label=name, linewidth=1.4
            )
            low, high = [min(by_step[s]) for s in steps], [max(by_step[s]) for s in steps]
            axis.fill_between(steps, low, high, alpha=0.15, color=curve.get_color())
        axis.set_title(key)
        axis.set_xlabel("step")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


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
    methods = {"addition": addition, "gsm8k": gsm8k, "classmate": classmate}[options.what](options)
    chosen = {
        name: overrides
        for name, overrides in methods.items()
        if not options.only or name in options.only
    }
    waiting = []
    for seed in options.seeds:
        for name, overrides in chosen.items():
            label = f"{options.what}-{re.sub('[^a-z0-9]+', '-', name.lower())}-{seed}"
            place = [
                f"model.path={options.model}",
                f"seed={seed}",
                f"runs={out / 'runs'}",
                f"name={label}",
                "training.checkpoint_every=100000",
            ]
            waiting.append(
                (
                    name,
                    seed,
                    label,
                    ["train", overrides[0], *place, *overrides[1:], *options.overrides],
                )
            )
    running: list[tuple] = []
    results: list[dict] = []
    began = time.time()
    while waiting or running:
        while waiting and len(running) < options.jobs:
            name, seed, label, overrides = waiting.pop(0)
            print("postgrad " + " ".join(overrides), flush=True)
            log = (out / f"{label}.log").open("w")
            command = [sys.executable, "-m", "postgrad.cli.main", *overrides]
            child = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            running.append((child, name, seed, label, overrides, time.time()))
        time.sleep(0.5)
        for item in [r for r in running if r[0].poll() is not None]:
            running.remove(item)
            child, name, seed, label, overrides, start = item
            folder = out / "runs" / label
            lines = (
                [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                if child.returncode == 0
                else []
            )
            if child.returncode:
                print(f"FAILED {label}: {(out / f'{label}.log').read_text()[-400:]}", flush=True)
            kept = [
                {k: v for k, v in line.items() if k == "step" or k.startswith(KEPT)}
                for line in lines
            ]
            seconds = time.time() - start
            results.append(
                {
                    "method": name,
                    "seed": seed,
                    "command": overrides,
                    "seconds": seconds,
                    "lines": kept,
                }
            )
            print(f"{label}: {seconds:.0f} s of {time.time() - began:.0f}", flush=True)
            (out / f"{options.what}.json").write_text(json.dumps(results))
    table(results, options.what)


def last(result: dict, key: str, count: int = 5) -> float:
    """Mean of a figure over the last steps that have it."""
    values = [line[key] for line in result["lines"] if key in line][-count:]
    return statistics.mean(values) if values else float("nan")


def table(results: list[dict], what: str) -> None:
    keys = {
        "addition": [("reward/right", 5)],
        "gsm8k": [
            ("validation/accuracy", 1),
            ("validation/sampled_accuracy", 1),
            ("response/length", 5),
        ],
        "classmate": [("reward/mean", 5), ("reward/classmate", 5)],
    }[what]
    for name in dict.fromkeys(result["method"] for result in results):
        mine = sorted((r for r in results if r["method"] == name), key=lambda r: r["seed"])
        cells = []
        for key, count in keys:
            values = [last(result, key, count) for result in mine]
            cells.append(
                f"{key} "
                + " ".join(f"{v:.3f}" for v in values)
                + f" (mean {statistics.mean(values):.3f})"
            )
        print(f"RESULT {name:<28} " + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
