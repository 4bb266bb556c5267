"""LUFFY: demonstrations sit in the group as rows, and their tokens get a shaped off-policy loss.

As published, one row of eight is a whole demonstration. Its reward is judged like the others, its
advantage is relative to the same group, and the loss of its tokens is

    -A · f(p),  f(p) = p / (p + gamma),  gamma = 0.1

where p is the policy's probability of the token. A plain ratio would need the probability that the
demonstration's author gave it, which nobody recorded; 1 is assumed. f keeps the gradient large on
tokens that the policy finds unlikely, which are the ones to learn from. Tokens of the policy's own
rows get GRPO's loss.

The loss is chosen per token: a row may also start with a part of a demonstration, which the policy
continues (`prefix_*`). `num_demonstrations=0` is the on-policy baseline, `sft_coef` the variant
that adds an SFT loss. ExGRPO is MixedPolicy with replayed rows in place of demonstrations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from postgrad.algorithms.prefixes import READS, STRATEGIES, prefix_ratio
from postgrad.config.schema import setting
from postgrad.config.setting import Condition
from postgrad.data.encode.encoder import Encoder
from postgrad.errors import Conflict, RunError, UnknownName, did_you_mean
from postgrad.methods.method import Supply
from postgrad.methods.step import Group, Step
from postgrad.methods.support.mixed_policy import (
    MixedPolicy,
    MixedPolicyObjective,
    MixedPolicySettings,
    off_policy,
)
from postgrad.model.load.eos import describe_end
from postgrad.problem import problem_label
from postgrad.types import DEMONSTRATION, Batch, Problem, Trajectory

SHOWN = "method.num_demonstrations"  # a condition of settings
MAX_COUNTED = 1000  # problems whose demonstrations are encoded before the run


def _strategies(name: str) -> str:
    """Return the condition of the setting method.prefix_NAME."""
    readers = [strategy for strategy, names in READS.items() if name in names]
    return f"{SHOWN} and method.prefix_strategy={','.join(readers)}"


@dataclass
class LuffySettings(MixedPolicySettings):
    """How many demonstrations a group gets, and how much of each."""

    only_with: ClassVar[dict[str, Condition]] = {
        "off_shape": f"{SHOWN} and method.demonstration_probs=",  # their ratio is exact
        "off_advantage_scale": SHOWN,
        "prefix_advantage": SHOWN,
    }

    num_demonstrations: int = setting(
        1, "rows per group that are, or start with, a demonstration; -1: all", at_least=-1
    )
    demonstration_share: float = setting(
        1.0,
        "share of problems that use theirs, drawn per step",
        at_least=0.0,
        at_most=1.0,
        only_with=SHOWN,
    )
    prefix_strategy: str = setting(
        "random",
        "which share of a demonstration's tokens a row gets",
        choices=STRATEGIES,
        only_with=SHOWN,
    )
    prefix_shared: bool = setting(
        False, "draw that share once per group", only_with=_strategies("shared")
    )
    prefix_min: float = setting(
        1.0,
        "smallest share (random, fixed); 1 is all of it",
        at_least=0.0,
        at_most=1.0,
        only_with=_strategies("min"),
    )
    prefix_max: float = setting(
        1.0,
        "largest share (random, fixed); 1 is all of it",
        at_least=0.0,
        at_most=1.0,
        only_with=_strategies("max"),
    )
    prefix_peak: float = setting(
        0.8,
        "largest share (linear, linear_max, reverse_linear)",
        at_least=0.0,
        at_most=1.0,
        only_with=_strategies("peak"),
    )
    prefix_steps: int = setting(
        1000,
        "steps over which prefix_peak falls or rises",
        at_least=1,
        only_with=_strategies("steps"),
    )
    wrong_demonstrations: str = setting(
        "keep",
        "tokens of others in rows without reward: train on them, or mask them",
        choices=("keep", "mask"),
        only_with=SHOWN,
    )
    demonstration_probs: str = setting(
        "",
        "data column with the author's probability of each token, including the end token",
        only_with=SHOWN,
    )


class LuffyObjective(MixedPolicyObjective):
    """With the author's probabilities the ratio is exact and is not shaped."""

    def off_shape(self) -> str:
        """Return the shape of the ratio on tokens of a demonstration."""
        return "none" if self.settings.demonstration_probs else super().off_shape()


class Luffy(MixedPolicy):
    """What each group holds: sampled rows, and demonstrations or parts of one."""

    Settings = LuffySettings
    Objective = LuffyObjective
    counts = (*MixedPolicy.counts, "demonstration/dropped")

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        """Plan the groups: whole demonstrations are given rows, parts are prefixes of samples."""
        step.metrics.setdefault("demonstration/dropped", 0.0)
        groups = super().compose(problems, step)
        for group in groups:
            self.add_demonstrations(group, step)
        return groups

    def add_demonstrations(self, group: Group, step: Step) -> None:
        """Let the group's demonstrations take the places of sampled rows."""
        problem = group.problem
        num_copies = self.settings.num_demonstrations
        if num_copies < 0:
            num_copies = group.num_samples
        is_shown = self.uniform(problem, step, -1) < self.settings.demonstration_share
        traces = self.fitting_traces(problem, step) if num_copies and is_shown else []
        if not traces:
            return
        for copy in range(num_copies):
            trace = traces[copy % len(traces)]
            num_given = int(len(trace) * self.prefix_ratio(problem, step, copy, num_copies))
            if num_given == len(trace):
                group.given_rows.append(self.demonstration_row(problem, trace))
                group.num_samples -= 1
            elif num_given:
                group.prefixes.append(trace[:num_given])

    def prefix_ratio(self, problem: Problem, step: Step, copy: int, num_copies: int) -> float:
        """Return the share of the demonstration's tokens that this copy gets."""
        drawn_copy = 0 if self.settings.prefix_shared else copy
        uniform = self.uniform(problem, step, drawn_copy)
        return prefix_share(self.settings, uniform, step.number, copy, num_copies)

    def uniform(self, problem: Problem, step: Step, copy: int) -> float:
        """Return a number in [0, 1) that follows from run, step, problem and copy."""
        return self.rng(step, f"prefix of {problem.uid}", copy).random()

    def fitting_traces(self, problem: Problem, step: Step) -> list[list[int]]:
        """Return the demonstrations as token ids, without those that are too long."""
        limit = self.config.rollout.max_response_tokens
        traces = self.ports.encoder.demonstrations(problem)
        fitting = [trace for trace in traces if len(trace) <= limit]
        step.metrics["demonstration/dropped"] += len(traces) - len(fitting)
        return fitting

    def demonstration_row(self, problem: Problem, trace: list[int]) -> Trajectory:
        """Return a whole demonstration as a row. Its behavior log-probs are 0 if not recorded."""
        logprobs = None
        if name := self.settings.demonstration_probs:
            probs = author_probs(problem, name, len(trace))
            logprobs = [math.log(p + 1e-6) for p in probs]
        return Trajectory(
            problem.uid,
            self.ports.encoder.prompt(problem),
            trace,
            source=DEMONSTRATION,
            finish="given",
            behavior_logprobs=logprobs,
            images=problem.prompt_images,
        )

    def score(self, batch: Batch, step: Step) -> Batch:
        """Leave demonstrations without reward out of the loss, if they shall be masked."""
        batch = super().score(batch, step)
        if self.settings.wrong_demonstrations == "mask":
            wrong = off_policy(batch) & batch.expand(batch.rows["reward"] <= 0)
            batch.tokens["loss_mask"] = batch.tokens["loss_mask"] & ~wrong
        return batch

    # ---- data and checks

    def data_notes(self, encoder: Encoder, problems: Sequence[Problem]) -> list[str]:
        """Note with which token the first demonstration ends."""
        notes = super().data_notes(encoder, problems)
        for problem in problems:
            if demonstrations := encoder.demonstrations(problem):
                end = describe_end(self.config, encoder, demonstrations[0][-1])
                return [*notes, end] if end else notes
        return notes

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise ConfigError if the data have no column method.demonstration_probs."""
        super().check_problems(problems)
        name = self.settings.demonstration_probs
        columns = [list(problem.extra) for problem in problems if problem.demonstrations]
        if name and columns and not any(name in names for names in columns):
            raise UnknownName(
                f"method.demonstration_probs={name} is no column of the data; "
                f"{did_you_mean(name, columns[0])}, or remove it"
            )

    def supply(self, encoder: Encoder, problems: Sequence[Problem]) -> Supply | None:
        """Count the problems that have a demonstration of which a row gets a part."""
        if not self.settings.num_demonstrations:
            return None
        return count_demonstrations(self.config, encoder, problems)

    def check(self) -> None:
        """Raise ConfigError for numbers that do not fit together."""
        super().check()
        config, settings = self.config, self.settings
        samples = config.rollout.samples
        if settings.num_demonstrations > samples:
            raise Conflict(
                f"method.num_demonstrations={settings.num_demonstrations} exceeds "
                f"rollout.samples={samples}; set it to at most {samples}"
            )
        if settings.prefix_min > settings.prefix_max:
            raise Conflict(
                f"method.prefix_min={settings.prefix_min} exceeds "
                f"method.prefix_max={settings.prefix_max}; lower it"
            )
        uses_parts = settings.prefix_strategy != "random" or settings.prefix_min < 1
        if uses_parts and settings.num_demonstrations and config.rollout.tools:
            raise Conflict(
                "rollout.tools needs whole demonstrations, because a part of one may end inside a "
                "tool call; use method.prefix_strategy=random method.prefix_min=1, or remove "
                "rollout.tools"
            )
        if settings.demonstration_probs and (uses_parts or settings.sft_coef):
            raise Conflict(
                "method.demonstration_probs needs whole demonstrations (method.prefix_min=1) and "
                "method.sft_coef=0"
            )


def count_demonstrations(config: Any, encoder: Encoder, problems: Sequence[Problem]) -> Supply:
    """Count the problems that have a demonstration of which a row gets at least one token.

    Counts in the first problems only, unless none of them has one: encoding takes time.
    """
    limit = config.rollout.max_response_tokens
    largest = _largest_prefix(config)
    num_counted, num, shortest = 0, 0, math.inf
    for problem in problems:
        if num and num_counted == MAX_COUNTED:
            break
        num_counted += 1
        lengths = [len(trace) for trace in encoder.demonstrations(problem)]
        num += any(length <= limit and int(length * largest) > 0 for length in lengths)
        shortest = min([shortest, *lengths])
    if math.isinf(shortest):
        fix = "add a column target, or set method.num_demonstrations=0"
    elif shortest > limit:
        fix = f"the shortest has {shortest}: raise rollout.max_response_tokens"
    else:
        fix = f"the largest prefix is {largest:.2g} of one: raise method.prefix_*"
    those = "" if num_counted == len(problems) else "the first "
    line = (
        f"demonstrations: {num:,} of {those}{num_counted:,} problems have one that fits in "
        f"{limit} tokens (rollout.max_response_tokens)"
    )
    return Supply(num, line, fix)


def _largest_prefix(config: Any) -> float:
    """Return the largest share of a demonstration's tokens that a row of the run can get."""
    settings = config.method
    num_copies = settings.num_demonstrations
    if num_copies < 0:
        num_copies = config.rollout.samples
    last = num_copies - 1
    return max(
        prefix_share(settings, 1.0, step, last, num_copies) for step in (1, config.training.steps)
    )


def prefix_share(settings: Any, uniform: float, step: int, copy: int, num_copies: int) -> float:
    """Return the share of its tokens that a copy of a demonstration gets at a step."""
    return prefix_ratio(
        settings.prefix_strategy,
        uniform,
        step=step,
        copy=copy,
        num_copies=num_copies,
        low=settings.prefix_min,
        high=settings.prefix_max,
        peak=settings.prefix_peak,
        steps=settings.prefix_steps,
    )


def author_probs(problem: Problem, name: str, num_tokens: int) -> list[float]:
    """Return the author's probability of each token. Raises RunError if their number is wrong."""
    probs = problem.extra.get(name) or []
    if len(probs) != num_tokens:
        raise RunError(
            f"{problem_label(problem)} has {len(probs)} numbers in the column {name} "
            f"(method.demonstration_probs) for {num_tokens} tokens, with the end token; "
            "correct the data"
        )
    return probs
