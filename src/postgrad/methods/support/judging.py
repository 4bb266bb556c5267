"""Where a language model that judges meets the models of a run: llm_judge for any method, and the monitor of thoughts."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from postgrad.config.schema import Config, JudgeConfig, RewardConfig, RolloutConfig
from postgrad.errors import ConfigError
from postgrad.judge.llm import RATINGS_STEM, LlmJudge, question_of
from postgrad.judge.monitor import monitor_metrics
from postgrad.judge.pairwise import PairJudge
from postgrad.judge.templates import is_pairwise, monitor_text, template_text
from postgrad.methods.base import Step
from postgrad.methods.support.checks import refuse_unread
from postgrad.problem import Problem
from postgrad.rollout.engine import Sampling, trajectory_seed
from postgrad.rollout.generator import Chat
from postgrad.types import Batch, Failure
from postgrad.verifiers.scorer import LLM_JUDGE, Scorer

AGAIN = 0.7  # temperature of a question that is asked again; the first time it is 0


class JudgeSettings(Protocol):
    """The settings a judge reads; a training run's and an evaluation's configuration have them."""

    @property
    def seed(self) -> int: ...

    @property
    def rollout(self) -> RolloutConfig: ...

    @property
    def reward(self) -> RewardConfig: ...


def check_judge(reward: RewardConfig) -> None:
    """Refuse a judge that cannot be asked. Raises ConfigError."""
    if reward.verifier == LLM_JUDGE and not reward.judge.model:
        raise ConfigError(
            "reward.verifier=llm_judge needs a judge; add reward.judge.model=http://host:8000/v1#model or a model path"
        )
    judge, plain = reward.judge, JudgeConfig()
    pairwise = is_pairwise(judge)
    unused = ("lowest", "highest", "monitor") if pairwise else ("both_orders",)
    for key in unused:
        if getattr(judge, key) != getattr(plain, key):
            kind = (
                "compares two answers and gives no ratings"
                if pairwise
                else "shows one answer at a time"
            )
            raise ConfigError(
                f"reward.judge.{key}={getattr(judge, key)} has no use: reward.judge.template={judge.template} {kind}; remove it"
            )


def check_references(reward: RewardConfig, problems: Iterable[Problem]) -> None:
    """Refuse problems without the answer that a judge of two answers compares with. Raises ConfigError."""
    if reward.verifier != LLM_JUDGE or not is_pairwise(reward.judge):
        return
    for problem in problems:
        if not problem.ground_truth:
            raise ConfigError(
                f"reward.judge.template={reward.judge.template} compares with a reference answer, and problem {problem.uid} has none; "
                "give it as the row's output, answer or ground_truth"
            )


def check_judge_used(reward: RewardConfig) -> None:
    """Refuse a judge that nobody would ask. Raises ConfigError."""
    if reward.judge.model and reward.verifier != LLM_JUDGE:
        raise ConfigError(
            f"reward.judge.model={reward.judge.model} is asked by reward.verifier=llm_judge only, and reward.verifier={reward.verifier}; "
            "change one of them"
        )
    if reward.verifier != LLM_JUDGE and not reward.judge.monitor:
        names = [field.name for field in dataclasses.fields(reward.judge)]
        refuse_unread(
            "reward.judge",
            reward.judge,
            names,
            f"with reward.verifier={reward.verifier} and no monitor: nobody is asked",
        )


def connect_scorer(
    config: JudgeSettings, scorer: Scorer, models: dict[str, Any], folder: Path
) -> None:
    """Give the score stage its model, where the verifier is one, and its verifiers, where they live elsewhere."""
    if "verifier" in models:
        scorer.backend = models["verifier"]
    if "judge" in models:
        scorer.judge = _asked(
            config,
            models["judge"],
            template_text(config.reward.judge),
            folder,
            config.reward.judge.model,
        )


def monitor(config: Config, chat: Chat, batch: Batch, step: Step, sign: float) -> dict[str, float]:
    """Return `monitor/...`: how well scores are predicted from question and thought alone. `sign` turns rewards into ratings."""
    scale, binary = config.reward.judge, config.reward.verifier != LLM_JUDGE
    low, high = (0, 1) if binary else (scale.lowest, scale.highest)
    asked = _asked(config, chat, monitor_text(scale, binary), None, scale.monitor)
    questions = [question_of(problem) for problem in step.problems(batch)]
    guesses = asked.rate(questions, batch.rows["cot"], low, high)
    ratings = (sign * batch.rows["reward"]).tolist()
    given = [
        None if text is None else rating
        for text, rating in zip(batch.rows["output"], ratings, strict=True)
    ]
    predicted = [None if isinstance(guess, Failure) else float(guess) for guess in guesses]
    return {
        f"monitor/{name}": value
        for name, value in monitor_metrics(predicted, given, binary).items()
    }


def _asked(
    config: JudgeSettings, chat: Chat, template: str, folder: Path | None, who: str
) -> LlmJudge:
    judge = config.reward.judge

    def ask(questions: Sequence[str], attempt: int) -> list[str | Failure]:
        sampling = Sampling(AGAIN if attempt else 0.0, judge.max_tokens)
        seeds = [trajectory_seed(config.seed, attempt, question, 0) for question in questions]
        return chat.reply(
            [[{"role": "user", "content": question}] for question in questions], sampling, seeds
        )

    file = folder / f"{RATINGS_STEM}.jsonl" if folder is not None and judge.keep_ratings else None
    if is_pairwise(judge):
        return PairJudge(judge, template, ask, file, who, config.seed, config.rollout.stop or ())
    return LlmJudge(judge, template, ask, file, who)
