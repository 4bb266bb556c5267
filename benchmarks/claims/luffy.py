"""Claim 2: LUFFY learns what on-policy RL cannot find, from demonstrations.

The task is an operation `a @ b` that the prompt does not define, so that all rewards are zero at
the start. The demonstrations come from a program. Beside the held-out problems of the same size
(`test`), problems with three digits (`longer`) show whether the rule was learned or the examples.
All methods have the same number of steps and problems per step; SFT then RL has half as many steps
of SFT before, and its values before training are those after the SFT.
"""

import argparse
from dataclasses import replace

from claims.claim import Arms, Claim, Column, lora, validation
from claims.problems import write_operation, write_secret


def arms(options: argparse.Namespace) -> Arms:
    longer = f"{options.out / 'test.jsonl'},longer={options.out / 'longer.jsonl'}"
    shared = [
        f"data.train={options.out / 'train.jsonl'}",
        *validation(options, parts=4),
        f"data.validation=test={longer}",
        f"training.problems_per_step={options.problems}",
        f"rollout.max_response_tokens={options.tokens}",
        *lora(options),
    ]
    rl = [*shared, f"rollout.samples={options.samples}", f"optimizer.lr={options.lr}"]
    rate = [f"optimizer.lr={options.lr_sft}", "optimizer.warmup_steps=3"]
    half = max(1, options.steps // 2)
    first = [
        f"training.steps={half}",
        f"training.problems_per_step={options.problems}",
        "optimizer.schedule=constant",
        "training.validate_every=0",
        "method.validate_accuracy=true",
        *rate,
    ]
    quoted = ",".join(f"'{override}'" for override in first)
    return {
        "LUFFY": ["luffy_small", *rl],
        "GRPO": ["luffy_on_policy_small", *rl],
        "SFT": [
            "sft",
            *shared,
            *rate,
            "optimizer.schedule=constant",
            "method.validate_accuracy=true",
        ],
        "SFT then RL": ["luffy_sft_rl_small", *rl, f"warmup.overrides=[{quoted}]"],
        "RL with SFT loss": ["luffy_rl_sft_small", *rl],
    }


CLAIM = Claim(
    question="Do demonstrations inside the groups teach what on-policy RL cannot find?",
    arms=arms,
    prepare=write_operation,
    columns=(
        Column("two digits before", "validation/test/accuracy", first=True, is_share=True),
        Column("two digits after", "validation/test/accuracy", is_share=True),
        Column("three digits before", "validation/longer/accuracy", first=True, is_share=True),
        Column("three digits after", "validation/longer/accuracy", is_share=True),
    ),
    curves=(
        "reward/on_policy",
        "validation/test/accuracy",
        "validation/longer/accuracy",
        "entropy",
    ),
    sizes={
        "steps": 30,
        "jobs": 5,
        "lr": 4e-5,
        "lr_sft": 1e-4,
        "problems": 16,
        "samples": 8,
        "tokens": 96,
        "lora_rank": 32,
        "cache_gib": 3.0,
    },
)

# `luffy` gives tokens of the demonstrations a probability near 0 at the start, and LUFFY's loss
# does not learn those. Here each token is plausible, and the answer is still not found by sampling.
SECRET = replace(
    CLAIM,
    question="Does LUFFY learn from demonstrations whose tokens are all plausible?",
    prepare=write_secret,
)
