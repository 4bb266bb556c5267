"""Claim 5: estimators and losses at equal settings, on sums that a 135M model can learn.

Each arm is its recipe as it is, with the same problems, samples, updates per step and learning
rate. DAPO alone replaces groups without a difference by those of further problems: its steps have
more responses than the others' (the column of refills says how often), and its training rewards are
those of the groups it keeps. So the arms are compared by greedy answers to test problems.
"""

import argparse

from claims.claim import HERE, Arms, Claim, Column, sampling, validation
from claims.problems import write_sums

RECIPES = {
    "GRPO": "grpo",
    "Dr. GRPO": "drgrpo",
    "RLOO": "rloo",
    "REINFORCE++": "reinforce_pp",
    "GSPO": "gspo",
    "CISPO": "cispo",
    "DAPO": "dapo",
}
RIGHT = "validation/part/right"  # validation/accuracy also counts the 0.1 for a box
UPDATES_PER_STEP = 2  # the first update of a step has ratio 1: clips need a second one


def arms(options: argparse.Namespace) -> Arms:
    shared = [
        f"data.train={options.out / 'train.jsonl'}",
        f"reward.verifier={HERE / 'rewards.py'}:boxed_sum",
        f"training.updates_per_step={UPDATES_PER_STEP}",
        *validation(options, parts=12),
        *sampling(options),
    ]
    own = {"DAPO": ["method.overlong_buffer=16"]}  # of 64 tokens
    return {name: [recipe, *shared, *own.get(name, [])] for name, recipe in RECIPES.items()}


CLAIM = Claim(
    question="Which estimators and losses learn two-digit sums fastest at equal settings?",
    arms=arms,
    prepare=write_sums,
    columns=(
        Column("right test sums before", RIGHT, first=True, is_share=True),
        Column("after", RIGHT, is_share=True),
        Column("entropy, last 5 steps", "entropy", count=5),
        Column("clipped share of tokens, last 5 steps", "policy/clip_fraction", count=5),
        Column("refills per step", "refill/times", count=1000),
    ),
    curves=(RIGHT, "entropy", "grad_norm", "response/length"),
    sizes={
        "steps": 120,  # at step 60 it still depends on the seed whether sums are right at all
        "jobs": 11,
        "lr": 2e-5,
        "problems": 32,
        "samples": 16,
        "tokens": 64,
        "test_problems": 512,
        "cache_gib": 3.0,
        "token_budget": 8192,
    },
)
