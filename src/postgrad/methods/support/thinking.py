"""Responses that think before they answer: the base of methods that use thoughts.

Two markers split a response into thought and final output; their tokens and texts become columns.
Both are text of the policy; what tools wrote belongs to neither. The verifier sees the output only.
A response without output is not judged and scores `method.no_output_score`. Other models may be
shown a thought or a part of it. A validation can let a model predict the scores from the thoughts
(reward.judge.monitor).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from postgrad.algorithms.advantages import grpo
from postgrad.config.schema import Config, setting
from postgrad.data.problem_queue import ProblemQueue
from postgrad.data.thought_spans import check_keep, draw_share
from postgrad.data.thoughts import Thought, ThoughtSplitter
from postgrad.errors import Conflict, Missing
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.methods.ports import Ports
from postgrad.methods.step import Group, Step
from postgrad.methods.support.advantage_columns import is_singleton_group
from postgrad.methods.support.judging import monitor
from postgrad.methods.support.validation import (
    ValidationPass,
    batch_answers,
    mean_score,
    validation_passes,
)
from postgrad.types import TOOL, Batch, Problem, Ragged

MASKS = {"cot_only": "thought_mask", "output_only": "output_mask"}


@dataclass
class ThinkingSettings(GrpoSettings):
    cot_start: str = setting(
        "<think>", "marker that opens a thought; empty: the response starts with it"
    )
    cot_end: str = setting(
        "</think>", "marker that closes a thought; empty: the response is both thought and output"
    )
    keep: str = setting(
        "1", "part of a thought that others see: a share, first-K-tokens or last-K-tokens"
    )
    keep_unit: str = setting("tokens", "unit of a share", choices=("tokens", "words"))
    keep_min: float = setting(
        0.1, "smallest share drawn by random_truncate", above=0.0, at_most=1.0
    )
    keep_max: float = setting(0.9, "largest share drawn by random_truncate", above=0.0, at_most=1.0)
    unclosed_thought: str = setting(
        "skip",
        "a thought without closing marker: skip hides it, allow lets others continue it",
        choices=("skip", "allow"),
    )
    no_output_score: float | None = setting(
        None, "score of a response without output; null: 0, required for objective=minimize"
    )
    main_tokens: str = setting(
        "all_tokens", "tokens that are trained", choices=("all_tokens", *MASKS)
    )


def policy_text(batch: Batch) -> Batch:
    """Return the rows without the tokens that tools wrote. Thoughts are found in these."""
    own = batch.tokens["token_source"] != TOOL
    if bool(own.all()):
        return batch
    lengths = batch.sum_tokens(own.long())
    return Batch(batch.prompt, Ragged(batch.response.values[own], lengths), {}, dict(batch.rows))


def policy_mask(batch: Batch, spans: Sequence[tuple[int, int]]) -> Tensor:
    """(tokens,) true on the tokens of one span per row, counted without those of tools."""
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    mask[batch.tokens["token_source"] != TOOL] = policy_text(batch).mask(spans)
    return mask


class Thinking(Grpo):
    Settings = ThinkingSettings
    # The verifier scores the final output, not the episode.
    traits = replace(Grpo.traits, thoughts=True, environments=False)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sign = -1.0 if config.reward.objective == "minimize" else 1.0
        self.no_output_score = self.sign * (self.settings.no_output_score or 0.0)

    def check(self) -> None:
        super().check()
        settings = self.settings
        if settings.cot_start and not settings.cot_end:
            raise Missing(
                f"method.cot_start={settings.cot_start} needs method.cot_end; set both or neither"
            )
        check_keep(settings.keep, settings.keep_unit)
        if settings.keep_min > settings.keep_max:
            raise Conflict(
                f"method.keep_min={settings.keep_min} exceeds method.keep_max={settings.keep_max}; "
                "swap them"
            )
        if self.config.reward.objective == "minimize" and settings.no_output_score is None:
            raise Missing(
                "reward.objective=minimize needs method.no_output_score, the score of a response "
                "without output; use at least the verifier's highest score, so that a missing "
                "answer is not rewarded"
            )

    def bind(self, ports: Ports) -> None:
        super().bind(ports)
        settings = self.settings
        self.splitter = ThoughtSplitter(ports.encoder, settings.cot_start, settings.cot_end)

    # ---- stages, on the driver

    def enrich(self, batch: Batch, step: Step) -> Batch:
        self.split_thoughts(batch, step)
        return batch

    def split_thoughts(self, batch: Batch, step: Step) -> list[Thought]:
        """Return the thought of every row.

        Sets thought_mask, output_mask and the texts cot, output.
        """
        thoughts = self.splitter.split_batch(policy_text(batch))
        thought_spans = [(one.start, one.end) for one in thoughts]
        output_spans = [(one.output_start, len(one.response)) for one in thoughts]
        batch.tokens["thought_mask"] = policy_mask(batch, thought_spans)
        batch.tokens["output_mask"] = policy_mask(batch, output_spans)
        batch.rows["cot"] = [one.text for one in thoughts]
        batch.rows["output"] = [one.output for one in thoughts]
        step.metrics["cot/closed"] = sum(one.closed for one in thoughts) / len(thoughts)
        num_tokens = sum(end - start for start, end in thought_spans)
        step.metrics["cot/length"] = num_tokens / len(thoughts)
        return thoughts

    def shown_thoughts(
        self, batch: Batch, thoughts: Sequence[Thought], step: Step, random_share: bool
    ) -> list[str | None]:
        """Return the text of each thought that others see, None for nothing.

        Sets cot_mask to its tokens.

        It is method.keep of the thought. With `random_share` the share is drawn per row, except in
        a validation (step 0).
        """
        settings = self.settings
        parts: list[Thought | None] = []
        for thought, name in zip(thoughts, batch.names, strict=True):
            keep = settings.keep
            if random_share and step.number:
                rng = self.rng(step, f"keep/{name}")
                keep = repr(draw_share(rng, settings.keep_min, settings.keep_max))
            part = self.splitter.truncate(thought, keep, settings.keep_unit)
            is_shown = part.text and (part.closed or settings.unclosed_thought == "allow")
            parts.append(part if is_shown else None)
        spans = [(0, 0) if part is None else (part.start, part.end) for part in parts]
        batch.tokens["cot_mask"] = policy_mask(batch, spans)
        return [None if part is None else part.text for part in parts]

    def texts_to_score(self, batch: Batch) -> Sequence[str | None]:
        """Return the final outputs without the thoughts; None if there is none."""
        return batch.rows["output"]

    def estimate(self, batch: Batch, step: Step) -> Batch:
        """Advantages of the trained tokens; rewards of the thought are added on its tokens."""
        settings = self.settings
        if settings.main_tokens in MASKS:
            trained = batch.tokens[MASKS[settings.main_tokens]]
            batch.tokens["loss_mask"] = batch.tokens["loss_mask"] & trained
        batch = super().estimate(batch, step)
        for name, weight in self.thought_rewards().items():
            by_std = settings.normalize_by_std
            rewards = batch.rows[f"reward/{name}"]
            values = grpo(rewards, batch.rows["group"], normalize_by_std=by_std)
            if step.failed:
                values = torch.where(is_singleton_group(batch), 0.0, values)
            mask = batch.tokens["loss_mask"] & batch.tokens["cot_mask"]
            batch.tokens["advantages"] += weight * batch.expand(values) * mask
        return batch

    def thought_rewards(self) -> dict[str, float]:
        """Weights of reward parts, by name, that apply to the shown tokens of the thought only."""
        return {}

    # ---- validation

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Scores of the final outputs by pass, and metrics of the last pass's thoughts."""
        self.answers = {}
        metrics: dict[str, float] = {}
        num_failures = 0.0
        thoughts: dict[str, float] = {}
        passes = validation_passes(self.config)
        for one in passes:
            step = Step(0, ProblemQueue(problems))
            batch = self.validation_batch(problems, one, step)
            find = step.data.find
            batches = [batch, *step.failed]
            answers = batch_answers(batches, find, self.config.seed)
            self.answers[one.name] = answers
            metrics[f"validation/{one.name}"] = mean_score(answers)
            num_failures += step.metrics["reward/failures"]
            if one is passes[-1]:
                thoughts = self.thought_metrics(batch, step)
        if num_failures:
            metrics["validation/failures"] = num_failures
        return metrics | {f"validation/{name}": value for name, value in thoughts.items()}

    def validation_batch(
        self, problems: Sequence[Problem], one: ValidationPass, step: Step
    ) -> Batch:
        """Return the scored responses of a pass."""
        indices = range(one.samples)
        requests = [(problem, indices, []) for problem in problems]
        completions = self.generate(requests, one.sampling, 0)
        groups = [Group(problem, one.samples) for problem in problems]
        batch = self.assemble(groups, completions)
        return self.score(self.enrich(batch, step), step)

    def thought_metrics(self, batch: Batch, step: Step) -> dict[str, float]:
        """Of a validation's sampled responses: the share of closed thoughts, and the monitor's."""
        metrics = {"closed": step.metrics["cot/closed"]}
        if self.config.reward.judge.monitor:
            chat = self.ports.models["monitor"]
            metrics |= monitor(self.config, chat, batch, step, self.sign)
        return metrics
