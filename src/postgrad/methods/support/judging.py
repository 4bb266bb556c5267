"""Language models that judge: llm_judge as a verifier, and the monitor of thoughts."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from postgrad.config.schema import Config, JudgeConfig, RewardConfig, RolloutConfig
from postgrad.errors import Conflict, Missing, NoEffect
from postgrad.judge.templates import has_rubric, is_pairwise, monitor_text, template_text
from postgrad.methods.method import Step
from postgrad.problem import Problem, problem_label
from postgrad.rollout.engine import Sampling, trajectory_seed
from postgrad.types import Batch, Failure
from postgrad.verifiers.expression import LLM_JUDGE, asks_judge

if TYPE_CHECKING:
    from postgrad.judge.llm import LlmJudge
    from postgrad.rollout.generator import Chat
    from postgrad.verifiers.scorer import Scorer

RETRY_TEMPERATURE = 0.7  # of a question that is asked again; the first time it is 0


class JudgeSettings(Protocol):
    """The settings a judge reads; a training run's and an evaluation's configuration have them."""

    @property
    def seed(self) -> int: ...

    @property
    def rollout(self) -> RolloutConfig: ...

    @property
    def reward(self) -> RewardConfig: ...


def check_judge(reward: RewardConfig) -> None:
    """Raise ConfigError for a missing judge, or for settings that its template does not use."""
    judge = reward.judge
    if asks_judge(reward.verifier) and not judge.model:
        raise Missing(
            f"reward.verifier={reward.verifier} needs a judge; "
            "add reward.judge.model=http://host:8000/v1#model or a model path"
        )
    if judge.monitor and asks_judge(reward.verifier) and reward.verifier != LLM_JUDGE:
        raise Conflict(
            f"reward.judge.monitor={judge.monitor} predicts the judge's ratings, and "
            f"reward.verifier={reward.verifier} is a sum; remove it, or use "
            "reward.verifier=llm_judge"
        )
    if has_rubric(judge) and judge.monitor:
        raise NoEffect(
            f"reward.judge.monitor={judge.monitor} has no effect: a rubric gives a score per "
            "criterion, and a monitor predicts one rating; remove it"
        )
    if is_pairwise(judge):
        unused: tuple[str, ...] = ("lowest", "highest", "monitor")
        reason = "compares two answers and gives no ratings"
    else:
        unused = ("both_orders",)
        reason = "shows one answer at a time"
    default = JudgeConfig()
    for key in unused:
        value = getattr(judge, key)
        if value != getattr(default, key):
            raise NoEffect(
                f"reward.judge.{key}={value} has no effect: reward.judge.template={judge.template} "
                f"{reason}; remove it"
            )


def check_references(reward: RewardConfig, problems: Iterable[Problem]) -> None:
    """Refuses problems without the reference answer or the rubric that the judge needs.

    Raises ConfigError.
    """
    if not asks_judge(reward.verifier):
        return
    if has_rubric(reward.judge):
        from postgrad.judge.rubric import rubric_of

        for problem in problems:
            rubric_of(problem)
    if not is_pairwise(reward.judge):
        return
    for problem in problems:
        if not problem.ground_truth:
            raise Missing(
                f"reward.judge.template={reward.judge.template} compares with a reference "
                f"answer, and {problem_label(problem)} has none; "
                "add a column output, answer or ground_truth"
            )


def connect_scorer(
    config: JudgeSettings, scorer: "Scorer", models: dict[str, Any], folder: Path
) -> None:
    """Give the score stage its models, and its verifier pool if that runs on other machines."""
    scorer.reward_models = {
        term.role: models[term.role] for term in scorer.reward.models if term.role in models
    }
    if "verifier" in models:
        scorer.use_backend(models["verifier"])
    if "judge" in models:
        judge = config.reward.judge
        scorer.judge = _build_judge(
            config, models["judge"], template_text(judge), folder, judge.model
        )


def monitor(
    config: Config, chat: "Chat", batch: Batch, step: Step, sign: float
) -> dict[str, float]:
    """Metrics `monitor/...`: how well a model predicts the scores from question and thought.

    `sign` turns rewards into scores: -1 if the objective is to minimize them.
    """
    from postgrad.judge.llm import question_of
    from postgrad.judge.monitor import monitor_metrics

    judge = config.reward.judge
    is_binary = config.reward.verifier != LLM_JUDGE
    low, high = (0, 1) if is_binary else (judge.lowest, judge.highest)
    predictor = _build_judge(config, chat, monitor_text(judge, is_binary), None, judge.monitor)
    questions = [question_of(problem) for problem in step.problems(batch)]
    guesses = predictor.rate(questions, batch.rows["cot"], low, high)
    predicted = [None if isinstance(guess, Failure) else float(guess) for guess in guesses]
    scores: list[float | None] = (sign * batch.rows["reward"]).tolist()
    for i, output in enumerate(batch.rows["output"]):
        if output is None:
            scores[i] = None
    metrics = monitor_metrics(predicted, scores, is_binary)
    return {f"monitor/{name}": value for name, value in metrics.items()}


def _build_judge(
    config: JudgeSettings, chat: "Chat", template: str, folder: Path | None, model_name: str
) -> "LlmJudge":
    """Return a judge that asks `chat`.

    Its ratings are kept in `folder` if reward.judge.keep_ratings.
    """
    from postgrad.judge.llm import RATINGS_STEM, LlmJudge

    judge = config.reward.judge

    def ask(questions: Sequence[str], attempt: int) -> list[str | Failure]:
        temperature = RETRY_TEMPERATURE if attempt else 0.0
        sampling = Sampling(temperature, judge.max_tokens)
        seeds = [trajectory_seed(config.seed, attempt, question, 0) for question in questions]
        messages = [[{"role": "user", "content": question}] for question in questions]
        return chat.reply(messages, sampling, seeds)

    file = folder / f"{RATINGS_STEM}.jsonl" if folder is not None else None
    if is_pairwise(judge):
        from postgrad.judge.pairwise import PairJudge

        stop = config.rollout.stop or ()
        return PairJudge(judge, template, ask, file, model_name, config.seed, stop)
    # The monitor's template never has criteria: it predicts one number from the thought.
    if "{criterion}" in template:
        from postgrad.judge.rubric import RubricJudge

        return RubricJudge(judge, template, ask, file, model_name)
    return LlmJudge(judge, template, ask, file, model_name)
