"""Classmate-CoT: a thought is worth what it does for others. Classmates read the question and the policy's thought and write the answer.

The main reward scores the policy's final output and moves the whole response; the classmates' reward, by the same verifier, moves the
tokens of the thought that they were given. docs/methods.md has the original's names and what differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.advantages import ADVANTAGES, grpo
from postgrad.algorithms.classmate_rewards import CONDITIONS, channel_metrics, combine, gate
from postgrad.algorithms.thought import draw_share
from postgrad.config.schema import setting
from postgrad.data.feed import Feed
from postgrad.data.thoughts import Thoughts
from postgrad.methods.base import Group, Ports, Role, Step
from postgrad.methods.classmates import REWARD_TYPES, Classmates, Question, check_problems, check_settings, others
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.methods.judging import monitor
from postgrad.rollout.engine import sampling_of, trajectory_seed
from postgrad.types import Batch, Failure, Problem, Score

ESTIMATORS = tuple(name for name, estimator in ADVANTAGES.items() if "classmate" in estimator.needs)
TOKENS = ("all_tokens", "cot_only", "output_only")


@dataclass
class ClassmateSettings(GrpoSettings):
    advantage: str = setting("classmate_with", "how two rewards become advantages", choices=ESTIMATORS)
    normalise_by_std: bool = setting(False, "divide a group's advantages by its standard deviation")
    normalise_answer: bool = setting(False, "classmate_gdpo: normalise the answer's advantages over the batch too")
    classmates: list[str] = setting([""], "who continues: paths, addresses, policy:live; an empty one: the starting policy, frozen")
    classmate_shares: list[float] = setting([], "weights among the classmates; empty: equal")
    classmate_samples: int = setting(1, "continuations by each classmate", at_least=1)
    classmate_weight: float = setting(1.0, "weight of their reward, after normalisation; 0 only measures it", at_least=0.0)
    classmate_temperature: float = setting(1.0, "their sampling temperature; 0 is greedy", at_least=0.0)
    classmate_top_p: float = setting(1.0, "their nucleus sampling", above=0.0, at_most=1.0)
    classmate_max_tokens: int = setting(256, "longest continuation", at_least=1)
    cot_start: str = setting("<think>", "marker that opens a thought; empty: it begins with the response")
    cot_end: str = setting("</think>", "marker that closes it; empty: the whole response is thought and output both")
    classmate_cot_start: list[str] = setting([], "each classmate's opening marker; empty: cot_start for all")
    classmate_cot_end: list[str] = setting([], "each classmate's closing marker; empty: cot_end for all")
    unclosed: str = setting(
        "skip", "a thought never closed: nobody sees it, or classmates may finish it", choices=("skip", "allow")
    )
    unanswered: float | None = setting(None, "score of what has no final output; null: 0; to be set when minimising")
    reward_type: str = setting("vanilla", "what the classmates are asked; docs/methods.md", choices=REWARD_TYPES)
    keep: str = setting("1", "how much of the thought they see: a share, first-K-tokens or last-K-tokens")
    keep_unit: str = setting("tokens", "what a share counts", choices=("tokens", "words"))
    keep_min: float = setting(0.1, "random_truncate: least share kept", above=0.0, at_most=1.0)
    keep_max: float = setting(0.9, "random_truncate: greatest share kept", above=0.0, at_most=1.0)
    condition: str = setting("no_classmate_when_main_incorrect", "when their reward counts", choices=CONDITIONS)
    classmate_tokens: str = setting("cot", "tokens that their reward moves", choices=("cot", "all"))
    main_tokens: str = setting("all_tokens", "tokens that learn at all", choices=TOKENS)
    consistency_weight: float = setting(0.0, "reward for thoughts that lead others to the policy's own answer", at_least=0.0)


class Classmate(Grpo):
    Settings = ClassmateSettings
    offers = (*Grpo.offers, "classmate")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.asks = self.settings.condition != "no_classmate"
        self.sign = -1.0 if config.reward.objective == "minimise" else 1.0
        self.unanswered = self.sign * (self.settings.unanswered or 0.0)

    def check(self) -> None:
        super().check()
        check_settings(self.config)

    def check_problems(self, problems: Sequence[Problem]) -> None:
        check_problems(self.settings.reward_type, problems)

    def roles(self) -> dict[str, Role]:
        paths = self.settings.classmates if self.asks else []
        return super().roles() | {f"classmate-{k}": Role("engine", path) for k, path in enumerate(paths, 1)}

    def bind(self, ports: Ports) -> None:
        super().bind(ports)
        self.thoughts = Thoughts(ports.prompts, self.settings.cot_start, self.settings.cot_end)
        self.classmates = Classmates(self.config, [model for name, model in ports.models.items() if name.startswith("classmate-")])

    # ---- stages

    def enrich(self, batch: Batch, step: Step) -> Batch:
        """Cut the thoughts, mark their tokens, and let the classmates go on from them."""
        rows, unit = self.thoughts.cut_all(batch), self.settings.keep_unit
        places = zip(batch.rows["uid"], batch.rows["group"].tolist(), batch.rows["index"].tolist(), strict=True)
        names = [f"{uid}/{group}/{index}" for uid, group, index in places]
        shown = [self.thoughts.kept(row, self.share(name, step.number), unit) for row, name in zip(rows, names, strict=True)]
        shows = [bool(t.text) and (t.closed or self.settings.unclosed == "allow") for t in shown]
        batch.tokens["cot_mask"] = _mask(batch, [(t.start, t.end if ok else t.start) for t, ok in zip(shown, shows, strict=True)])
        batch.tokens["thought_mask"] = _mask(batch, [(t.start, t.end) for t in rows])
        batch.tokens["output_mask"] = _mask(batch, [(t.output_start, len(t.response)) for t in rows])
        batch.rows["cot"], batch.rows["output"] = [t.text for t in rows], [t.output for t in rows]
        step.metrics["cot/closed"] = sum(t.closed for t in rows) / len(rows)
        step.metrics["cot/length"] = sum(t.end - t.start for t in rows) / len(rows)
        if self.asks:
            uids = batch.rows["uid"]
            other = others(self.settings.reward_type, uids, step, self.config.seed)
            asked = [
                Question(step.data.find(uid), t.text, other.get(uid)) if ok else None
                for uid, t, ok in zip(uids, shown, shows, strict=True)
            ]
            batch.rows["classmate_texts"], metrics = self.classmates.ask(asked, names, step.number)
            step.metrics |= metrics
        return batch

    def share(self, name: str, step: int) -> str:
        """How much of a row's thought is shown; drawn for each row in training, fixed in a validation (step 0)."""
        if self.settings.reward_type != "random_truncate" or step == 0:
            return self.settings.keep
        random = Random(trajectory_seed(self.config.seed, step, f"keep/{name}", 0))
        return repr(draw_share(random, self.settings.keep_min, self.settings.keep_max))

    def judged_texts(self, batch: Batch) -> list[str]:
        """The final outputs alone, never the thoughts; None where there is none."""
        return batch.rows["output"]

    def verdicts(self, problems: Sequence[Problem], texts: Sequence[str | None]) -> list[Score | Failure]:
        """What has no output is not judged: it gets method.unanswered."""
        there = [i for i, text in enumerate(texts) if text is not None]
        judged = self.ports.judge.score([problems[i] for i in there], [texts[i] or "" for i in there])
        found = dict(zip(there, judged, strict=True))
        return [found.get(i, Score(self.unanswered)) for i in range(len(texts))]

    def score(self, batch: Batch, step: Step) -> Batch:
        """The main reward, then the classmates'. A row one of whose continuations could not be judged is left out as well."""
        other = others(self.settings.reward_type, batch.rows["uid"], step, self.config.seed) if self.asks else {}
        batch = super().score(batch, step)
        if not self.asks:
            batch.rows["reward/classmate"] = batch.rows["classmate_reward"] = torch.zeros(len(batch))
            return batch
        batch = self.score_classmates(batch, step, other)
        main = self.sign * (batch.rows["reward"] - batch.rows.get("reward/overlong", torch.zeros(len(batch))))
        reward = batch.rows["classmate_reward"] = gate(main, batch.rows["reward/classmate"], self.settings.condition)
        step.metrics["classmate/gated"] = float((reward != batch.rows["reward/classmate"]).double().mean())
        step.metrics |= channel_metrics(batch.rows["reward"], reward, batch.rows["group"])
        return batch

    def score_classmates(self, batch: Batch, step: Step, other: dict[str, Problem]) -> Batch:
        settings, said, failures = self.settings, batch.rows["classmate_texts"], step.metrics["reward/failures"]
        problems = [step.data.find(uid) for uid in batch.rows["uid"]]
        judge = self.ports.judge.score
        scores, reasons = self.classmates.judge(judge, [other.get(p.uid, p) for p in problems], said)
        if settings.reward_type == "remove_wo_cot":
            alone, more = self.classmates.alone(judge, problems, self.unanswered)
            scores, reasons = scores - alone, [a or b for a, b in zip(reasons, more, strict=True)]
        if settings.consistency_weight:
            own = [replace(p, ground_truth=text or "-") for p, text in zip(problems, batch.rows["output"], strict=True)]
            agreement, _ = self.classmates.judge(judge, own, said)
            batch.rows["reward/consistency"] = combine(self.sign * agreement, settings.classmate_shares)
        batch.rows["classmate_scores"] = [[None if v != v else v for v in row] for row in scores.flatten(1).tolist()]
        batch.rows["reward/classmate"] = combine(scores, settings.classmate_shares, self.unanswered)
        batch.rows["failure"] = reasons
        batch = self.leave_out_failures(batch, step)
        step.metrics["classmate/failures"] = step.metrics["reward/failures"]
        step.metrics["reward/failures"] += failures
        return batch

    def estimate(self, batch: Batch, step: Step) -> Batch:
        settings, mask = self.settings, batch.tokens["loss_mask"]
        if settings.main_tokens != "all_tokens":
            mask = batch.tokens["loss_mask"] = (
                mask & batch.tokens["thought_mask" if settings.main_tokens == "cot_only" else "output_mask"]
            )
        batch = super().estimate(batch, step)
        if settings.consistency_weight:
            more = grpo(batch.rows["reward/consistency"], batch.rows["group"], normalise_by_std=settings.normalise_by_std)
            batch.tokens["advantages"] += settings.consistency_weight * batch.spread(more) * (mask & batch.tokens["cot_mask"])
        return batch

    def columns(self, batch: Batch, step: Step) -> dict[str, Any]:
        both = {"main_rewards": batch.rows["reward"], "classmate_rewards": batch.rows["classmate_reward"]}
        return super().columns(batch, step) | both

    def estimate_options(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "weight": settings.classmate_weight,
            "spread": settings.classmate_tokens,
            "normalise_answer": settings.normalise_answer,
        }

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Scores of the final outputs, greedy and sampled; of the sampled ones the classmates' too, and whether they can be foretold."""
        out: dict[str, float] = {}
        for name, temperature in (("accuracy", 0.0), ("sampled_accuracy", self.config.rollout.temperature)):
            sampling, step = sampling_of(self.config.rollout, temperature), Step(0, Feed(problems))
            answers = self.generate([(problem, [0], []) for problem in problems], sampling, step=0)
            batch = self.score(self.enrich(self.assemble([Group(problem, 1) for problem in problems], answers), step), step)
            out[f"validation/{name}"] = float(batch.rows["reward"].sum()) / len(problems)
        more = {"classmate": float(batch.rows["reward/classmate"].mean()), "closed": step.metrics["cot/closed"]}
        if self.config.reward.judge.monitor:
            more |= monitor(self.config, self.ports.models["monitor"], batch, step, self.sign)
        return out | {f"validation/{name}": value for name, value in more.items()}

    # ---- state

    def state(self) -> dict[str, Any]:
        return super().state() | {"without": self.classmates.without}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.classmates.without = state["without"]


def _mask(batch: Batch, spans: Sequence[tuple[int, int]]) -> Tensor:
    """(tokens,) true on the given positions of each row."""
    out = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for offset, (start, end) in zip(batch.response.offsets.tolist(), spans, strict=False):
        out[offset + start : offset + end] = True
    return out
