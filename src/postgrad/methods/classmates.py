"""The classmates of Classmate-CoT: what each of them is asked, what they say, what the verifier makes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.classmate_rewards import pair
from postgrad.algorithms.thought import check_keep
from postgrad.config.schema import Config
from postgrad.errors import ConfigError
from postgrad.methods.base import LIVE, Speaker, Step
from postgrad.rewards.score import LLM_JUDGE
from postgrad.rollout.engine import Sampling, trajectory_seed
from postgrad.types import Failure, Problem, Score

HELP_OTHER, HELP_SIMILAR = "help_other_questions", "help_other_similar_questions"
REWARD_TYPES = ("vanilla", "random_truncate", "remove_wo_cot", HELP_OTHER, HELP_SIMILAR)
Verdicts = Callable[[Sequence[Problem], Sequence[str]], list[Score | Failure]]


@dataclass(frozen=True)
class Question:
    """What a row's classmates get: a problem, somebody's thought about it, and perhaps another problem to use the thought on."""

    problem: Problem
    thought: str
    other: Problem | None = None


class Classmates:
    """Several models with a tokenizer, markers and seeds of their own each."""

    def __init__(self, config: Config, speakers: Sequence[Speaker]) -> None:
        settings: Any = config.method
        self.speakers, self.seed, self.num_samples = speakers, config.seed, settings.classmate_samples
        self.sampling = Sampling(settings.classmate_temperature, settings.classmate_max_tokens, settings.classmate_top_p)
        self.starts = list(settings.classmate_cot_start) or [settings.cot_start] * len(speakers)
        self.ends = list(settings.classmate_cot_end) or [settings.cot_end] * len(speakers)
        self.keeps_alone = LIVE not in settings.classmates
        self.without: dict[str, list[float]] = {}  # what each classmate earns without a thought, by the problem's uid

    def ask(
        self, questions: Sequence[Question | None], names: Sequence[str], step: int
    ) -> tuple[list[list[str | None]], dict[str, float]]:
        """Every row's continuations, classmate after classmate, sample after sample, None where nothing was asked; and metrics.

        Seeds follow from (run seed, step, the row's name, classmate, sample).
        """
        texts: list[list[str | None]] = [[] for _ in questions]
        lengths: list[int] = []
        finishes: list[str] = []
        for k, speaker in enumerate(self.speakers):
            prompts = [self.prompt(k, question) if question else [] for question in questions]
            seeds = [[trajectory_seed(self.seed, step, f"classmate/{n}/{k}", s) for s in range(self.num_samples)] for n in names]
            for row, said in zip(texts, speaker.say(prompts, seeds, self.sampling), strict=True):
                row += [None] * self.num_samples if said is None else [speaker.prompts.decode(one.tokens) for one in said]
                lengths += [len(one.tokens) for one in said or ()]
                finishes += [one.finish for one in said or ()]
        count = max(1, len(lengths))
        metrics = {"asked": sum(q is not None for q in questions) / max(1, len(questions)), "length": sum(lengths) / count}
        return texts, {f"classmate/{name}": value for name, value in metrics.items()} | {
            "classmate/truncated": finishes.count("length") / count
        }

    def prompt(self, k: int, question: Question) -> list[int]:
        """The problem with the thought as the beginning of the answer; or the thought as an answer given, and another problem asked."""
        prompts = self.speakers[k].prompts
        if question.other is None:
            return prompts.encode_begun(question.problem, self.starts[k], question.thought, self.ends[k])
        turn = {"role": "assistant", "content": question.thought}
        return prompts.encode(
            replace(question.problem, uid="", messages=(*question.problem.messages, turn, *question.other.messages))
        )

    def judge(
        self, verdicts: Verdicts, problems: Sequence[Problem], texts: Sequence[Sequence[str | None]]
    ) -> tuple[Tensor, list[str]]:
        """(rows, classmates, samples) scores, NaN where there is no text; and for each row why one could not be judged, or ""."""
        said = [(i, j, text) for i, row in enumerate(texts) for j, text in enumerate(row) if text is not None]
        scores = torch.full((len(texts), len(self.speakers) * self.num_samples), torch.nan)
        reasons = [""] * len(texts)
        found = verdicts([problems[i] for i, _, _ in said], [text for _, _, text in said])
        for (i, j, _), verdict in zip(said, found, strict=True):
            if isinstance(verdict, Failure):
                reasons[i] = f"classmate, {verdict.kind}: {verdict.reason}"
            else:
                scores[i, j] = verdict.value
        return scores.view(len(texts), len(self.speakers), self.num_samples), reasons

    def alone(self, verdicts: Verdicts, problems: Sequence[Problem], unanswered: float) -> tuple[Tensor, list[str]]:
        """(rows, classmates, 1) what each earns without a thought, asked once a problem; and why it could not be judged, or ""."""
        if not self.keeps_alone:
            self.without.clear()  # the policy has moved on
        wanted = list({p.uid: p for p in problems if p.uid not in self.without}.values())
        texts, _ = self.ask([Question(p, "") for p in wanted], [f"alone/{p.uid}" for p in wanted], step=0)
        scores, reasons = self.judge(verdicts, wanted, texts)
        failed = {p.uid: reason for p, reason in zip(wanted, reasons, strict=True) if reason}
        means = torch.where(scores.isnan(), unanswered, scores).mean(-1).tolist()
        self.without |= {p.uid: row for p, row in zip(wanted, means, strict=True) if p.uid not in failed}
        rows = [self.without.get(p.uid, [0.0] * len(self.speakers)) for p in problems]
        return torch.tensor(rows)[:, :, None], [failed.get(p.uid, "") for p in problems]


def others(reward_type: str, uids: Sequence[str], step: Step, seed: int) -> dict[str, Problem]:
    """The other problem that each problem's thoughts are to help with; none where they help with their own."""
    if reward_type == HELP_OTHER:
        pairs = pair(uids, Random(trajectory_seed(seed, step.number, "pairs", 0)))
        return {uid: step.data.find(partner) for uid, partner in pairs.items()}
    return {uid: similar(step.data.find(uid)) for uid in uids} if reward_type == HELP_SIMILAR else {}


def similar(problem: Problem) -> Problem:
    """The problem that the data pair with this one. Raises ConfigError where there is none."""
    for extra in (problem.extra, problem.extra.get("extra_info"), problem.extra.get("reward_model")):
        if isinstance(extra, dict) and extra.get("paired_similar_q") and extra.get("paired_similar_q_gt"):
            messages = ({"role": "user", "content": str(extra["paired_similar_q"])},)
            return replace(problem, uid=f"{problem.uid}/similar", messages=messages, ground_truth=str(extra["paired_similar_q_gt"]))
    raise ConfigError(
        f"problem {problem.uid} has no paired_similar_q and paired_similar_q_gt; method.reward_type={HELP_SIMILAR} needs them"
    )


def check_problems(reward_type: str, problems: Sequence[Problem]) -> None:
    """Refuse data whose problems cannot be paired."""
    if reward_type == HELP_OTHER and len({problem.uid for problem in problems}) < 2:
        raise ConfigError(f"method.reward_type={HELP_OTHER} pairs problems, and data.train has one; give more")
    for problem in problems if reward_type == HELP_SIMILAR else ():
        similar(problem)


def check_settings(config: Config) -> None:
    """Refuse settings that cannot work together. Raises ConfigError."""
    settings: Any = config.method
    count = len(settings.classmates)
    if not count:
        raise ConfigError("method.classmates is empty; name at least one, or use method.condition=no_classmate")
    lists = {
        "classmate_shares": settings.classmate_shares,
        "classmate_cot_start": settings.classmate_cot_start,
        "classmate_cot_end": settings.classmate_cot_end,
    }
    for key, values in lists.items():
        if len(values) not in (0, count):
            raise ConfigError(f"method.{key} has {len(values)} entries for {count} classmates; give one for each, or none")
    if any(share <= 0 for share in settings.classmate_shares):
        raise ConfigError(f"method.classmate_shares={settings.classmate_shares} must all be above 0")
    check_keep(settings.keep)
    if settings.keep_unit == "words" and "-" in settings.keep:
        raise ConfigError(f"method.keep={settings.keep} counts tokens; use method.keep_unit=tokens, or a share")
    if settings.keep_min > settings.keep_max:
        raise ConfigError(f"method.keep_min={settings.keep_min} exceeds method.keep_max={settings.keep_max}; swap them")
    if settings.cot_start and not settings.cot_end:
        raise ConfigError(f"method.cot_start={settings.cot_start} needs method.cot_end; set both, or neither")
    if settings.kl == "reward":
        raise ConfigError("method.kl=reward mixes with one reward only, and here are two; use method.kl=loss")
    if config.reward.objective == "minimise" and settings.unanswered is None:
        raise ConfigError(
            "reward.objective=minimise needs method.unanswered, the score of a response without a final output: "
            "at least the verifier's highest, or it would pay not to answer"
        )
    if settings.consistency_weight and config.reward.verifier == LLM_JUDGE:
        raise ConfigError("method.consistency_weight compares answers, which llm_judge does not; set it to 0")
    if settings.reward_type == HELP_OTHER and (config.training.problems_per_step < 2 or settings.max_refills):
        raise ConfigError(
            f"method.reward_type={HELP_OTHER} pairs a step's problems; it needs two or more, and method.max_refills=0"
        )
