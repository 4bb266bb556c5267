"""Classmate-CoT: a thought is rewarded for how well it helps other models (the classmates) answer.

Classmates read the question and the policy's thought and write the answer. The main reward scores
the policy's final output and applies to the whole response. The classmates' reward, by the same
verifier, applies to the tokens of the thought that they were shown. support/thinking.py splits
thoughts from outputs; rollout/classmates.py queries several models. docs/methods.md lists the
original's names and the differences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.advantages import ADVANTAGES
from postgrad.algorithms.classmate_rewards import CONDITIONS, channel_metrics, combine, gate, pair
from postgrad.config.schema import setting
from postgrad.data.ground_truth import with_ground_truth
from postgrad.data.pairs import paired_problem
from postgrad.errors import Conflict, Missing
from postgrad.methods.ports import LIVE, Ports, Role
from postgrad.methods.step import Step
from postgrad.methods.support.thinking import Thinking, ThinkingSettings
from postgrad.model.load.load import load_tokenizer
from postgrad.picture_processor import PictureProcessor
from postgrad.rollout.classmates import Classmates
from postgrad.rollout.engine import Sampling
from postgrad.rollout.generator import Generator
from postgrad.rollout.served_path import is_served, parse_served_path
from postgrad.types import Batch, Problem
from postgrad.verifiers.expression import asks_judge

HELP_OTHER = "help_other_questions"
HELP_SIMILAR = "help_other_similar_questions"
ESTIMATORS = tuple(name for name, one in ADVANTAGES.items() if "classmate" in one.needs)
REWARD_TYPES = ("vanilla", "random_truncate", "remove_wo_cot", HELP_OTHER, HELP_SIMILAR)

# Settings with one entry per classmate, or none.
PER_CLASSMATE = ("classmate_shares", "classmate_cot_start", "classmate_cot_end")
ASKED = "method.condition!=no_classmate"  # a condition of settings


@dataclass
class ClassmateSettings(ThinkingSettings):
    advantage: str = setting(
        "classmate_with", "how the two rewards become advantages", choices=ESTIMATORS
    )
    normalize_by_std: bool = setting(False, "divide a group's advantages by its standard deviation")
    normalize_answer: bool = setting(
        False,
        "classmate_gdpo: normalize the answer's advantages over the batch too",
        only_with="method.advantage=classmate_gdpo",
    )
    classmates: list[str] = setting(
        [""], "their models: paths, URLs, policy:live; empty: the starting policy, frozen"
    )
    classmate_shares: list[float] = setting(
        [], "weights of the classmates; empty: equal", above=0.0, only_with=ASKED
    )
    classmate_samples: int = setting(1, "continuations per classmate", at_least=1, only_with=ASKED)
    classmate_temperature: float = setting(
        1.0, "temperature; 0 is greedy", at_least=0.0, only_with=ASKED
    )
    classmate_top_p: float = setting(
        1.0,
        "nucleus sampling",
        above=0.0,
        at_most=1.0,
        only_with=f"{ASKED} and method.classmate_temperature",
    )
    classmate_max_tokens: int = setting(256, "longest continuation, in tokens", at_least=1)
    classmate_cot_start: list[str] = setting(
        [], "opening marker per classmate; empty: cot_start for all", only_with=ASKED
    )
    classmate_cot_end: list[str] = setting(
        [], "closing marker per classmate; empty: cot_end", only_with=ASKED
    )
    classmate_weight: float = setting(
        1.0,
        "weight of their reward, after normalization; 0 only measures it",
        at_least=0.0,
        only_with=ASKED,
    )
    classmate_tokens: str = setting(
        "cot", "tokens that their reward applies to", choices=("cot", "all"), only_with=ASKED
    )
    reward_type: str = setting(
        "vanilla", "what the classmates are asked; see docs/methods.md", choices=REWARD_TYPES
    )
    condition: str = setting(
        "no_classmate_when_main_incorrect", "when their reward counts", choices=CONDITIONS
    )
    consistency_weight: float = setting(
        0.0,
        "weight of the reward for leading classmates to the policy's answer",
        at_least=0.0,
        only_with=ASKED,
    )


class Classmate(Thinking):
    Settings = ClassmateSettings
    offers = (*Thinking.offers, "classmate")
    own_reward_parts = ("classmate", "consistency")
    counts = (*Thinking.counts, "classmate/failures")

    def check(self) -> None:
        super().check()
        settings = self.settings
        count = len(settings.classmates)
        if not count:
            raise Missing(
                "method.classmates is empty; name at least one, or use "
                "method.condition=no_classmate"
            )
        for key in PER_CLASSMATE:
            num_entries = len(getattr(settings, key))
            if num_entries not in (0, count):
                raise Conflict(
                    f"method.{key} has {num_entries} entries for {count} classmates; "
                    "give one per classmate, or none"
                )
        if settings.consistency_weight and asks_judge(self.config.reward.verifier):
            raise Conflict(
                "method.consistency_weight compares answers, which reward.verifier=llm_judge does "
                "not; set it to 0"
            )
        needs_partners = settings.reward_type == HELP_OTHER
        if needs_partners and (self.config.training.problems_per_step < 2 or settings.max_refills):
            raise Conflict(
                f"method.reward_type={HELP_OTHER} pairs the problems of a step; it needs "
                "training.problems_per_step of at least 2, and method.max_refills=0"
            )

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Refuses data without what the classmates are asked, and pictures that one cannot see."""
        has_pictures = any(problem.images for problem in problems)
        if has_pictures and self.settings.condition != "no_classmate":
            for path in self.settings.classmates:
                if path != LIVE:
                    if is_served(path):
                        _, path = parse_served_path(path)
                    model = replace(self.config.model, path=path or self.config.model.path)
                    PictureProcessor(load_tokenizer(model, self.config.seed))  # refuses if not
        if self.settings.reward_type == HELP_SIMILAR:
            for problem in problems:
                paired_problem(problem)

    check_validation_problems = check_problems

    def keeps_token_ids(self) -> bool:
        """Return whether no classmate answers: their token ids are not kept."""
        return self.settings.condition == "no_classmate"

    def roles(self) -> dict[str, Role]:
        roles = super().roles()
        if self.settings.condition != "no_classmate":
            for number, path in enumerate(self.settings.classmates, 1):
                roles[f"classmate-{number}"] = Role("engine", path)
        return roles

    def bind(self, ports: Ports) -> None:
        super().bind(ports)
        generators = [ports.models[name] for name in self.roles() if name.startswith("classmate-")]
        self.classmates = open_panel(self.settings, generators, self.config.seed)

    # ---- stages, on the driver

    def enrich(self, batch: Batch, step: Step) -> Batch:
        """Split the thoughts and let the classmates continue what they are shown of them."""
        random_share = self.settings.reward_type == "random_truncate"
        thoughts = self.split_thoughts(batch, step)
        shown = self.shown_thoughts(batch, thoughts, step, random_share)
        if not self.classmates.generators:
            return batch
        if self.settings.reward_type == HELP_OTHER:
            partners = pair(batch.rows["uid"], self.rng(step, "pairs"))
            batch.rows["partner"] = [partners[uid] for uid in batch.rows["uid"]]
        problems = step.problems(batch)
        targets = self.targets(batch, step)
        texts, metrics = self.classmates.generate(
            problems, shown, targets, batch.names, step.number
        )
        batch.rows["classmate_texts"] = texts
        step.metrics |= metrics
        return batch

    def targets(self, batch: Batch, step: Step) -> list[Problem]:
        """Return the problem of each row's classmates: its own, its partner's or a similar one."""
        if self.settings.reward_type == HELP_OTHER:
            return [step.data.find(uid) for uid in batch.rows["partner"]]
        problems = step.problems(batch)
        if self.settings.reward_type == HELP_SIMILAR:
            return [paired_problem(problem) for problem in problems]
        return problems

    def score(self, batch: Batch, step: Step) -> Batch:
        """Return the main reward, then the classmates' reward where the condition lets it count."""
        batch = super().score(batch, step)
        if not self.classmates.generators:
            batch.rows["reward/classmate"] = torch.zeros(len(batch))
            batch.rows["classmate_reward"] = torch.zeros(len(batch))
            return batch
        batch = self.score_classmates(batch, step)
        length_penalty = batch.rows.get("reward/overlong", torch.zeros(len(batch)))
        main = self.sign * (batch.rows["reward"] - length_penalty)
        ungated = batch.rows["reward/classmate"]
        reward = gate(main, ungated, self.settings.condition)
        batch.rows["classmate_reward"] = reward
        step.metrics["classmate/gated"] = float((reward != ungated).double().mean())
        step.metrics |= channel_metrics(batch.rows["reward"], reward, batch.rows["group"])
        return batch

    def score_classmates(self, batch: Batch, step: Step) -> Batch:
        """Set `reward/classmate`, the mean over classmates and samples.

        Rows with a continuation that could not be scored leave the batch.
        """
        settings = self.settings
        targets = self.targets(batch, step)
        scores, failures = score_continuations(self, self.classmates, batch, targets, step)
        if settings.consistency_weight:
            batch.rows["reward/consistency"] = consistency(self, self.classmates, batch, step)
        batch.rows["classmate_scores"] = without_nan(scores)
        shares = settings.classmate_shares
        batch.rows["reward/classmate"] = combine(scores, shares, self.no_output_score)
        batch.rows["failure"] = failures
        before = step.metrics.get("classmate/failures", 0.0)
        step.metrics["classmate/failures"] = before + float(sum(map(bool, failures)))
        return self.drop_failures(batch, step)

    def advantage_columns(self, batch: Batch, step: Step) -> dict[str, Any]:
        return super().advantage_columns(batch, step) | {
            "main_rewards": batch.rows["reward"],
            "classmate_rewards": batch.rows["classmate_reward"],
        }

    def thought_rewards(self) -> dict[str, float]:
        weight = self.settings.consistency_weight
        return {"consistency": weight} if weight else {}

    def thought_metrics(self, batch: Batch, step: Step) -> dict[str, float]:
        reward = float(batch.rows["reward/classmate"].mean())
        return super().thought_metrics(batch, step) | {"classmate": reward}

    # ---- state

    def state(self) -> dict[str, Any]:
        return super().state() | {"without": self.classmates.solo_scores}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.classmates.solo_scores = state["without"]


def open_panel(
    settings: ClassmateSettings, generators: Sequence[Generator], seed: int
) -> Classmates:
    """Return the classmates, each with its markers of a thought."""
    count = len(generators)
    return Classmates(
        "classmate",
        generators,
        settings.classmate_cot_start or [settings.cot_start] * count,
        settings.classmate_cot_end or [settings.cot_end] * count,
        Sampling(
            settings.classmate_temperature,
            settings.classmate_max_tokens,
            settings.classmate_top_p,
        ),
        settings.classmate_samples,
        seed,
    )


def score_continuations(
    method: Thinking, classmates: Classmates, batch: Batch, targets: Sequence[Problem], step: Step
) -> tuple[Tensor, list[str]]:
    """(rows, classmates, samples) scores, NaN without a text; and per row why scoring failed.

    `targets` has the problem per row that the classmates answered. With reward_type=remove_wo_cot
    the score of each classmate without the thought is subtracted.
    """
    scorer = method.ports.scorer
    texts = batch.rows["classmate_texts"]
    scores, failures = classmates.score(scorer, targets, texts)
    if method.settings.reward_type != "remove_wo_cot":
        return scores, failures
    changes = LIVE in method.settings.classmates
    alone, alone_failures = classmates.score_alone(
        scorer, step.problems(batch), method.no_output_score, again=changes
    )
    failures = [a or b for a, b in zip(failures, alone_failures, strict=True)]
    return scores - alone, failures


def consistency(method: Thinking, classmates: Classmates, batch: Batch, step: Step) -> Tensor:
    """(rows,) how often the classmates' answers equal the policy's own output."""
    problems: list[Problem] = []
    for problem, output in zip(step.problems(batch), batch.rows["output"], strict=True):
        problems.append(with_ground_truth(problem, output or "-"))
    texts = batch.rows["classmate_texts"]
    agreement, _ = classmates.score(method.ports.scorer, problems, texts)
    return combine(method.sign * agreement, method.settings.classmate_shares)


def without_nan(scores: Tensor) -> list[list[float | None]]:
    """One list of scores per row for the rollouts; None where there is no score."""
    rows = scores.flatten(1).tolist()
    return [[None if math.isnan(score) else score for score in row] for row in rows]
