"""Claim 6: what the gap between engine and trainer does, and what each correction changes.

The same run with the native engine, which has the trainer's own log-probs, and with vLLM without
and with each correction. Needs vLLM.
"""

import argparse

from claims.claim import HERE, Arms, Claim, Column, sampling
from claims.problems import write_sums

CORRECTIONS = ("none", "token", "sequence", "geometric", "bypass")


def arms(options: argparse.Namespace) -> Arms:
    shared = [
        "grpo",
        f"data.train={options.out / 'train.jsonl'}",
        f"reward.verifier={HERE / 'rewards.py'}:boxed_sum",
        *sampling(options),
    ]
    runs = {"native": shared}
    engine = f"rollout.engine={options.engine}"
    for correction in CORRECTIONS:
        runs[f"{options.engine}, {correction}"] = [
            *shared,
            engine,
            f"method.correction={correction}",
        ]
    runs[f"{options.engine}, rejection"] = [
        *shared,
        engine,
        "method.correction=rejection",
        "method.rejection.token_k1=0.5_2.0",
    ]
    return runs


CLAIM = Claim(
    question="Does a run with another engine need a correction, and which?",
    arms=arms,
    prepare=write_sums,
    columns=(
        Column("right sums, first 3 steps", "reward/right", first=True, count=3),
        Column("right sums, last 5 steps", "reward/right", count=5),
        Column("mean gap in nats, last 5 steps", "engine/gap_mean", count=5),
        Column("largest gap of a step in nats, mean of 5", "engine/gap_max", count=5),
        Column("gradient norm, last 5 steps", "grad_norm", count=5),
        Column("seconds per step", "step_s", count=10),
    ),
    curves=("reward/right", "engine/gap_mean", "grad_norm", "entropy"),
    validates=False,
    sizes={
        "steps": 200,
        "jobs": 4,
        "lr": 2e-5,
        "problems": 16,
        "samples": 16,
        "tokens": 64,
        "cache_gib": 1.5,
        "token_budget": 4096,
    },
)
