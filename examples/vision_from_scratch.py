"""A vision-language model of 4M parameters learns to answer about pictures, from scratch.

    python examples/vision_from_scratch.py --seed 0 --device cuda
    python examples/vision_from_scratch.py --tasks sums count color --device cuda

The model has Qwen3-VL's architecture and random weights. It adds the numbers in pictures, counts
shapes or names their colors. SFT stops while many of its answers about held-out pictures are wrong;
GRPO alone continues from there. The larger form of `postgrad demo model=vision`. Other settings may
follow after the options, such as training.steps=500.
"""

import argparse
import sys
from pathlib import Path

from postgrad.cli.main import main
from postgrad.files import create_folder_once
from postgrad.model.load.tiny import make_tiny_vision

TASKS = {"sums": "arithmetic:2:picture", "count": "scenes:count", "color": "scenes:color"}
SFT = ["optimizer.lr=1e-3", "training.validation_problems=500"]
GRPO = ["optimizer.lr=3e-4", "training.steps=400", "training.problems_per_step=128"]


def sources(tasks: list[str], split: str) -> str:
    """Return the problems of some tasks as data.train and data.validation name them."""
    return ",".join(f"{TASKS[task]}:{split}" for task in tasks)


def run(seed: int, device: str, runs: Path, tasks: list[str], overrides: list[str]) -> int:
    """Make the model, run SFT and GRPO. The same command continues an interrupted run."""
    model = create_folder_once(
        runs / f"vision-model-{seed}",
        lambda folder: make_tiny_vision(folder, seed, layers=4, width=256),
    )
    arguments = [f"model.path={model}", f"model.device={device}", f"seed={seed}", f"runs={runs}"]
    # Colors are easy: beside them, sums and counts are still mostly wrong at 60%.
    stop_at = 0.33 if tasks == ["sums"] else 0.6
    sft = [*SFT, f"training.stop_at={stop_at}", f'"data.validation={sources(tasks, "validation")}"']
    arguments += ["warmup.recipe=demo_vision_sft", f"warmup.overrides=[{','.join(sft)}]"]
    arguments += [f"data.train={sources(tasks, 'train')}", f"name=vision-{seed}"]
    arguments.append(f"data.validation={sources(tasks, 'test')}")
    return main(["train", "demo_vision_grpo", *arguments, *GRPO, *overrides])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["sums"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    known, others = parser.parse_known_args()
    sys.exit(run(known.seed, known.device, known.runs, known.tasks, others))
