"""Responses that think before they answer: the half that methods about thoughts share. What a thought is worth is theirs to say.

A response is cut into thought and final output by two markers; their tokens and texts become columns. The verifier sees the output alone;
a response without one is not judged and scores `method.no_output_score`. Others may be shown a thought or a part of it.
A validation can let a
model foretell the scores from the thoughts (reward.judge.monitor).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.algorithms.advantages import grpo
from postgrad.config.schema import setting
from postgrad.data.feed import Feed
from postgrad.data.thought_spans import check_keep, draw_share
from postgrad.data.thoughts import Thought, ThoughtSplitter
from postgrad.errors import ConfigError
from postgrad.methods.base import Group, Ports, Step
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.methods.support.judging import monitor
from postgrad.rollout.engine import sampling_of
from postgrad.types import Batch, Problem

MASKS = {"cot_only": "thought_mask", "output_only": "output_mask"}


@dataclass
class ThinkingSettings(GrpoSettings):
    cot_start: str = setting(
        "<think>", "marker that opens a thought; empty: it begins with the response"
    )
    cot_end: str = setting(
        "</think>", "marker that closes it; empty: the whole response is thought and output both"
    )
    keep: str = setting(
        "1", "how much of a thought others see: a share, first-K-tokens or last-K-tokens"
    )
    keep_unit: str = setting("tokens", "what a share counts", choices=("tokens", "words"))
    keep_min: float = setting(
        0.1, "least share that is kept where it is drawn (random_truncate)", above=0.0, at_most=1.0
    )
    keep_max: float = setting(
        0.9, "greatest share that is kept where it is drawn", above=0.0, at_most=1.0
    )
    unclosed: str = setting(
        "skip",
        "a thought never closed: nobody sees it, or others may finish it",
        choices=("skip", "allow"),
    )
    no_output_score: float | None = setting(
        None, "score of what has no final output; null: 0; to be set when minimizing"
    )
    main_tokens: str = setting(
        "all_tokens", "tokens that learn at all", choices=("all_tokens", *MASKS)
    )


class Thinking(Grpo):
    Settings = ThinkingSettings
    has_thoughts = True
    takes_tools = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.sign = -1.0 if config.reward.objective == "minimize" else 1.0
        self.no_output_score = self.sign * (self.settings.no_output_score or 0.0)

    def check(self) -> None:
        super().check()
        settings = self.settings
        if settings.cot_start and not settings.cot_end:
            raise ConfigError(
                f"method.cot_start={settings.cot_start} needs method.cot_end; set both, or neither"
            )
        check_keep(settings.keep, settings.keep_unit)
        if settings.keep_min > settings.keep_max:
            raise ConfigError(
                f"method.keep_min={settings.keep_min} exceeds method.keep_max={settings.keep_max}; swap them"
            )
        if self.config.reward.objective == "minimize" and settings.no_output_score is None:
            raise ConfigError(
                "reward.objective=minimize needs method.no_output_score, the score of a response without a final output: "
                "at least the verifier's highest, or it would pay not to answer"
            )

    def bind(self, ports: Ports) -> None:
        super().bind(ports)
        self.thoughts = ThoughtSplitter(
            ports.prompts, self.settings.cot_start, self.settings.cot_end
        )

    # ---- stages

    def enrich(self, batch: Batch, step: Step) -> Batch:
        self.cut(batch, step)
        return batch

    def cut(self, batch: Batch, step: Step) -> list[Thought]:
        """The thought of every row. Where it lies, where the output lies and what they say become columns."""
        thoughts = self.thoughts.split_batch(batch)
        batch.tokens["thought_mask"] = batch.mask([(t.start, t.end) for t in thoughts])
        batch.tokens["output_mask"] = batch.mask(
            [(t.output_start, len(t.response)) for t in thoughts]
        )
        batch.rows["cot"], batch.rows["output"] = (
            [t.text for t in thoughts],
            [t.output for t in thoughts],
        )
        step.metrics["cot/closed"] = sum(t.closed for t in thoughts) / len(thoughts)
        step.metrics["cot/length"] = sum(t.end - t.start for t in thoughts) / len(thoughts)
        return thoughts

    def show(
        self, batch: Batch, thoughts: Sequence[Thought], step: Step, drawn: bool
    ) -> list[str | None]:
        """The text of each row's thought that others see, None for nothing; its tokens are `cot_mask`.

        It is method.keep of the thought, or, when `drawn`, a share drawn for each row; a validation (step 0) draws nothing.
        """
        settings = self.settings
        parts: list[Thought | None] = []
        for thought, name in zip(thoughts, batch.names, strict=True):
            spec = settings.keep
            if drawn and step.number:
                spec = repr(
                    draw_share(
                        self.random(step, f"keep/{name}"), settings.keep_min, settings.keep_max
                    )
                )
            part = self.thoughts.truncate(thought, spec, settings.keep_unit)
            parts.append(
                part if part.text and (part.closed or settings.unclosed == "allow") else None
            )
        batch.tokens["cot_mask"] = batch.mask(
            [(part.start, part.end) if part else (0, 0) for part in parts]
        )
        return [part.text if part else None for part in parts]

    def judged_texts(self, batch: Batch) -> Sequence[str | None]:
        """The final outputs alone, never the thoughts; None where there is none."""
        return batch.rows["output"]

    def estimate(self, batch: Batch, step: Step) -> Batch:
        """The advantages of the tokens that learn at all; rewards of the thought come on top, normalized within the group alike."""
        if self.settings.main_tokens in MASKS:
            batch.tokens["loss_mask"] = (
                batch.tokens["loss_mask"] & batch.tokens[MASKS[self.settings.main_tokens]]
            )
        batch, settings = super().estimate(batch, step), self.settings
        for name, weight in self.thought_rewards().items():
            values = grpo(
                batch.rows[f"reward/{name}"],
                batch.rows["group"],
                normalize_by_std=settings.normalize_by_std,
            )
            place = batch.tokens["loss_mask"] & batch.tokens["cot_mask"]
            batch.tokens["advantages"] += weight * batch.expand(values) * place
        return batch

    def thought_rewards(self) -> dict[str, float]:
        """Weights of further parts of the reward, by name, that move the shown tokens of the thought and no others."""
        return {}

    # ---- validation

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Scores of the final outputs, greedy and sampled, and what `look` sees in the sampled ones."""
        out: dict[str, float] = {}
        for name, temperature in (
            ("accuracy", 0.0),
            ("sampled_accuracy", self.config.rollout.temperature),
        ):
            sampling, step = sampling_of(self.config.rollout, temperature), Step(0, Feed(problems))
            answers = self.generate([(problem, [0], []) for problem in problems], sampling, step=0)
            batch = self.score(
                self.enrich(
                    self.assemble([Group(problem, 1) for problem in problems], answers), step
                ),
                step,
            )
            out[f"validation/{name}"] = float(batch.rows["reward"].sum()) / len(problems)
            if failures := step.metrics["reward/failures"]:  # they count 0 above
                out["validation/failures"] = out.get("validation/failures", 0.0) + failures
        return out | {f"validation/{name}": value for name, value in self.look(batch, step).items()}

    def look(self, batch: Batch, step: Step) -> dict[str, float]:
        """Of the sampled responses of a validation: how many thoughts were closed; whether a monitor foretells the scores from them."""
        seen = {"closed": step.metrics["cot/closed"]}
        if self.config.reward.judge.monitor:
            seen |= monitor(self.config, self.ports.models["monitor"], batch, step, self.sign)
        return seen
