"""GRPO with an environment, a reasoning-gym generator and a tool: reward before and after.

| arm | what the policy does |
|---|---|
| guess | finds a number of 1 to 50 in at most 6 turns of `examples/guess.py` |
| gym | answers sums of 4 to 6 numbers, from reasoning-gym's generator chain_sum |
| calculator | computes products of large numbers with the tool `calculator` |

The rewards are those of 128 problems that training does not see. A machine without a network needs
reasoning_gym and the packages that it imports (`pip install 'postgrad[gym]'`).
"""

import argparse
import random
from pathlib import Path

from claims.claim import Arms, Claim, Column, lora, sampling, steps_per_part
from claims.problems import write_rows

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_TRAINING = 4000
NUM_HELD_OUT = 128
SAMPLES = 4  # per held-out problem, beside the greedy response
GENERATOR = "reasoning_gym:chain_sum:min_terms=4:max_terms=6:min_digits=2:max_digits=4"
QUESTION = "Compute {expression}. Use the calculator. Give the final result as \\boxed{{RESULT}}."


def write_products(options: argparse.Namespace) -> None:
    """Write the problems of the arm `calculator`."""
    rng = random.Random(0)
    rows: list[dict[str, str]] = []
    for _ in range(NUM_TRAINING + NUM_HELD_OUT):
        a, b, c = (rng.randrange(1000, 10_000) for _ in range(3))
        question = QUESTION.format(expression=f"{a} * {b} - {c}")
        rows.append({"question": question, "answer": str(a * b - c)})
    write_rows(options.out / "train.jsonl", rows[:NUM_TRAINING])
    write_rows(options.out / "test.jsonl", rows[NUM_TRAINING:])


def arms(options: argparse.Namespace) -> Arms:
    shared = [
        f"training.validation_samples={SAMPLES}",
        f"training.validate_every={steps_per_part(options, 3)}",
        f"training.validation_problems={options.test_problems}",
        "data.max_prompt_tokens=768",
        "optimizer.warmup_steps=3",
        *sampling(options),
        *lora(options),
    ]
    guess = [
        f"data.train=seeds:{NUM_TRAINING}",
        f"data.validation=seeds:{NUM_HELD_OUT}:start={NUM_TRAINING}",
        f"environment={EXAMPLES / 'guess.py'}:Guess",
        "environment.options.high=50",
        "rollout.max_turns=6",
        f"method.advantage={EXAMPLES / 'turn_advantages.py'}:turn_grpo",
    ]
    gym = [
        f"data.train={GENERATOR}:size={NUM_TRAINING}",
        f"data.validation={GENERATOR}:size={NUM_HELD_OUT}:seed=1",
    ]
    calculator = [
        f"data.train={options.out / 'train.jsonl'}",
        f"data.validation={options.out / 'test.jsonl'}",
        "reward.verifier=boxed",
        "rollout.tools=[calculator]",
        "rollout.max_turns=3",
    ]
    return {
        "guess": ["grpo", *shared, *guess],
        "gym": ["grpo", *shared, *gym],
        "calculator": ["grpo", *shared, *calculator],
    }


CLAIM = Claim(
    question="Does the policy learn turns of an environment, a generator's problems, and a tool?",
    arms=arms,
    prepare=write_products,
    columns=(
        Column("test reward before, greedy", "validation/accuracy", first=True),
        Column("after, greedy", "validation/accuracy"),
        Column("before, sampled", "validation/sampled_accuracy", first=True),
        Column("after, sampled", "validation/sampled_accuracy"),
        Column("turns, last 5 steps", "tools/turns", count=5),
        Column("tokens per response, last 5 steps", "response/length", count=5),
        Column("seconds per step", "step_s", count=10),
    ),
    curves=("reward/mean", "validation/sampled_accuracy", "tools/turns", "response/length"),
    sizes={
        "steps": 30,
        "jobs": 3,
        "seeds": [0],
        "lr": 4e-5,
        "problems": 16,
        "samples": 8,
        "tokens": 256,
        "lora_rank": 32,
    },
)
