"""GRPO runs with engine and trainer on one GPU: the native engine, and vLLM in sleep mode.

    python benchmarks/gpu/colocated.py --model SMOLLM2 [--gsm8k TRAIN_JSONL]
                                       [--engines native vllm] [--steps 8]

SMOLLM2 is a folder of SmolLM2-135M-Instruct. With GSM8K a step has 64 prompts x 16 samples x 256
tokens, as in compare.py; without it, boxed sums. Each engine runs in its own process. Prints for
each the median step after two warm-up steps, its stages, the difference of engine and trainer
log-probs in nats, and the peak memory of torch and of the device.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WARMUP_STEPS = 2


def overrides_for(gsm8k: str, folder: Path, samples: int, problems: int) -> list[str]:
    """Return the overrides of data and reward."""
    common = [
        f"rollout.samples={samples}",
        f"training.problems_per_step={problems}",
        "optimizer.kind=adamw_fused",
    ]
    if not gsm8k:
        boxed = f"reward.verifier={HERE.parent / 'claims' / 'rewards.py'}:boxed_sum"
        return [
            *common,
            "data.train=arithmetic:2:boxed:train",
            boxed,
            "rollout.max_response_tokens=64",
            "optimizer.lr=2e-5",
        ]
    sys.path.insert(0, str(HERE))
    from compare import INSTRUCTION

    data = folder / "questions.jsonl"
    lines = [json.loads(line) for line in Path(gsm8k).read_text().splitlines()][:2000]
    messages = [{"role": "user", "content": line["question"] + INSTRUCTION} for line in lines]
    rows = [
        {"prompt": [message], "reward_model": {"ground_truth": "0"}, "data_source": "gsm8k"}
        for message in messages
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_length = f"reward.verifier={HERE / 'compare_common.py'}:length_reward"
    return [
        *common,
        f"data.train={data}",
        by_length,
        "rollout.max_response_tokens=256",
        "optimizer.lr=1e-6",
    ]


def used_gib() -> float:
    """Return the used memory of the first GPU, by all processes; 0 without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True).stdout.strip() or 0) / 1024


def run(engine: str, model: str, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Return the figures of one run, or the end of its output if it failed."""
    command = [
        sys.executable,
        "-m",
        "postgrad.cli.main",
        "train",
        "grpo",
        f"model.path={model}",
        *overrides,
    ]
    command += [
        f"rollout.engine={engine}",
        f"runs={folder}",
        f"name={engine}",
        "training.checkpoint_every=1000",
    ]
    start_time = time.time()
    memory = [used_gib()]
    output = folder / f"{engine}.txt"
    with output.open("w") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while child.poll() is None:
            time.sleep(0.25)
            memory.append(used_gib())
    if child.returncode:
        return {
            "engine": engine,
            "failed": child.returncode,
            "output": output.read_text().strip()[-1500:],
        }
    lines = [
        json.loads(line) for line in (folder / engine / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [line for line in lines if "step_s" in line]
    first_gap = next((line for line in lines if "engine/start_gap_mean" in line), {})
    timed = steps[WARMUP_STEPS:] or steps

    def median(name: str) -> float:
        return round(statistics.median(line[name] for line in timed), 3)

    def mean(name: str) -> float | None:
        """Return the mean over the steps that have the metric: those with an update."""
        values = [line[name] for line in timed if name in line]
        return statistics.mean(values) if values else None

    return {
        "engine": engine,
        "steps": len(steps),
        "step_s": median("step_s"),
        "tokens_per_second": round(median("tokens_per_second")),
        "stages_s": {
            name.removeprefix("stage/").removesuffix("_s"): median(name)
            for name in timed[0]
            if name.startswith("stage/")
        },
        "start_gap": [
            first_gap.get("engine/start_gap_mean"),
            first_gap.get("engine/start_gap_max"),
        ],
        "gap_mean": mean("engine/gap_mean"),
        "gap_max": max(
            (line["engine/gap_max"] for line in timed if "engine/gap_max" in line), default=None
        ),
        "kl_engine": mean("kl/engine"),
        "rewards": [round(line["reward/mean"], 4) for line in (steps[0], steps[-1])],
        "torch_peak_gib": round(max(line["memory_gib"] for line in steps), 2),
        "device_peak_gib": round(max(memory) - memory[0], 2),
        "run_s": round(time.time() - start_time, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--gsm8k", default="")
    parser.add_argument("--engines", nargs="+", default=["native", "vllm"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("overrides", nargs="*", help="further key=value overrides of all runs")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        overrides = overrides_for(options.gsm8k, Path(folder), options.samples, options.problems)
        for engine in options.engines:
            own = [*overrides, f"training.steps={options.steps}", *options.overrides]
            results[engine] = run(engine, options.model, own, Path(folder))
            print(json.dumps(results[engine]), flush=True)
    if all("step_s" in results.get(engine, {}) for engine in ("native", "vllm")):
        ratio = results["native"]["step_s"] / results["vllm"]["step_s"]
        print(f"RATIO a step with native takes {ratio:.2f} times that with vllm")


if __name__ == "__main__":
    main()
