"""LUFFY: demonstrations are rows of the group, or prefixes of rows that the policy continues.

This file decides what a group contains; support/mixed_policy.py has the loss. As published, one row
of eight is a whole demonstration, and the loss of its tokens is -A · p / (p + 0.1). With
`num_demonstrations=0` it is the on-policy baseline.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from postgrad.algorithms.prefixes import STRATEGIES, prefix_ratio
from postgrad.config.schema import setting
from postgrad.data.render import Prompts
from postgrad.errors import ConfigError, did_you_mean
from postgrad.methods.base import Group, Step, Supply
from postgrad.methods.support import luffy_checks
from postgrad.methods.support.demonstrations import fitting_traces, whole_demonstration
from postgrad.methods.support.mixed_policy import MixedPolicy, MixedPolicySettings, off_policy
from postgrad.model.ends import describe_end
from postgrad.types import Batch, Problem

MAX_COUNTED = 1000  # problems whose demonstrations are encoded before the run


@dataclass
class LuffySettings(MixedPolicySettings):
    num_demonstrations: int = setting(
        1, "rows per group that are, or start with, a demonstration; -1: all", at_least=-1
    )
    demonstration_share: float = setting(
        1.0, "share of problems that use theirs, drawn per step", at_least=0.0, at_most=1.0
    )
    prefix_strategy: str = setting(
        "random", "which share of a demonstration's tokens a row gets", choices=STRATEGIES
    )
    prefix_shared: bool = setting(False, "draw that share once per group")
    prefix_min: float = setting(
        1.0, "smallest share (random, fixed); 1 is all of it", at_least=0.0, at_most=1.0
    )
    prefix_max: float = setting(
        1.0, "largest share (random, fixed); 1 is all of it", at_least=0.0, at_most=1.0
    )
    prefix_peak: float = setting(
        0.8, "largest share (linear, linear_max, reverse_linear)", at_least=0.0, at_most=1.0
    )
    prefix_steps: int = setting(1000, "steps over which prefix_peak falls or rises", at_least=1)
    overlong_demonstrations: str = setting(
        "drop", "those longer than rollout.max_response_tokens", choices=("drop", "error")
    )
    wrong_demonstrations: str = setting(
        "keep",
        "tokens of others in rows without reward: train on them, or mask them",
        choices=("keep", "mask"),
    )
    demonstration_probs: str = setting(
        "", "data column with the author's probability of each token, including the end token"
    )


class Luffy(MixedPolicy):
    Settings = LuffySettings
    counts = (*MixedPolicy.counts, "demonstration/dropped")

    def check(self) -> None:
        super().check()
        luffy_checks.check(self)

    def check_unread(self) -> None:
        super().check_unread()
        luffy_checks.check_unread(self.settings)

    def check_problems(self, problems: Sequence[Problem]) -> None:
        super().check_problems(problems)
        name = self.settings.demonstration_probs
        columns = [list(problem.extra) for problem in problems if problem.demonstrations]
        if name and columns and not any(name in names for names in columns):
            raise ConfigError(
                f"method.demonstration_probs={name} is no column of the data; "
                f"{did_you_mean(name, columns[0])}, or remove it"
            )

    def supply(self, prompts: Prompts, problems: Sequence[Problem]) -> Supply | None:
        """Counts the problems with a demonstration of which a row gets at least one token.

        Counts in the first problems only, unless none of them has one: encoding takes time.
        """
        if not self.settings.num_demonstrations:
            return None
        limit = self.config.rollout.max_response_tokens
        largest = self.largest_prefix_ratio()
        num_counted, num, shortest = 0, 0, math.inf
        for problem in problems:
            if num and num_counted == MAX_COUNTED:
                break
            num_counted += 1
            lengths = [len(trace) for trace in prompts.encode_demonstrations(problem)]
            num += any(length <= limit and int(length * largest) > 0 for length in lengths)
            shortest = min([shortest, *lengths])
        those = "" if num_counted == len(problems) else "the first "
        fix = "add a column target, or set method.num_demonstrations=0"
        if shortest > limit and math.isfinite(shortest):
            fix = f"the shortest has {shortest}: raise rollout.max_response_tokens"
        elif math.isfinite(shortest):
            fix = f"the largest prefix is {largest:.2g} of one: raise method.prefix_*"
        return Supply(
            num,
            f"demonstrations: {num:,} of {those}{num_counted:,} problems have one that fits in "
            f"{limit} tokens (rollout.max_response_tokens)",
            fix,
        )

    def largest_prefix_ratio(self) -> float:
        """The largest share of a demonstration's tokens that a row of this run can get."""
        num_copies = self.settings.num_demonstrations
        if num_copies < 0:
            num_copies = self.config.rollout.samples
        ends = [(1, num_copies - 1), (self.config.training.steps, num_copies - 1)]
        return max(self.prefix_share(1.0, step, copy, num_copies) for step, copy in ends)

    def data_notes(self, prompts: Prompts, problems: Sequence[Problem]) -> list[str]:
        notes = super().data_notes(prompts, problems)
        for problem in problems:
            if demonstrations := prompts.encode_demonstrations(problem):
                end = describe_end(self.config, prompts, demonstrations[0][-1])
                return [*notes, end] if end else notes
        return notes

    # ---- stages, on the driver

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        """Whole demonstrations are given rows; parts of one are prefixes of sampled rows."""
        step.metrics.setdefault("demonstration/dropped", 0.0)
        groups = super().compose(problems, step)
        for group in groups:
            self.add_demonstrations(group, step)
        return groups

    def add_demonstrations(self, group: Group, step: Step) -> None:
        problem = group.problem
        num_copies = self.settings.num_demonstrations
        if num_copies < 0:
            num_copies = group.num_samples
        is_shown = self.uniform(problem, step, -1) < self.settings.demonstration_share
        traces = fitting_traces(self, problem, step) if num_copies and is_shown else []
        if not traces:
            return
        for copy in range(num_copies):
            trace = traces[copy % len(traces)]
            num_given = int(len(trace) * self.prefix_ratio(problem, step, copy, num_copies))
            if num_given == len(trace):
                group.given_rows.append(whole_demonstration(self, problem, trace))
                group.num_samples -= 1
            elif num_given:
                group.prefixes.append(trace[:num_given])

    def uniform(self, problem: Problem, step: Step, copy: int) -> float:
        """A random number in [0, 1), determined by run, step, problem and copy."""
        return self.rng(step, f"prefix of {problem.uid}", copy).random()

    def prefix_ratio(self, problem: Problem, step: Step, copy: int, num_copies: int) -> float:
        """The share of the demonstration's tokens that this copy gets."""
        drawn_copy = 0 if self.settings.prefix_shared else copy
        uniform = self.uniform(problem, step, drawn_copy)
        return self.prefix_share(uniform, step.number, copy, num_copies)

    def prefix_share(self, uniform: float, step: int, copy: int, num_copies: int) -> float:
        """The share that method.prefix_strategy gives a copy at a step."""
        settings = self.settings
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

    def score(self, batch: Batch, step: Step) -> Batch:
        batch = super().score(batch, step)
        if self.settings.wrong_demonstrations == "mask":
            wrong = off_policy(batch) & batch.expand(batch.rows["reward"] <= 0)
            batch.tokens["loss_mask"] = batch.tokens["loss_mask"] & ~wrong
        return batch

    def off_shape(self) -> str:
        """With the author's probabilities the ratio is exact and is not shaped."""
        return "none" if self.settings.demonstration_probs else super().off_shape()
