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
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from postgrad.algorithms.prefixes import READS, STRATEGIES, prefix_ratio
from postgrad.algorithms.shaping import drop_confident, off_policy_shape, reshaped_loss
from postgrad.config.effects import Condition
from postgrad.config.schema import setting
from postgrad.data.encode.encoder import Encoder
from postgrad.errors import ConfigError, RunError, did_you_mean
from postgrad.methods.grpo import Grpo
from postgrad.methods.method import Supply
from postgrad.methods.step import Group, Step
from postgrad.methods.support import luffy_checks
from postgrad.methods.support.mixed_policy import (
    MixedPolicySettings,
    log_sources,
    log_token_share,
    off_policy,
    on_policy_rows,
)
from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.model.load.eos import describe_end
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.problem import named
from postgrad.types import DEMONSTRATION, POLICY, Batch, Problem, Trajectory

SHOWN = "method.num_demonstrations"  # a condition of settings


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
    overlong_demonstrations: str = setting(
        "drop",
        "those longer than rollout.max_response_tokens",
        choices=("drop", "error"),
        only_with=SHOWN,
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


class MixedPolicyObjective(PolicyObjective):
    """GRPO's loss on the policy's tokens, the shaped off-policy loss on tokens of others."""

    def check(self) -> None:
        """Raise ConfigError for options that the shapes do not take."""
        luffy_checks.check_shapes(self.settings, self.off_shape())

    def prepare(self, batch: Batch) -> Batch:
        """Mask tokens that the policy is sure of; give the entropy bonus a mean over tokens."""
        if self.settings.max_probability is not None:
            batch.tokens["loss_mask"] = drop_confident(
                batch.tokens["old_logprobs"],
                batch.tokens["loss_mask"],
                self.settings.max_probability,
            )
        mask = batch.tokens["loss_mask"]
        batch.tokens["entropy_weight"] = self.token_weights("token-mean", mask, batch)
        return super().prepare(batch)

    def loss_weight(self, batch: Batch) -> Tensor:
        """Return (tokens,) the weights. The SFT loss is a mean over all tokens of others."""
        if not self.settings.sft_coef:
            return super().loss_weight(batch)
        mask, off = batch.tokens["loss_mask"], off_policy(batch)
        policy_weight = self.token_weights(self.settings.aggregation, mask & ~off, batch)
        return policy_weight + self.token_weights("token-mean", mask & off, batch)

    def token_losses(
        self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
    ) -> Tensor:
        """Return (tokens,) -A · f(p) on tokens of others, the policy loss on the others."""
        mask = batch.tokens["loss_mask"]
        off = off_policy(batch)
        ratio = self.off_ratio(current.logprobs - batch.tokens["behavior_logprobs"])
        on_values = self.on_policy_losses(batch, current, metrics)
        values = torch.where(off, -batch.tokens["advantages"] * ratio, on_values)
        weighted = (values * batch.tokens["loss_weight"]).detach()
        for name, part in (("on_policy", mask & ~off), ("off_policy", mask & off)):
            metrics.total(f"{name}/loss", float(weighted[part].sum()))
            metrics.total(f"{name}/tokens", float(part.sum()))
        metrics.mean("off_policy/ratio", ratio, mask & off)
        return values

    def off_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return (tokens,) f(p). For the SFT loss it is log p: the loss is then -A · log p."""
        if self.settings.sft_coef:
            return log_ratio
        return off_policy_shape(log_ratio, self.off_shape(), **self.settings.off_options)

    def off_shape(self) -> str:
        """Return the shape f of the ratio on tokens of others."""
        return self.settings.off_shape

    def on_policy_losses(
        self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
    ) -> Tensor:
        """Return (tokens,) the loss of the policy's tokens; meaningless on tokens of others."""
        policy_mask = batch.tokens["loss_mask"] & ~off_policy(batch)
        tokens = {**batch.tokens, "loss_mask": policy_mask}  # metrics count these tokens only
        policy_batch = Batch(batch.prompt, batch.response, tokens, dict(batch.rows))
        values = super().token_losses(policy_batch, current, metrics)
        shape = self.on_shape(batch)
        if shape == "none":
            return values
        options = self.loss_options(batch)
        options.pop("dual_clip", None)
        return reshaped_loss(
            current.logprobs,
            batch.tokens["old_logprobs"],
            batch.tokens["advantages"],
            shape,
            **options,
            **self.settings.on_options,
        )

    def on_shape(self, batch: Batch) -> str:
        """Return the shape of the ratio on the policy's tokens."""
        return self.settings.on_shape


class MixedPolicy(Grpo):
    """GRPO on groups with tokens of others; ExGRPO derives from it as well."""

    Settings = MixedPolicySettings
    Objective = MixedPolicyObjective
    traits = replace(Grpo.traits, environments=False)  # rows of others have no reward of one

    def score(self, batch: Batch, step: Step) -> Batch:
        """Score all rows with one verifier and log the mean reward per kind of row."""
        batch = super().score(batch, step)
        log_sources(batch, step)
        return batch

    def refill(self, batch: Batch, step: Step) -> Batch:
        """Log the share of tokens of others in the kept rows."""
        batch = super().refill(batch, step)
        log_token_share(batch, step)
        return batch

    def log_rewards(self, batch: Batch, step: Step) -> None:
        """Log the mean reward per kind of row over all refills."""
        super().log_rewards(batch, step)
        log_sources(batch, step)

    def needs_old_logprobs(self) -> bool:
        """Return whether something reads them, here also method.max_probability."""
        return super().needs_old_logprobs() or self.settings.max_probability is not None

    def compute_old_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Skip rows without a token of the policy, unless a setting reads their values."""
        from_policy = batch.sum_tokens((batch.tokens["token_source"] == POLICY).long()) > 0
        is_setting_read = self.settings.max_probability is not None or self.settings.top_entropy < 1
        rows = torch.nonzero(from_policy | is_setting_read)[:, 0]
        part = super().compute_old_logprobs(batch.select(rows), step)
        for name in ("old_logprobs", "sum_probs_squared", "entropy"):
            batch.tokens[name] = torch.zeros(batch.num_tokens)
            batch.tokens[name][batch.response.positions(rows)] = part.tokens[name]
        return batch

    def advantage_columns(self, batch: Batch, step: Step) -> dict[str, Any]:
        """Exclude rows with a given prefix from the baseline of grpo_split, by `on_policy`."""
        return super().advantage_columns(batch, step) | {"on_policy": on_policy_rows(batch)}

    def estimate(self, batch: Batch, step: Step) -> Batch:
        """Scale the group's advantages by who wrote the token."""
        batch = super().estimate(batch, step)
        settings = self.settings
        off = off_policy(batch)
        scale = torch.where(off, settings.off_advantage_scale, settings.on_advantage_scale)
        values = batch.tokens["advantages"] * scale
        if not settings.truncated_advantage:
            truncated = torch.tensor([finish == "length" for finish in batch.rows["finish"]])
            values = values * ~batch.expand(truncated)
        if settings.prefix_advantage is not None:
            constant = settings.prefix_advantage / self.config.rollout.samples
            values = torch.where(off, constant, values)
        if settings.sft_coef:  # the loss -A · log p with a constant A is the SFT loss
            values = torch.where(off, settings.sft_coef, values)
        batch.tokens["advantages"] = values * batch.tokens["loss_mask"]
        return batch


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
        settings = self.settings
        drawn_copy = 0 if settings.prefix_shared else copy
        return prefix_ratio(
            settings.prefix_strategy,
            self.uniform(problem, step, drawn_copy),
            step=step.number,
            copy=copy,
            num_copies=num_copies,
            low=settings.prefix_min,
            high=settings.prefix_max,
            peak=settings.prefix_peak,
            steps=settings.prefix_steps,
        )

    def uniform(self, problem: Problem, step: Step, copy: int) -> float:
        """Return a number in [0, 1) that follows from run, step, problem and copy."""
        return self.rng(step, f"prefix of {problem.uid}", copy).random()

    def fitting_traces(self, problem: Problem, step: Step) -> list[list[int]]:
        """Return the demonstrations as token ids, without those that are too long."""
        limit = self.config.rollout.max_response_tokens
        traces = self.ports.encoder.demonstrations(problem)
        fitting = [trace for trace in traces if len(trace) <= limit]
        if len(fitting) < len(traces) and self.settings.overlong_demonstrations == "error":
            longest = max(map(len, traces))
            raise RunError(
                f"the demonstration of {named(problem)} has {longest} tokens; raise "
                f"rollout.max_response_tokens (now {limit}) or set "
                "method.overlong_demonstrations=drop"
            )
        step.metrics["demonstration/dropped"] += len(traces) - len(fitting)
        return fitting

    def demonstration_row(self, problem: Problem, trace: list[int]) -> Trajectory:
        """Return a whole demonstration as a row. Its behavior log-probs are 0 if not recorded."""
        logprobs = None
        if name := self.settings.demonstration_probs:
            probs = luffy_checks.author_probs(problem, name, len(trace))
            logprobs = [math.log(p + 1e-6) for p in probs]
        return Trajectory(
            problem.uid,
            self.ports.encoder.prompt(problem),
            trace,
            source=DEMONSTRATION,
            finish="given",
            behavior_logprobs=logprobs,
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
            raise ConfigError(
                f"method.demonstration_probs={name} is no column of the data; "
                f"{did_you_mean(name, columns[0])}, or remove it"
            )

    def supply(self, encoder: Encoder, problems: Sequence[Problem]) -> Supply | None:
        """Count the problems that have a demonstration of which a row gets a part."""
        if not self.settings.num_demonstrations:
            return None
        return luffy_checks.count_demonstrations(self.config, encoder, problems)

    def check(self) -> None:
        """Raise ConfigError for numbers that do not fit together."""
        super().check()
        luffy_checks.check(self.config)
