"""A vision-language model of 4M parameters learns to add the numbers in pictures, from scratch.

    python examples/vision_from_scratch.py --seed 0 --device cuda

The model has Qwen3-VL's architecture and random weights. SFT stops when a third of its answers to
held-out sums are right; GRPO alone continues from there. The larger form of `postgrad demo
model=vision`. Other settings may follow, such as training.steps=500.
"""

import argparse
import sys
from pathlib import Path

from postgrad.cli.main import main
from postgrad.files import create_folder_once
from postgrad.model.load.tiny import make_tiny_vision

SFT = ["optimizer.lr=1e-3", "training.stop_at=0.33", "training.validation_problems=500"]
SFT.append("data.validation=arithmetic:2:picture:validation")
GRPO = ["optimizer.lr=3e-4", "training.steps=400", "training.problems_per_step=128"]


def run(seed: int, device: str, runs: Path, overrides: list[str]) -> int:
    """Make the model, run SFT and GRPO. The same command continues an interrupted run."""
    model = create_folder_once(
        runs / f"vision-model-{seed}",
        lambda folder: make_tiny_vision(folder, seed, layers=4, width=256),
    )
    arguments = [f"model.path={model}", f"model.device={device}", f"seed={seed}", f"runs={runs}"]
    warmup = ["warmup.recipe=demo_vision_sft", f"warmup.overrides=[{','.join(SFT)}]"]
    name = f"name=vision-{seed}"
    return main(["train", "demo_vision_grpo", *arguments, *warmup, name, *GRPO, *overrides])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    known, others = parser.parse_known_args()
    sys.exit(run(known.seed, known.device, known.runs, others))
