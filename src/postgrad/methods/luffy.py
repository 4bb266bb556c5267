"""LUFFY: demonstrations sit in the group as rows of their own, or as the first tokens of rows that the policy continues.

This file says what a group holds; mixed.py, shared with ExGRPO, prices it. As published one row of eight is a whole demonstration and its
tokens' loss is -A · p / (p + 0.1). `num_demonstrations=0` is the on-policy baseline.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from postgrad.algorithms.prefixes import READS, STRATEGIES, prefix_ratio
from postgrad.config.schema import setting
from postgrad.errors import ConfigError, RunError
from postgrad.methods.base import Group, Step
from postgrad.methods.support.checks import refuse_unread
from postgrad.methods.support.mixed import Mixed, MixedSettings, off_policy
from postgrad.types import DEMONSTRATION, Batch, Problem, Trajectory


@dataclass
class LuffySettings(MixedSettings):
    num_demonstrations: int = setting(
        1, "rows of a group that are, or start with, a demonstration; -1: all of them", at_least=-1
    )
    demonstration_share: float = setting(
        1.0, "share of the problems that show theirs, drawn each step", at_least=0.0, at_most=1.0
    )
    prefix_strategy: str = setting(
        "random", "how much of a demonstration a row is given", choices=STRATEGIES
    )
    prefix_shared: bool = setting(False, "one draw for all rows of a group")
    prefix_min: float = setting(
        1.0, "least share of its tokens (random, fixed); 1 is all of it", at_least=0.0, at_most=1.0
    )
    prefix_max: float = setting(
        1.0, "largest share of its tokens (random, fixed)", at_least=0.0, at_most=1.0
    )
    prefix_peak: float = setting(
        0.8, "largest share (linear, linear_max, reverse_linear)", at_least=0.0, at_most=1.0
    )
    prefix_steps: int = setting(1000, "steps over which that share falls or rises", at_least=1)
    overlong_demonstrations: str = setting(
        "drop", "those beyond rollout.max_response_tokens", choices=("drop", "error")
    )
    wrong_demonstrations: str = setting(
        "keep",
        "where the row earns nothing: train, or mask what was given",
        choices=("keep", "mask"),
    )
    demonstration_probs: str = setting(
        "", "column of the data with the author's probability of each token and of the end"
    )


class Luffy(Mixed):
    Settings = LuffySettings

    def check(self) -> None:
        super().check()
        settings, samples = self.settings, self.config.rollout.samples
        if settings.num_demonstrations > samples:
            fix = f"set it to at most {samples}"
            raise ConfigError(
                f"method.num_demonstrations={settings.num_demonstrations} exceeds rollout.samples={samples}; {fix}"
            )
        if settings.prefix_min > settings.prefix_max:
            raise ConfigError(
                f"method.prefix_min={settings.prefix_min} exceeds method.prefix_max={settings.prefix_max}; lower it"
            )
        partly = settings.prefix_strategy != "random" or settings.prefix_min < 1
        if settings.demonstration_probs and (partly or settings.sft_coef):
            raise ConfigError(
                "method.demonstration_probs needs whole demonstrations (method.prefix_min=1) and method.sft_coef=0"
            )

    def check_used(self) -> None:
        """Settings of another way to give demonstrations than the chosen one, or of any where none are given."""
        super().check_used()
        settings, prefixes = (
            self.settings,
            ("prefix_min", "prefix_max", "prefix_peak", "prefix_steps", "prefix_shared"),
        )
        if not settings.num_demonstrations:
            own = [
                "demonstration_share",
                "overlong_demonstrations",
                "wrong_demonstrations",
                "demonstration_probs",
            ]
            shapes = ["off_shape", "off_advantage_scale", "prefix_advantage", "prefix_strategy"]
            refuse_unread(
                "method", settings, [*own, *prefixes, *shapes], "with method.num_demonstrations=0"
            )
        unread = [
            name
            for name in prefixes
            if name.removeprefix("prefix_") not in READS[settings.prefix_strategy]
        ]
        refuse_unread(
            "method", settings, unread, f"with method.prefix_strategy={settings.prefix_strategy}"
        )
        if settings.demonstration_probs:
            refuse_unread(
                "method",
                settings,
                ["off_shape"],
                "with method.demonstration_probs, whose ratio is exact",
            )

    def check_problems(self, problems: Sequence[Problem]) -> None:
        if self.settings.num_demonstrations and not any(
            problem.demonstrations for problem in problems
        ):
            fix = "add a column target or set method.num_demonstrations=0"
            raise ConfigError(
                f"no problem of data.train={self.config.data.train} has a demonstration; {fix}"
            )

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        """Demonstrations come first: whole ones are rows already, a part of one is what a sampled row starts with."""
        step.metrics.setdefault("demonstration/dropped", 0.0)
        groups = [Group(problem, self.config.rollout.samples) for problem in problems]
        for group in groups:
            self.add_demonstrations(group, step)
        return groups

    def add_demonstrations(self, group: Group, step: Step) -> None:
        problem, number = group.problem, self.settings.num_demonstrations
        copies = group.num_samples if number < 0 else number
        shown = copies > 0 and self.uniform(problem, step, -1) < self.settings.demonstration_share
        traces = self.traces(problem, step) if shown else []
        for copy in range(copies if traces else 0):
            trace = traces[copy % len(traces)]
            given = int(len(trace) * self.ratio(problem, step, copy, copies))
            if given == len(trace):
                group.given.append(self.whole(problem, trace))
                group.num_samples -= 1
            elif given:
                group.starts.append(trace[:given])

    def uniform(self, problem: Problem, step: Step, copy: int) -> float:
        """A number of [0, 1) that follows from run, step, problem and copy alone."""
        return self.random(step, f"prefix of {problem.uid}", copy).random()

    def ratio(self, problem: Problem, step: Step, copy: int, copies: int) -> float:
        settings = self.settings
        return prefix_ratio(
            settings.prefix_strategy,
            self.uniform(problem, step, 0 if settings.prefix_shared else copy),
            step=step.number,
            copy=copy,
            num_copies=copies,
            low=settings.prefix_min,
            high=settings.prefix_max,
            peak=settings.prefix_peak,
            steps=settings.prefix_steps,
        )

    def traces(self, problem: Problem, step: Step) -> list[list[int]]:
        """The problem's demonstrations as tokens; those that are too long are counted and left out, or refused."""
        limit, traces = (
            self.config.rollout.max_response_tokens,
            self.ports.prompts.encode_demonstrations(problem),
        )
        overlong = [len(ids) for ids in traces if len(ids) > limit]
        if overlong and self.settings.overlong_demonstrations == "error":
            fix = f"raise rollout.max_response_tokens (now {limit}) or set method.overlong_demonstrations=drop"
            raise RunError(
                f"the demonstration of problem {problem.uid} has {overlong[0]} tokens; {fix}"
            )
        step.metrics["demonstration/dropped"] += len(overlong)
        return [ids for ids in traces if len(ids) <= limit]

    def whole(self, problem: Problem, trace: list[int]) -> Trajectory:
        """A whole demonstration. Its behavior is what its author gave each token: probability 1 where nobody recorded it."""
        logprobs, prompt = None, self.ports.prompts.encode(problem)
        if name := self.settings.demonstration_probs:
            probs = problem.extra.get(name) or []
            if len(probs) != len(trace):
                seen = f"{len(probs)} numbers in {name} (method.demonstration_probs)"
                raise RunError(
                    f"problem {problem.uid} has {seen} for {len(trace)} tokens with the end; mend the data"
                )
            logprobs = [math.log(p + 1e-6) for p in probs]
        return Trajectory(
            problem.uid,
            prompt,
            trace,
            source=DEMONSTRATION,
            finish="given",
            behavior_logprobs=logprobs,
        )

    def score(self, batch: Batch, step: Step) -> Batch:
        batch = super().score(batch, step)
        if self.settings.wrong_demonstrations == "mask":
            batch.tokens["loss_mask"] = batch.tokens["loss_mask"] & ~(
                off_policy(batch) & batch.expand(batch.rows["reward"] <= 0)
            )
        return batch

    def off_shape(self) -> str:
        """Where the author's probabilities are known the ratio is exact and keeps its shape; its bounds hold."""
        return "none" if self.settings.demonstration_probs else super().off_shape()
