"""A GRPO run with the engine beside the trainer on one GPU: vLLM, asleep while the trainer works, and the native engine.

    python benchmarks/gpu/colocated.py --model SMOLLM2 [--gsm8k TRAIN_JSONL] [--engines native vllm] [--steps 8]

SMOLLM2 is a folder of SmolLM2-135M-Instruct. With GSM8K: 64 prompts x 16 samples x 256 tokens a step, as in compare.py; without, sums in a
box. Each engine runs in a process of its own. Prints for each the median step (the first two are warm-up), its stages, the gap of
engine and trainer in nats, torch's peak and the device's peak memory, and what vLLM gives back while it sleeps.
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
WARM_UP = 2


def overrides_for(gsm8k: str, folder: Path, samples: int, problems: int) -> list[str]:
    """The data and the reward of the runs."""
    common = [
        f"rollout.samples={samples}",
        f"training.problems_per_step={problems}",
        "optimizer.kind=adamw_fused",
    ]
    if not gsm8k:
        boxed = f"reward.verifier={HERE.parent / 'research.py'}:boxed_sum"
        return [
            *common,
            "data.train=arithmetic:2:boxed:train",
            boxed,
            "rollout.max_response_tokens=64",
            "optimizer.lr=2e-5",
        ]
    sys.path.insert(0, str(HERE))
    from compare import ASK

    data = folder / "questions.jsonl"
    lines = [json.loads(line) for line in Path(gsm8k).read_text().splitlines()][:2000]
    asked = [{"role": "user", "content": line["question"] + ASK} for line in lines]
    rows = [
        {"prompt": [ask], "reward_model": {"ground_truth": "0"}, "data_source": "gsm8k"}
        for ask in asked
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_length = f"reward.verifier={HERE / 'compare.py'}:length_reward"
    return [
        *common,
        f"data.train={data}",
        by_length,
        "rollout.max_response_tokens=256",
        "optimizer.lr=1e-6",
    ]


def used_gib() -> float:
    """Memory of the first GPU that is taken now, by whomever; 0 where nvidia-smi is not there."""
    if shutil.which("nvidia-smi") is None:
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True).stdout.strip() or 0) / 1024


def run(engine: str, model: str, overrides: list[str], folder: Path) -> dict[str, Any]:
    """One run; its figures, or the last lines of what it said where it failed."""
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
    began, memory = time.time(), [used_gib()]
    said = folder / f"{engine}.txt"
    with said.open("w") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while child.poll() is None:
            time.sleep(0.25)
            memory.append(used_gib())
    if child.returncode:
        return {
            "engine": engine,
            "failed": child.returncode,
            "said": said.read_text().strip()[-1500:],
        }
    lines = [
        json.loads(line) for line in (folder / engine / "metrics.jsonl").read_text().splitlines()
    ]
    steps, start = (
        [line for line in lines if "step_s" in line],
        next((x for x in lines if "engine/start_gap_mean" in x), {}),
    )
    timed = steps[WARM_UP:] or steps

    def median(name: str) -> float:
        return round(statistics.median(line[name] for line in timed), 3)

    def mean(name: str) -> float | None:
        """Over the steps that were updates: without a signal nothing is priced."""
        values = [line[name] for line in timed if name in line]
        return statistics.mean(values) if values else None

    return {
        "engine": engine,
        "steps": len(steps),
        "step_s": median("step_s"),
        "tokens_per_second": round(median("tokens_per_second")),
        "stages_s": {
            k.removeprefix("stage/").removesuffix("_s"): median(k)
            for k in timed[0]
            if k.startswith("stage/")
        },
        "start_gap": [start.get("engine/start_gap_mean"), start.get("engine/start_gap_max")],
        "gap_mean": mean("engine/gap_mean"),
        "gap_max": max(
            (line["engine/gap_max"] for line in timed if "engine/gap_max" in line), default=None
        ),
        "kl_engine": mean("kl/engine"),
        "rewards": [round(line["reward/mean"], 4) for line in (steps[0], steps[-1])],
        "torch_peak_gib": round(max(line["memory_gib"] for line in steps), 2),
        "device_peak_gib": round(max(memory) - memory[0], 2),
        "whole_run_s": round(time.time() - began, 1),
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
    parser.add_argument("overrides", nargs="*", help="further key=value words for all runs")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        overrides = overrides_for(options.gsm8k, Path(folder), options.samples, options.problems)
        for engine in options.engines:
            found[engine] = run(
                engine,
                options.model,
                [*overrides, f"training.steps={options.steps}", *options.overrides],
                Path(folder),
            )
            print(json.dumps(found[engine]), flush=True)
    if all("step_s" in found.get(engine, {}) for engine in ("native", "vllm")):
        print(
            f"RATIO a step with native takes {found['native']['step_s'] / found['vllm']['step_s']:.2f} of one with vllm"
        )


if __name__ == "__main__":
    main()
