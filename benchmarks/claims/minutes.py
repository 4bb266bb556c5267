"""The accuracy that GRPO reaches on GSM8K within 3, 6 and 9 minutes, beside TRL and verl.

The seconds count from the start of the command: imports, loading, engines and captured graphs are
among them. Validations after the first step are not; Postgrad also validates before it, which
counts. Each run has the GPU alone. An accuracy is that of the last validation within the time:
Postgrad validates every 20 steps and verl every 2, TRL before the step that would pass the time.
"""

import argparse

from claims.claim import TRL, VERL, Arms, Claim, Column, sampling, validation
from claims.grpo import peer_arguments
from claims.problems import write_task

MARKS_S = (180.0, 360.0, 540.0)
ACCURACY = "validation/accuracy"


def arms(options: argparse.Namespace) -> Arms:
    peer = peer_arguments(options, "transformers" if options.smoke else "vllm")
    marks = " ".join(f"{mark:.0f}" for mark in MARKS_S)
    return {
        "Postgrad": [
            "grpo",
            f"data.train={options.out / 'train.jsonl'}",
            f"data.max_prompt_tokens={options.prompt_tokens}",
            *validation(options, parts=max(1, options.steps // 20)),
            *sampling(options),
        ],
        "TRL with vLLM": [TRL, *peer, "--marks", *marks.split()],
        "verl with vLLM": [VERL, *peer],
    }


CLAIM = Claim(
    question="Which accuracy does GRPO reach within 3, 6 and 9 minutes, beside TRL and verl?",
    arms=arms,
    prepare=write_task,
    columns=(
        *(
            Column(f"accuracy within {mark / 60:.0f} min", ACCURACY, within_s=mark, is_share=True)
            for mark in MARKS_S
        ),
        Column("tokens per response, last 5 steps", "response/length", count=5),
        Column("seconds per step, last 10", "step_s", count=10, alone=True),
    ),
    curves=(ACCURACY, "reward/mean", "response/length"),
    axis="clock_s",
    seconds=MARKS_S[-1],
    sizes={
        "seeds": [0],
        "steps": 1000,  # more than any reaches
        "jobs": 1,
        "warm": 0,
        "lr": 4e-6,
        "problems": 32,
        "samples": 8,
        "tokens": 256,
        "cache_gib": 16.0,
        "token_budget": 8192,
    },
)
