"""Classmate-CoT: a thought is worth what it does for others. Classmates read the question and the policy's thought and write the answer.

The main reward scores the policy's final output and moves the whole response; the classmates' reward, by the same verifier, moves the
tokens of the thought that they were given. thinking.py cuts thoughts from outputs, rollout/panel.py asks several models at once.
docs/methods.md has the original's names and what differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from postgrad.algorithms.advantages import ADVANTAGES
from postgrad.algorithms.classmate_rewards import CONDITIONS, channel_metrics, combine, gate, pair
from postgrad.config.schema import setting
from postgrad.data.pairs import paired_problem
from postgrad.errors import ConfigError
from postgrad.methods.base import LIVE, Ports, Role, Step
from postgrad.methods.support.checks import refuse_unread
from postgrad.methods.support.thinking import Thinking, ThinkingSettings
from postgrad.rollout.engine import Sampling
from postgrad.rollout.panel import Panel
from postgrad.types import Batch, Problem
from postgrad.verifiers.scorer import LLM_JUDGE

ESTIMATORS = tuple(name for name, estimator in ADVANTAGES.items() if "classmate" in estimator.needs)
HELP_OTHER, HELP_SIMILAR = "help_other_questions", "help_other_similar_questions"
REWARD_TYPES = ("vanilla", "random_truncate", "remove_wo_cot", HELP_OTHER, HELP_SIMILAR)


@dataclass
class ClassmateSettings(ThinkingSettings):
    advantage: str = setting(
        "classmate_with", "how two rewards become advantages", choices=ESTIMATORS
    )
    normalize_by_std: bool = setting(False, "divide a group's advantages by its standard deviation")
    normalize_answer: bool = setting(
        False, "classmate_gdpo: normalize the answer's advantages over the batch too"
    )
    classmates: list[str] = setting(
        [""],
        "who continues: paths, addresses, policy:live; an empty one: the starting policy, frozen",
    )
    classmate_shares: list[float] = setting(
        [], "weights among the classmates; empty: equal", above=0.0
    )
    classmate_samples: int = setting(1, "continuations by each classmate", at_least=1)
    classmate_temperature: float = setting(
        1.0, "their sampling temperature; 0 is greedy", at_least=0.0
    )
    classmate_top_p: float = setting(1.0, "their nucleus sampling", above=0.0, at_most=1.0)
    classmate_max_tokens: int = setting(256, "longest continuation", at_least=1)
    classmate_cot_start: list[str] = setting(
        [], "each classmate's opening marker; empty: cot_start for all"
    )
    classmate_cot_end: list[str] = setting(
        [], "each classmate's closing marker; empty: cot_end for all"
    )
    classmate_weight: float = setting(
        1.0, "weight of their reward, after normalization; 0 only measures it", at_least=0.0
    )
    classmate_tokens: str = setting("cot", "tokens that their reward moves", choices=("cot", "all"))
    reward_type: str = setting(
        "vanilla", "what the classmates are asked; docs/methods.md", choices=REWARD_TYPES
    )
    condition: str = setting(
        "no_classmate_when_main_incorrect", "when their reward counts", choices=CONDITIONS
    )
    consistency_weight: float = setting(
        0.0, "reward for thoughts that lead others to the policy's own answer", at_least=0.0
    )


class Classmate(Thinking):
    Settings = ClassmateSettings
    offers = (*Thinking.offers, "classmate")

    def check(self) -> None:
        super().check()
        settings, count = self.settings, len(self.settings.classmates)
        if not count:
            raise ConfigError(
                "method.classmates is empty; name at least one, or use method.condition=no_classmate"
            )
        for key in ("classmate_shares", "classmate_cot_start", "classmate_cot_end"):
            if (given := len(getattr(settings, key))) not in (0, count):
                raise ConfigError(
                    f"method.{key} has {given} entries for {count} classmates; give one for each, or none"
                )
        if settings.consistency_weight and self.config.reward.verifier == LLM_JUDGE:
            raise ConfigError(
                "method.consistency_weight compares answers, which llm_judge does not; set it to 0"
            )
        if settings.reward_type == HELP_OTHER and (
            self.config.training.problems_per_step < 2 or settings.max_refills
        ):
            fix = "it needs two or more, and method.max_refills=0"
            raise ConfigError(f"method.reward_type={HELP_OTHER} pairs a step's problems; {fix}")

    def check_used(self) -> None:
        """What is about classmates where nobody is asked; sampling where they are greedy; an option of one estimator."""
        super().check_used()
        settings = self.settings
        if settings.advantage != "classmate_gdpo":
            refuse_unread(
                "method",
                settings,
                ["normalize_answer"],
                f"with method.advantage={settings.advantage}",
            )
        if settings.condition == "no_classmate":
            names = [
                "shares",
                "samples",
                "temperature",
                "top_p",
                "cot_start",
                "cot_end",
                "weight",
                "tokens",
            ]
            unread = [*(f"classmate_{name}" for name in names), "consistency_weight"]
            refuse_unread(
                "method", settings, unread, "with method.condition=no_classmate: nobody is asked"
            )
        if not settings.classmate_temperature:
            refuse_unread(
                "method", settings, ["classmate_top_p"], "with method.classmate_temperature=0"
            )

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Similar questions must be in the data."""
        for problem in problems if self.settings.reward_type == HELP_SIMILAR else ():
            paired_problem(problem)

    check_held_out = check_problems  # a validation asks them, too

    def roles(self) -> dict[str, Role]:
        paths = self.settings.classmates if self.settings.condition != "no_classmate" else []
        return super().roles() | {
            f"classmate-{k}": Role("engine", path) for k, path in enumerate(paths, 1)
        }

    def bind(self, ports: Ports) -> None:
        super().bind(ports)
        settings, speakers = (
            self.settings,
            [ports.models[name] for name in self.roles() if name.startswith("classmate-")],
        )
        starts = settings.classmate_cot_start or [settings.cot_start] * len(speakers)
        ends = settings.classmate_cot_end or [settings.cot_end] * len(speakers)
        sampling = Sampling(
            settings.classmate_temperature, settings.classmate_max_tokens, settings.classmate_top_p
        )
        self.classmates = Panel(
            "classmate",
            speakers,
            starts,
            ends,
            sampling,
            settings.classmate_samples,
            self.config.seed,
        )

    # ---- stages

    def enrich(self, batch: Batch, step: Step) -> Batch:
        """Cut the thoughts, and let the classmates go on from what they are shown of them."""
        reward_type, uids = self.settings.reward_type, batch.rows["uid"]
        shown = self.show(
            batch, self.cut(batch, step), step, drawn=reward_type == "random_truncate"
        )
        if not self.classmates.speakers:
            return batch
        if reward_type == HELP_OTHER:
            partners = pair(uids, self.random(step, "pairs"))
            batch.rows["partner"] = [partners[uid] for uid in uids]
        said, metrics = self.classmates.ask(
            step.problems(batch), shown, self.targets(batch, step), batch.names, step.number
        )
        batch.rows["classmate_texts"] = said
        step.metrics |= metrics
        return batch

    def targets(self, batch: Batch, step: Step) -> list[Problem]:
        """The problem that each row's classmates are to answer: the row's own, or another that its thought should help with."""
        if self.settings.reward_type == HELP_OTHER:
            return [step.data.find(uid) for uid in batch.rows["partner"]]
        problems = step.problems(batch)
        return (
            [paired_problem(problem) for problem in problems]
            if self.settings.reward_type == HELP_SIMILAR
            else problems
        )

    def score(self, batch: Batch, step: Step) -> Batch:
        """The main reward, then the classmates', which counts by the condition."""
        batch = super().score(batch, step)
        if not self.classmates.speakers:
            batch.rows["reward/classmate"] = batch.rows["classmate_reward"] = torch.zeros(
                len(batch)
            )
            return batch
        batch = self.score_classmates(batch, step)
        main = self.sign * (
            batch.rows["reward"] - batch.rows.get("reward/overlong", torch.zeros(len(batch)))
        )
        reward = batch.rows["classmate_reward"] = gate(
            main, batch.rows["reward/classmate"], self.settings.condition
        )
        step.metrics["classmate/gated"] = float(
            (reward != batch.rows["reward/classmate"]).double().mean()
        )
        step.metrics |= channel_metrics(batch.rows["reward"], reward, batch.rows["group"])
        return batch

    def score_classmates(self, batch: Batch, step: Step) -> Batch:
        """`reward/classmate`, the mean over classmates and samples. A row one of whose continuations could not be judged is left out."""
        settings, scorer, problems, texts = (
            self.settings,
            self.ports.scorer,
            step.problems(batch),
            batch.rows["classmate_texts"],
        )
        scores, reasons = self.classmates.score(scorer, self.targets(batch, step), texts)
        if settings.reward_type == "remove_wo_cot":
            alone, more = self.classmates.score_alone(
                scorer, problems, self.no_output_score, again=LIVE in settings.classmates
            )
            scores, reasons = (
                scores - alone,
                [one or other for one, other in zip(reasons, more, strict=True)],
            )
        if settings.consistency_weight:
            own = [
                replace(p, ground_truth=output or "-")
                for p, output in zip(problems, batch.rows["output"], strict=True)
            ]
            agreement, _ = self.classmates.score(scorer, own, texts)
            batch.rows["reward/consistency"] = combine(
                self.sign * agreement, settings.classmate_shares
            )
        batch.rows["classmate_scores"] = [
            [None if v != v else v for v in row] for row in scores.flatten(1).tolist()
        ]
        batch.rows["reward/classmate"] = combine(
            scores, settings.classmate_shares, self.no_output_score
        )
        batch.rows["failure"] = reasons
        step.metrics["classmate/failures"] = float(sum(map(bool, reasons)))
        return self.leave_out_failures(batch, step)

    def columns(self, batch: Batch, step: Step) -> dict[str, Any]:
        both = {
            "main_rewards": batch.rows["reward"],
            "classmate_rewards": batch.rows["classmate_reward"],
        }
        return super().columns(batch, step) | both

    def estimate_options(self) -> dict[str, Any]:
        weight, spread = self.settings.classmate_weight, self.settings.classmate_tokens
        return {
            "weight": weight,
            "spread": spread,
            "normalize_answer": self.settings.normalize_answer,
        }

    def thought_rewards(self) -> dict[str, float]:
        return (
            {"consistency": self.settings.consistency_weight}
            if self.settings.consistency_weight
            else {}
        )

    def look(self, batch: Batch, step: Step) -> dict[str, float]:
        return super().look(batch, step) | {
            "classmate": float(batch.rows["reward/classmate"].mean())
        }

    # ---- state

    def state(self) -> dict[str, Any]:
        return super().state() | {"without": self.classmates.alone}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.classmates.alone = state["without"]
