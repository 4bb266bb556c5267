"""The section `reward` of the settings. schema.py explains how to read it."""

from dataclasses import dataclass, field

from postgrad.config.setting import setting


@dataclass
class JudgeConfig:
    model: str = setting(
        "",
        "judge model of verifier llm_judge: http://host:8000/v1#model, servers.json#model, "
        "a model path, or policy:live",
        only_with="reward.verifier~llm_judge",
    )
    template: str = setting(
        "sycophancy",
        "prompt of the judge: sycophancy, quality, safety, or a text file with {question} and "
        "{response}; pairwise, or a file with {question}, {first} and {second}, asks whether the "
        "response is better than the ground truth; rubric, or a file that also has {criterion}, "
        "rates each criterion of the problem's column rubric",
    )
    both_orders: bool = setting(
        False,
        "pairwise: ask with the answers in both orders and average the two verdicts",
        only_with="reward.verifier~llm_judge",
    )
    lowest: int = setting(1, "lowest rating; lower ones are raised to it")
    highest: int = setting(10, "highest rating; higher ones are lowered to it")
    max_tokens: int = setting(1024, "longest reply of the judge, in tokens", at_least=1)
    retries: int = setting(
        2, "times that the judge is asked again if its reply has no rating", at_least=0
    )
    monitor: str = setting(
        "",
        "model that predicts the rating from question and thought alone at each validation, "
        "in the format of reward.judge.model; empty: none",
    )


@dataclass
class RewardConfig:
    verifier: str = setting(
        "auto",
        "name of a verifier, llm_judge, package.module:function, file.py:function, or a weighted "
        "sum of them; auto chooses by the data_source of each problem",
    )
    objective: str = setting(
        "maximize",
        "maximize the verifier's score, or minimize it (rewards are negated)",
        choices=("maximize", "minimize"),
    )
    judge: JudgeConfig = field(
        default_factory=JudgeConfig,
        metadata={
            "help": "language model that scores responses",
            "only_with": ("reward.verifier~llm_judge", "reward.judge.monitor"),
        },
    )
    timeout_s: float = setting(5.0, "time limit for scoring one response, in seconds", above=0.0)
    workers: int = setting(
        0,
        "child processes that score responses; 0: one per core but one, 2 to 16; 2 for functions "
        "of your own, and in each verifier actor of Ray",
        at_least=0,
    )
    max_failure_rate: float = setting(
        0.5,
        "the run stops if the verifier fails on more than this share of the responses",
        at_least=0.0,
        at_most=1.0,
    )
