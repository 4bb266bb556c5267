"""Claim 4: a classmate with another tokenizer learns more from the policy's thoughts.

The policy answers GSM8K, and the classmate (--classmate, e.g. SmolLM2) continues a part of each
response. `without classmate` measures the same rewards and does not use them.

Validations, before, during and after training, measure three things on the test problems: the
policy's accuracy, the classmate's accuracy after the first SHOWN of the words of each response, and
the monitor: a frozen model (--monitor, the starting policy unless named) that reads question and
response and predicts whether the verifier accepts it. The recipe has no markers, so the monitor
reads the whole response with its answer. F1 beside accuracy, because a monitor that says "right"
each time has the accuracy of the policy.
"""

import argparse

from claims.claim import HERE, Arms, Claim, Column, lora, sampling, validation
from claims.problems import write_sums, write_task

SHOWN = 0.6  # of the words, in validations; in training the share is random, 0.3 to 0.95
MONITOR_TOKENS = 256  # of a reply


def arms(options: argparse.Namespace) -> Arms:
    monitor = options.monitor or options.model
    shared = [
        f"data.train={options.out / 'train.jsonl'}",
        *validation(options, parts=2),
        *sampling(options),
        *lora(options),
        f"method.classmates=['{options.classmate}']",
        f"method.classmate_max_tokens={options.classmate_tokens}",
        f"method.keep={SHOWN}",
        f"reward.judge.monitor='{monitor}'",
        f"reward.judge.max_tokens={MONITOR_TOKENS}",
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
        Column("policy's test accuracy before", "validation/accuracy", first=True, is_share=True),
        Column("after", "validation/accuracy", is_share=True),
        Column("classmate's test accuracy before", "validation/classmate", first=True),
        Column("after", "validation/classmate"),
        Column("classmate's training reward, last 5 steps", "reward/classmate", count=5),
        Column("monitor's accuracy before", "validation/monitor/accuracy", first=True),
        Column("after", "validation/monitor/accuracy"),
        Column("monitor's F1 before", "validation/monitor/f1", first=True),
        Column("after", "validation/monitor/f1"),
        Column("replies without a prediction", "validation/monitor/dropped"),
        Column("correlation of the rewards, last 5 steps", "classmate/correlation", count=5),
        Column("seconds per step", "step_s", count=10),
    ),
    curves=(
        "reward/mean",
        "validation/accuracy",
        "validation/classmate",
        "validation/monitor/accuracy",
        "response/length",
    ),
    sizes={
        "steps": 25,
        "jobs": 3,
        "lr": 2e-5,
        "problems": 32,
        "samples": 8,
        "tokens": 256,
        "lora_rank": 32,
        "test_problems": 512,  # each is answered by three models per validation
    },
)


def collapse_arms(options: argparse.Namespace) -> Arms:
    """The sums at 135M, where the run with a classmate lost what the one without learned.

    The condition lets the classmates' reward count where the main reward is above 0. A verifier
    that pays 0.1 for a box without the right sum opens it for wrong answers. The warm-up has as
    many steps of GRPO before, which are not counted: the first 3 steps come after them.
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
        Column("right sums, first 3 steps", "reward/right", first=True, count=3),
        Column("right sums, last 5 steps", "reward/right", count=5),
        Column("boxes, last 5 steps", "reward/boxed", count=5),
        Column("classmate's reward, last 5 steps", "reward/classmate", count=5),
        Column("share gated, last 5 steps", "classmate/gated", count=5),
        Column("correlation of the rewards, last 5 steps", "classmate/correlation", count=5),
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
