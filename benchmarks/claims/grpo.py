"""Claim 1: GRPO improves a real model on a real task, beside TRL at equal settings.

All read the same problems with the same prompts, batch, learning rate and verifier. TRL samples
with vLLM in its process or, with `--engine transformers`, with transformers.generate, its default.
Seconds are those of runs that had the GPU alone (`--jobs 1`). On GSM8K a third arm is TRL without
its correction of vLLM's log-probs.
`grpo` trains on GSM8K; `math` on the easier problems of a part of DeepMath-103K, with MATH-500 as
test problems.
"""

import argparse
from dataclasses import replace

from claims.claim import TRL, Arms, Claim, Column, sampling, validation
from claims.problems import write_task


def peer_arguments(options: argparse.Namespace, engine: str) -> list[str]:
    """Return the arguments of other trainers' scripts: validations as in `arms`."""
    return [
        f"--train={options.out / 'train.jsonl'}",
        f"--test={options.out / 'test.jsonl'}",
        f"--steps={options.steps}",
        f"--problems={options.problems}",
        f"--samples={options.samples}",
        f"--tokens={options.tokens}",
        f"--prompt-tokens={options.prompt_tokens}",
        f"--lr={options.lr}",
        f"--validate-every={options.steps}",  # before the first and after the last step
        f"--test-problems={options.test_problems}",
        f"--token-budget={options.token_budget}",
        f"--cache-gib={options.cache_gib}",
        f"--engine={engine}",
        *(["--smoke"] if options.smoke else []),
    ]


def arms(options: argparse.Namespace) -> Arms:
    uses_vllm = options.engine == "vllm" and not options.smoke  # vLLM needs a GPU
    trl = [TRL, *peer_arguments(options, "vllm" if uses_vllm else "transformers")]
    uncorrected: Arms = {}
    if uses_vllm and options.task == "gsm8k":
        uncorrected = {"TRL with vLLM, no correction": [*trl, "--no-correction"]}
    return {
        "Postgrad": [
            "grpo",
            f"data.train={options.out / 'train.jsonl'}",
            f"data.max_prompt_tokens={options.prompt_tokens}",
            *validation(options, parts=1),
            *sampling(options),
        ],
        "TRL with vLLM" if uses_vllm else "TRL": trl,
        **uncorrected,
    }


CLAIM = Claim(
    question="Does GRPO raise the test accuracy of a 1.5B model, and how fast beside TRL?",
    arms=arms,
    prepare=write_task,
    columns=(
        Column("test accuracy before", "validation/accuracy", first=True, is_share=True),
        Column("after", "validation/accuracy", is_share=True),
        Column("training reward, last 5 steps", "reward/mean", count=5),
        Column("tokens per response, last 5 steps", "response/length", count=5),
        Column("truncated, first step", "response/truncated", first=True),
        Column("last 5 steps", "response/truncated", count=5),
        Column("seconds per step, last 10", "step_s", count=10, alone=True),
        Column("seconds of steps", "train_s", alone=True),
    ),
    curves=("reward/mean", "validation/accuracy", "response/length", "response/truncated"),
    axis="train_s",
    sizes={
        "steps": 25,
        "jobs": 3,
        "warm": 0,  # times are compared with TRL's, which include imports
        "lr": 2e-6,
        "problems": 32,
        "samples": 8,
        "tokens": 256,
    },
)
MATH = replace(
    CLAIM,
    question="Does GRPO on harder problems raise the accuracy on MATH-500, how fast beside TRL?",
    sizes=CLAIM.sizes
    | {
        "steps": 12,
        "lr": 4e-6,
        "tokens": 512,
        "prompt_tokens": 1024,
        "task": "math",
        "max_difficulty": 4.0,  # of up to 9.5; a 1.5B model solves few of the others
        "cache_gib": 8.0,
    },
)
