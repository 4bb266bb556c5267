"""A run to estimate: its settings, its models, its data as lengths, and one step of it."""

import dataclasses
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from postgrad.config.schema import Config
from postgrad.data.feed import Feed
from postgrad.doctor.simulate import ModelSize
from postgrad.errors import ConfigError, RunError
from postgrad.methods.base import Method, Ports, Step
from postgrad.model.passes.layout import MicroBatch, make_padded_micro_batches
from postgrad.training.prepare import Inputs
from postgrad.types import Batch, Trajectory

DEFAULT_MAX_ROWS = 256
DEFAULT_TOKEN_BUDGET = 8192


@dataclass(frozen=True)
class GroupLengths:
    """The group of one problem as numbers of tokens."""

    prompt: int
    given: tuple[int, ...]  # responses that are not sampled, such as demonstrations
    num_samples: int

    def responses(self, response_tokens: int) -> list[int]:
        """Return the length of every response if sampled ones have `response_tokens` tokens."""
        return [*self.given, *[response_tokens] * self.num_samples]


@dataclass(frozen=True)
class Workload:
    """The data of a run as lengths: the groups of its first step, and what bounds the others."""

    groups: list[GroupLengths]
    longest_prompt: int
    num_validation: int = 0  # problems that one validation answers


@dataclass(frozen=True)
class Plan:
    """A run to estimate: its resolved configuration, its models and its data as lengths."""

    config: Config
    model: Any  # transformers configuration of the policy
    workload: Workload
    # name -> (kind, transformers configuration) of the models besides the policy
    roles: dict[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def width(self) -> int:
        return int(self.model.get_text_config().hidden_size)

    @property
    def max_rows(self) -> int:
        return self.config.rollout.max_rows or DEFAULT_MAX_ROWS

    @property
    def decode_rows(self) -> int:
        """Number of rows that the engine decodes at once, at most."""
        num_sampled = sum(group.num_samples for group in self.workload.groups)
        return min(self.max_rows, max(num_sampled, self.workload.num_validation))

    @property
    def token_budget(self) -> int:
        """Number of tokens of one pass, at most."""
        return self.config.training.token_budget or DEFAULT_TOKEN_BUDGET


@dataclass(frozen=True)
class StepLayout:
    """One step as it is computed."""

    num_rows: int
    num_sampled: int  # rows that the engine samples
    sampled_tokens: int  # tokens of each sampled response
    prompt_tokens: int  # of all prompts with sampled responses
    tokens: int  # prompts and responses of all rows
    padded_tokens: int  # of all passes, forward and backward
    num_passes: int
    largest_pass: MicroBatch


def read_workload(config: Config, method: Method, inputs: Inputs) -> Workload:
    """Return the lengths of the first step, composed by the method. Nothing is sampled.

    Raises ConfigError if the data lack what the method needs.
    """
    engine: Any = SimpleNamespace(shares_weights=not config.cluster.engine_apart)
    method.bind(Ports(None, engine, inputs.scorer, inputs.prompts))  # type: ignore[arg-type]
    step = Step(1, Feed(inputs.train, config.seed, config.data.shuffle))
    try:
        composed = method.compose(method.draw(None, step), step)
    except RunError as error:
        raise ConfigError(str(error)) from error
    encoder = method.row_encoder(inputs.prompts)
    groups: list[GroupLengths] = []
    for group in composed:
        prompt = len(encoder.encode(group.problem))
        given = tuple(len(trajectory.response) for trajectory in group.given_rows)
        groups.append(GroupLengths(prompt, given, group.num_samples))
    held_out = [problem for problems in inputs.validation.values() for problem in problems]
    longest = max(len(encoder.encode(problem)) for problem in [*inputs.train, *held_out])
    return Workload(groups, longest, len(held_out) if method.needs_verifier() else 0)


def check_context(plan: Plan, size: ModelSize) -> None:
    """Raise ConfigError if a prompt and its response may exceed the model's context."""
    prompt = plan.workload.longest_prompt
    response = plan.config.rollout.max_response_tokens
    if plan.decode_rows and prompt + response > size.context:
        raise ConfigError(
            f"a prompt of {prompt} tokens and rollout.max_response_tokens={response} exceed the "
            f"model's context of {size.context}; lower rollout.max_response_tokens "
            "or data.max_prompt_tokens"
        )


def lay_out_step(plan: Plan, response_tokens: int) -> StepLayout:
    """Return one step in micro-batches, made by the trainer's own code.

    Every sampled response has `response_tokens` tokens. Only the first groups of an update are
    laid out and then scaled: a table of the whole step could be large.
    """
    groups = plan.workload.groups
    rows: list[Trajectory] = []
    num_laid_out = 0
    for group in groups[: math.ceil(len(groups) / plan.config.training.updates_per_step)]:
        prompt = [num_laid_out] * group.prompt
        for length in group.responses(response_tokens):
            rows.append(Trajectory(str(num_laid_out), prompt, [0] * length, num_laid_out))
        num_laid_out += 1
        if sum(len(row.prompt) + len(row.response) for row in rows) > 4 * plan.token_budget:
            break
    passes = make_padded_micro_batches(Batch.of(rows), plan.token_budget, plan.width)
    scale = len(groups) / num_laid_out
    num_rows = 0
    tokens = 0
    for group in groups:
        lengths = group.responses(response_tokens)
        num_rows += len(lengths)
        tokens += group.prompt * len(lengths) + sum(lengths)
    return StepLayout(
        num_rows=num_rows,
        num_sampled=sum(group.num_samples for group in groups),
        sampled_tokens=response_tokens,
        prompt_tokens=sum(group.prompt for group in groups if group.num_samples),
        tokens=tokens,
        padded_tokens=round(scale * sum(micro.num_tokens for micro in passes)),
        num_passes=round(scale * len(passes)),
        largest_pass=max(passes, key=lambda micro: micro.num_tokens),
    )
