"""Claim 4: a classmate with another tokenizer learns more from the policy's thoughts.

The policy answers GSM8K, and the classmate (--classmate, e.g. SmolLM2) continues a part of each
response. `without classmate` measures the same rewards and does not use them.
"""

import argparse

from claims.claim import HERE, Arms, Claim, Column, lora, sampling, validation
from claims.problems import write_sums, write_task


def arms(options: argparse.Namespace) -> Arms:
    shared = [
        f"data.train={options.out / 'train.jsonl'}",
        *validation(options, max(1, options.steps // 2)),
        *sampling(options),
        *lora(options),
        f"method.classmates=['{options.classmate}']",
        f"method.classmate_max_tokens={options.classmate_tokens}",
    ]
    return {
        "classmate": ["classmate", *shared],
        "weight 0.3": ["classmate", *shared, "method.classmate_weight=0.3"],
        "without classmate": ["classmate", *shared, "method.classmate_weight=0"],
    }


CLAIM = Claim(
    question="Does the classmate's accuracy rise, and does the policy's own accuracy hold?",
    arms=arms,
    prepare=write_task,
    columns=(
        Column("policy's test accuracy before", "validation/accuracy", first=True),
        Column("after", "validation/accuracy"),
        Column("classmate's reward, first steps", "reward/classmate", first=True, count=3),
        Column("last 5 steps", "reward/classmate", count=5),
        Column("correlation of the rewards", "classmate/correlation", count=5),
        Column("seconds per step", "step_s", count=10),
    ),
    curves=("reward/mean", "reward/classmate", "validation/accuracy", "response/length"),
    sizes={
        "steps": 25,
        "jobs": 3,
        "lr": 2e-5,
        "problems": 32,
        "samples": 8,
        "tokens": 256,
        "lora_rank": 32,
    },
)


def collapse_arms(options: argparse.Namespace) -> Arms:
    """The sums at 135M, where the run with a classmate lost what the one without learned.

    The condition lets the classmates' reward count where the main reward is above 0. A verifier
    that pays 0.1 for a box without the right sum opens it for wrong answers.
    """
    shared = [
        f"data.train={options.out / 'train.jsonl'}",
        *sampling(options),
        f"method.classmate_max_tokens={options.classmate_tokens}",
    ]
    boxed = f"reward.verifier={HERE / 'rewards.py'}:boxed_sum"
    right = f"reward.verifier={HERE / 'rewards.py'}:right_sum"
    classmate = ["classmate", *shared]
    return {
        "classmate": [*classmate, boxed],
        "only right sums are paid": [*classmate, right],
        "weight 0.1": [*classmate, boxed, "method.classmate_weight=0.1"],
        "normalized apart": [*classmate, boxed, "method.advantage=classmate_gdpo"],
        "after a warm-up": [
            "classmate_warmup_small",
            *shared,
            boxed,
            f"warmup.overrides=['training.steps={options.steps}','optimizer.lr={options.lr}',"
            f"'training.problems_per_step={options.problems}',"
            f"'rollout.samples={options.samples}']",
        ],
        "without classmate": [*classmate, boxed, "method.classmate_weight=0"],
    }


COLLAPSE = Claim(
    question="Why did Classmate-CoT lose the sums at 135M, and which setting does not?",
    arms=collapse_arms,
    prepare=write_sums,
    columns=(
        Column("right sums, last 5 steps", "reward/right", count=5),
        Column("boxes, last 5 steps", "reward/boxed", count=5),
        Column("classmate's reward, last 5 steps", "reward/classmate", count=5),
        Column("share gated", "classmate/gated", count=5),
        Column("correlation of the rewards", "classmate/correlation", count=5),
    ),
    curves=("reward/right", "reward/boxed", "reward/classmate", "entropy"),
    validates=False,
    sizes={
        "steps": 60,
        "jobs": 9,
        "lr": 2e-5,
        "problems": 32,
        "samples": 8,
        "tokens": 96,
        "classmate_tokens": 96,
        "cache_gib": 3.0,
        "token_budget": 8192,
    },
)
