"""Claim 2, second half: ExGRPO beside the same loss without replay, at equal rows per step.

Replay starts after the first step in which more than 35% of the rows succeed; a 1.5B model is past
this at once on GSM8K. One row of each replayed group is a replay instead of a sample: at equal rows
ExGRPO samples a little less than GRPO.
"""

import argparse

from claims.claim import Arms, Claim, Column, lora, sampling, validation
from claims.problems import write_task


def arms(options: argparse.Namespace) -> Arms:
    shared = [
        f"data.train={options.out / 'train.jsonl'}",
        *validation(options, parts=3),
        *sampling(options),
        *lora(options),
    ]
    return {"ExGRPO": ["exgrpo_small", *shared], "GRPO": ["luffy_on_policy_small", *shared]}


CLAIM = Claim(
    question="Does replay of the policy's own successes help at equal rows per step?",
    arms=arms,
    prepare=write_task,
    columns=(
        Column("test accuracy before", "validation/accuracy", first=True, is_share=True),
        Column("after", "validation/accuracy", is_share=True),
        Column("replayed groups per step", "replay/groups", count=5),
        Column("problems in the pool", "replay/pool"),
        Column("seconds per step", "step_s", count=10),
    ),
    curves=("reward/on_policy", "validation/accuracy", "entropy", "replay/pool"),
    sizes={
        "steps": 30,
        "jobs": 6,
        "lr": 2e-5,
        "problems": 32,
        "samples": 8,
        "tokens": 256,
        "lora_rank": 32,
    },
)
