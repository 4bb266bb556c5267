"""Tables and figures of distillation, reward models, and RL on their scores.

Their runs are those of benchmarks/gpu/distill.py of commit 3727bcf8.
"""

from claims.claim import Column, Report

ACCURACY = "validation/accuracy"
GRADER = "gsm8k"  # the verifier: the last number counts
GRADED = f"validation/part/{GRADER}"  # its accuracy, also where a reward model gives the reward
SCORE = "validation/part/reward_model"
ALL_STEPS = 1000

DISTILL = Report(
    question="Does a teacher's judgment of the student's own samples beat SFT on its samples?",
    columns=(
        Column("test accuracy before, greedy", ACCURACY, first=True),
        Column("after, greedy", ACCURACY, is_share=True),
        Column("tokens per response", "response/length", count=ALL_STEPS),
    ),
    curves=(ACCURACY, "response/length", "entropy"),
)
REWARD_MODEL = Report(
    question="How often does a reward model prefer the right one of two responses?",
    columns=(
        Column("held-out pairs before", ACCURACY, first=True),
        Column("after", ACCURACY),
        Column("after, both finished", "validation/finished/accuracy"),
        Column("after, wrong one cut off", "validation/cut/accuracy"),
    ),
    curves=("loss", "reward_model/accuracy", "grad_norm"),
)
REWARD = Report(
    question="Does the score of a reward model train a policy as the verifier does?",
    columns=(
        Column("test accuracy before, greedy", GRADED, first=True),
        Column("after, greedy", GRADED, is_share=True),
        Column("reward model's score before", SCORE, first=True),
        Column("after", SCORE),
        Column("tokens per response, last 3 steps", "response/length", count=3),
    ),
    curves=(GRADED, SCORE, "response/length", "entropy"),
)
# By name: the first word of the runs' labels.
REPORTS = {"distill": DISTILL, "reward_model": REWARD_MODEL, "reward": REWARD}
