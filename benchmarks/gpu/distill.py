"""Distillation and reward models on one GPU, with a real model and a verifier, as tables.

    python benchmarks/gpu/distill.py distill --model QWEN --data train.jsonl --test test.jsonl \
        --out FOLDER
    python benchmarks/gpu/distill.py reward --model QWEN --data train.jsonl --test test.jsonl \
        --out FOLDER
    python benchmarks/gpu/distill.py table --out FOLDER
    python benchmarks/gpu/distill.py both --smoke --out FOLDER        (a CPU and a tiny model)

`distill`: the student is the model without some of its blocks, after SFT on half of the teacher's
samples. From this start: on-policy distillation, GKD, SFT on the other half of the samples, and
GRPO, with the same number of responses per step.
`reward`: right and wrong samples of one problem become pairs. A reward model learns the pairs of
half of the problems and is measured on the other half, whose problems GRPO and PPO then use with
its scores as reward. The verifier measures the result, and GRPO on the verifier is the control.
`both`: the reward models train beside the runs of `distill`.

Every run is one `postgrad train` command. FOLDER/results.jsonl gets a line per step and run while
they train. The same command continues: finished runs and samples are not repeated, those that
failed start again in an empty folder. `benchmarks/research.py keep FOLDER` and `draw` put the
results into the docs.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from claims.claim import label_of  # noqa: E402
from claims.distillation import GRADER  # noqa: E402
from claims.problems import INSTRUCTION, write_problems, write_rows  # noqa: E402
from claims.results import Results  # noqa: E402
from claims.runs import Run, keep_policy, run_all  # noqa: E402
from distill_data import (  # noqa: E402
    cut_layers,
    evaluate_teacher,
    pair_rows,
    run_commands,
    sft_rows,
    teacher_samples,
)
from distill_table import TEACHER, describe, report  # noqa: E402

TEMPLATE_TOKENS = 32

# ---- the runs


def common(options: argparse.Namespace, label: str, seed: int, length: str) -> list[str]:
    """Return the settings of every run; `length` is its number of steps or epochs."""
    settings = [
        f"seed={seed}",
        f"runs={options.out / 'runs'}",
        f"name={label}",
        f"rollout.max_response_tokens={options.tokens}",
        length,
        "training.checkpoint_every=100000",
        "data.overlong=drop",
    ]
    if not options.smoke:
        settings += [
            "optimizer.kind=adamw_fused",
            f"rollout.cache_gib={options.cache_gib}",
        ]
    return [*settings, *options.overrides]


def validation(options: argparse.Namespace) -> list[str]:
    """Return the settings that measure greedy accuracy on test problems during a run."""
    return [
        f"data.validation={options.out / 'test.jsonl'}",
        "training.validation_temperature=0",
        f"training.validate_every={options.validate_every}",
    ]


def sampling(options: argparse.Namespace, samples: int) -> list[str]:
    """Return the settings of `options.rows` responses per step, `samples` per problem."""
    return [
        f"rollout.samples={samples}",
        f"training.problems_per_step={max(1, options.rows // samples)}",
    ]


def latest_policy(folder: Path) -> Path:
    """Return the model of the newest checkpoint of a run."""
    steps = (folder / "checkpoints").glob("step-*")
    return max(steps, key=lambda step: int(step.name.removeprefix("step-"))) / "policy"


def distill_runs(options: argparse.Namespace) -> list[Run]:
    """Prepare the student and its data, and return the runs of all arms and seeds."""
    teacher = options.model
    for name in ("first", "second"):
        rows = sft_rows(teacher_samples(options, name))
        write_rows(options.out / f"sft-{name}.jsonl", rows)
    student = cut_layers(teacher, options.out / "cut", options.keep_layers)
    rows = f"training.problems_per_step={options.rows}"
    heal = [
        f"model.path={student}",
        f"data.train={options.out / 'sft-first.jsonl'}",
        *common(options, "start", 0, f"training.epochs={options.start_epochs}"),
        rows,
        "optimizer.lr=5e-5" if not options.smoke else "optimizer.lr=3e-3",
    ]
    folder = options.out / "runs" / "start"
    if not (folder / "checkpoints").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        run_commands(["train", "sft", *heal])
        keep_policy(folder)
    start = latest_policy(folder)
    problems = f"data.train={options.out / 'second.jsonl'}"
    teaching = [problems, f"method.teacher={teacher}", *sampling(options, 4)]
    arms = {
        "on-policy distillation": ["distill", *teaching, f"optimizer.lr={options.lr_distill}"],
        "GKD (jsd)": ["gkd", *teaching, f"optimizer.lr={options.lr_sft}"],
        "SFT on teacher samples": [
            "sft",
            f"data.train={options.out / 'sft-second.jsonl'}",
            rows,
            "method.validate_accuracy=true",
            "optimizer.schedule=constant",
            f"optimizer.lr={options.lr_sft}",
        ],
        "GRPO": ["grpo", problems, *sampling(options, 8), f"optimizer.lr={options.lr_grpo}"],
    }
    return [
        train_run(options, "distill", arm, seed, f"model.path={start}", settings)
        for seed in options.seeds
        for arm, settings in arms.items()
    ]


def train_run(
    options: argparse.Namespace, part: str, arm: str, seed: int, model: str, settings: list[str]
) -> Run:
    label = label_of(part, arm, seed)
    every = options.validate_every
    own = [*common(options, label, seed, f"training.steps={options.steps}"), *validation(options)]
    # The settings of the arm come last, so that they win.
    arguments = ["train", settings[0], model, *own, *settings[1:]]
    # PPO also trains a critic of the policy's size.
    places = 2 if settings[0] == "ppo" else 1
    validates = options.steps % every == 0
    return Run(arm, seed, label, arguments, options.steps, validates, places=places)


def reward_model_runs(options: argparse.Namespace) -> list[Run]:
    """Prepare the pairs, and return one training of a reward model per seed."""
    first, second = (pair_rows(teacher_samples(options, name)) for name in ("first", "second"))
    train = write_rows(options.out / "pairs-train.jsonl", first)
    held_out: list[str] = []
    for name, cut in (("finished", False), ("cut", True)):
        pairs = [pair for pair in second if pair["cut"] == cut][: options.held_out_pairs]
        if pairs:
            held_out.append(f"{name}={write_rows(options.out / f'pairs-{name}.jsonl', pairs)}")
        print(f"{len(pairs)} held-out pairs, {name}", flush=True)
    print(f"{len(first)} pairs to train on", flush=True)
    runs: list[Run] = []
    for seed in options.seeds:
        label = label_of("reward_model", "pairs", seed)
        settings = [
            f"model.path={options.model}",
            f"data.train={train}",
            f"data.validation={','.join(held_out)}",
            *common(options, label, seed, f"training.epochs={options.reward_epochs}"),
            # A sampled response has more tokens with the end that the chat template writes.
            f"rollout.max_response_tokens={options.tokens + TEMPLATE_TOKENS}",
            f"training.problems_per_step={max(1, options.rows // 4)}",
            f"optimizer.lr={options.lr_reward}",
            "optimizer.warmup_steps=3",
        ]
        arguments = ["train", "reward_model", *settings]
        runs.append(Run("reward model", seed, label, arguments, keeps_policy=True))
    return runs


def reward_runs(options: argparse.Namespace) -> list[Run]:
    """Return the runs of the policy against the reward models that are trained, seed by seed."""
    problems = f"data.train={options.out / 'second.jsonl'}"
    runs: list[Run] = []
    for seed in options.seeds:
        folder = options.out / "runs" / label_of("reward_model", "pairs", seed)
        if not (folder / "checkpoints").is_dir():
            continue  # its training is not done
        scored = f"reward.verifier=model:{latest_policy(folder)} + 0*{GRADER}"
        lr = f"optimizer.lr={options.lr_grpo}"
        grpo = ["grpo", problems, *sampling(options, 8), lr]
        ppo = ["ppo", problems, *sampling(options, 4), lr, "method.critic_lr=1e-5"]
        arms = {
            "PPO on the reward model": [*ppo, scored],
            "GRPO on the reward model": [*grpo, scored],
            # The sum names the verifier's accuracy as in the other arms.
            "GRPO on the verifier": [*grpo, f"reward.verifier={GRADER} + 0"],
        }
        model = f"model.path={options.model}"
        for arm, settings in arms.items():
            runs.append(train_run(options, "reward", arm, seed, model, settings))
    return runs


# What each part runs, one list after the other: the reward models come before what they score.
STAGES = {
    "distill": ([distill_runs],),
    "reward": ([reward_model_runs], [reward_runs]),
    "both": ([reward_model_runs, distill_runs], [reward_runs]),
}


# ---- the command


def make_smoke(options: argparse.Namespace) -> None:
    """Replace model, data and sizes by those of a run on a CPU: sums of digits, a tiny model."""
    from postgrad.model.tiny import make_tiny

    options.data = "arithmetic:1"
    options.test = "arithmetic:1"
    options.instruction = ""
    options.problems, options.test_problems = 32, 8
    options.seeds, options.jobs = options.seeds[:1], 1
    options.steps, options.validate_every, options.rows, options.tokens = 2, 1, 16, 6
    options.samples, options.keep_layers = 16, 2
    options.overrides = ["model.device=cpu", "model.threads=1", *options.overrides]
    tiny = make_tiny(options.out / "tiny", seed=0, layers=3, width=32)
    folder = options.out / "runs" / "teacher"
    if not (folder / "checkpoints").is_dir():
        settings = [
            f"model.path={tiny}",
            "data.train=arithmetic:1",
            f"runs={options.out / 'runs'}",
            "name=teacher",
            "training.steps=40",
            "optimizer.lr=1e-2",
            "model.device=cpu",
            "model.threads=1",
        ]
        run_commands(["train", "sft", *settings])
    options.model = str(latest_policy(folder))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=(*STAGES, "table"))
    parser.add_argument("--model", help="folder of the teacher, e.g. Qwen2.5-Coder-1.5B-Instruct")
    parser.add_argument("--data", help="training problems: JSONL or parquet")
    parser.add_argument("--test", help="problems to measure on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=128, help="responses per step")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens per response")
    parser.add_argument("--samples", type=int, default=4, help="teacher samples per problem")
    parser.add_argument("--problems", type=int, default=1280, help="training problems, two halves")
    parser.add_argument("--test-problems", type=int, default=256)
    parser.add_argument("--validate-every", type=int, default=5)
    parser.add_argument("--keep-layers", type=int, default=25, help="blocks of the student")
    parser.add_argument("--start-epochs", type=int, default=4, help="of SFT of the cut student")
    parser.add_argument("--lr-distill", type=float, default=5e-6)
    parser.add_argument("--lr-sft", type=float, default=1e-5, help="of SFT and of GKD")
    parser.add_argument("--lr-grpo", type=float, default=2e-6)
    parser.add_argument("--lr-reward", type=float, default=1e-5)
    parser.add_argument("--reward-epochs", type=float, default=1.0)
    parser.add_argument(
        "--held-out-pairs", type=int, default=256, help="of each kind: both finished, one cut off"
    )
    parser.add_argument("--cache-gib", type=float, default=6.0, help="KV cache of each run")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time; PPO counts twice")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop all runs after this")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("overrides", nargs="*", help="key=value for all runs")
    options = parser.parse_intermixed_args()
    options.out = options.out.resolve()
    options.deadline = time.time() + options.limit_s
    options.instruction = INSTRUCTION
    needs_paths = options.part != "table" and not options.smoke
    if needs_paths and not (options.model and options.data and options.test):
        parser.error("--model, --data and --test are needed")
    return options


def main() -> None:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out)
    if options.part == "table":
        return report(options, results)
    if options.smoke:
        make_smoke(options)
    half = options.problems // 2
    for name, source, first, count in (
        ("first", options.data, 0, half),
        ("second", options.data, half, half),
        ("test", options.test, 0, options.test_problems),
    ):
        file = options.out / f"{name}.jsonl"
        write_problems(file, source, first, count, options.instruction)
    evaluate_teacher(options, options.model, options.out / TEACHER)
    for make_lists in STAGES[options.part]:
        runs = [run for make_runs in make_lists for run in make_runs(options)]
        for name in dict.fromkeys(run.label.partition("-")[0] for run in runs):
            arms = dict.fromkeys(run.arm for run in runs if run.label.startswith(f"{name}-"))
            results.add(**describe(options, name, list(arms)))
        run_all(runs, options.out, results, options.jobs, options.deadline, num_warm=2)
    report(options, results)


if __name__ == "__main__":
    main()
