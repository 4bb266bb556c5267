"""GRPO by verl on the problems of a JSONL file, with Postgrad's verifier as reward function.

research.py starts it: `verl_grpo.py --model MODEL --train FILE --test FILE --folder RUN ...`.
RUN/metrics.jsonl gets a line per step with the names of Postgrad's metrics, and verl's own greedy
validation of every second step. Its settings are those of `peers.py`, which its documentation
recommends for one GPU; its defaults are those of Postgrad's recipe grpo: token mean, no KL, ratio
clip 0.2, constant learning rate. Its weights are float32 with bfloat16 passes.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers import read_verl_steps, start_verl, verl_sizes

from claims.peer import Metrics, parse_options
from postgrad.problem import Problem, Score
from postgrad.verifiers.grading.answers import gsm8k

VALIDATE_EVERY = 2
NAMES = {
    "reward/mean": "critic/rewards/mean",
    "response/length": "response_length/mean",
    "response/truncated": "response_length/clip_ratio",
    "step_s": "timing_s/step",  # without the validation
}


def write_parquet(source: str, file: Path) -> Path:
    """Write problems in verl's form."""
    import pandas

    from postgrad.data.problems import load_problems

    rows = [
        {
            "data_source": problem.data_source,
            "prompt": list(problem.messages),
            "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        }
        for problem in load_problems(source)
    ]
    pandas.DataFrame(rows).to_parquet(file)
    return file


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """Return Postgrad's score of a response; verl calls this."""
    problem = Problem(uid="", messages=(), ground_truth=ground_truth, data_source=data_source)
    verdict = gsm8k(solution_str, problem)
    return verdict.value if isinstance(verdict, Score) else 0.0


def metrics_of(step: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics by Postgrad's names."""
    values = {own: step[name] for own, name in NAMES.items()}
    found = [step[name] for name in step if name.startswith("val-core/") and "mean@1" in name]
    return values | ({"validation/accuracy": found[0]} if found else {})


def main() -> None:
    options = parse_options(__doc__)
    folder = Path(options.folder)
    metrics = Metrics(folder)
    target = folder / "verl"
    target.mkdir()
    graphs = [1 << power for power in range(9)]  # up to the 256 rows of a step
    settings = [
        f"data.train_files={write_parquet(options.train, target / 'train.parquet')}",
        f"data.val_files={write_parquet(options.test, target / 'test.parquet')}",
        f"data.val_max_samples={options.test_problems or -1}",
        f"data.seed={options.seed}",
        f"actor_rollout_ref.model.path={options.model}",
        f"actor_rollout_ref.actor.optim.lr={options.lr}",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.custom_reward_function.name=reward",
        *verl_sizes(
            options.problems, options.samples, options.prompt_tokens, options.tokens, graphs
        ),
        f"trainer.total_training_steps={options.steps}",
        "trainer.total_epochs=1000",
        f"trainer.test_freq={VALIDATE_EVERY}",
        f"hydra.run.dir={target}",
    ]
    with (target / "log").open("w") as log:
        child = start_verl(settings, target, log)
        written = 0
        while child.poll() is None and written < options.steps:
            time.sleep(0.1)
            for step in read_verl_steps(target / "metrics.jsonl")[written:]:
                written += 1
                metrics.write(written, **metrics_of(step))
    print((target / "log").read_text()[-3000:])
    raise SystemExit(child.returncode)


if __name__ == "__main__":
    main()
