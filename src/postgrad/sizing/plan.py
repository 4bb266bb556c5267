"""A run to estimate: its settings, its models, its data as lengths, and one step of it."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from postgrad.config.schema import Config
from postgrad.errors import ConfigError
from postgrad.model.passes.layout import MicroBatch, make_padded_micro_batches
from postgrad.sizing.simulate import ModelSize
from postgrad.types import Batch, Trajectory

DEFAULT_MAX_ROWS = 256
DEFAULT_TOKEN_BUDGET = 8192
# Kind of a model that is the policy without its adapters, and so needs no weights of its own.
SHARED_WEIGHTS = "shared weights"
# Kind of a copy that follows the policy as an average, with float32 masters of its weights.
AVERAGED_WEIGHTS = "averaged weights"


def role_weight_bytes(kind: str, size: ModelSize) -> int:
    """Return the bytes of the weights of a model besides the policy, in one process."""
    if kind == SHARED_WEIGHTS:
        return 0
    return size.weights + (4 * size.parameters if kind == AVERAGED_WEIGHTS else 0)


@dataclass(frozen=True)
class GroupLengths:
    """The group of one problem as numbers of tokens."""

    prompt: int
    given: tuple[int, ...]  # responses that are not sampled, such as demonstrations
    num_samples: int
    rows_per_loss: int = 1  # rows of the group that one loss reads jointly, so that a pass has all

    def responses(self, response_tokens: int) -> list[int]:
        """Return the length of every response if sampled ones have `response_tokens` tokens."""
        return [*self.given, *[response_tokens] * self.num_samples]

    def units(self, response_tokens: int) -> list[list[int]]:
        """Return the lengths of the responses that a pass cannot divide, without empty ones."""
        lengths = self.responses(response_tokens)
        size = self.rows_per_loss
        units = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        return [kept for unit in units if (kept := [length for length in unit if length])]


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
    packed: bool = False  # passes without padding, by the kernels of a GPU

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

    @property
    def rollouts_overlap(self) -> bool:
        """Whether the engine samples while the trainer works."""
        return self.config.rollout.staleness > 0


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
    passes: tuple[tuple[int, int], ...]  # tokens and response tokens of one update's first passes
    largest_padded_pass: MicroBatch | None  # None if the passes are packed

    @property
    def largest_pass(self) -> MicroBatch:
        """The largest pass, if passes are padded."""
        assert self.largest_padded_pass is not None, "packed passes have no micro-batch"
        return self.largest_padded_pass


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
    """Return one step in passes. Every sampled response has `response_tokens` tokens."""
    groups = plan.workload.groups
    one_update = groups[: math.ceil(len(groups) / plan.config.training.updates_per_step)]
    largest_pass = None
    if plan.packed:
        passes = pack_groups(one_update, response_tokens, plan.token_budget)
        num_laid_out = len(one_update)
    else:
        micro_batches, num_laid_out = pad_groups(plan, one_update, response_tokens)
        passes = [(micro.num_tokens, len(micro.gather)) for micro in micro_batches]
        largest_pass = max(micro_batches, key=lambda micro: micro.num_tokens)
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
        padded_tokens=round(scale * sum(num_tokens for num_tokens, _ in passes)),
        num_passes=round(scale * len(passes)),
        passes=tuple(passes),
        largest_padded_pass=largest_pass,
    )


def pad_groups(
    plan: Plan, groups: list[GroupLengths], response_tokens: int
) -> tuple[list[MicroBatch], int]:
    """Return padded micro-batches of the first groups, and how many groups those are.

    They are made by the trainer's own code. A table of the whole step could be large.
    """
    rows: list[Trajectory] = []
    row_groups: list[int] = []
    num_units = 0
    num_laid_out = 0
    for group in groups:
        prompt = [num_laid_out] * group.prompt
        for unit in group.units(response_tokens):
            for length in unit:
                rows.append(Trajectory(str(num_laid_out), prompt, [0] * length, num_laid_out))
                row_groups.append(num_units)
            num_units += 1
        num_laid_out += 1
        if sum(len(row.prompt) + len(row.response) for row in rows) > 4 * plan.token_budget:
            break
    joint = row_groups if any(group.rows_per_loss > 1 for group in groups) else None
    passes = make_padded_micro_batches(Batch.of(rows), plan.token_budget, plan.width, joint)
    return passes, num_laid_out


def pack_groups(
    groups: list[GroupLengths], response_tokens: int, token_budget: int
) -> list[tuple[int, int]]:
    """Return (tokens, response tokens) of the packed passes over these groups.

    As in layout.make_packed_micro_batches, a pass computes each prompt once, without its last
    token, which belongs to every response.
    """
    passes: list[tuple[int, int]] = []
    tokens = 0
    trained = 0
    for group in groups:
        is_new = True
        for unit in group.units(response_tokens):
            length = sum(unit)
            prompt = group.prompt - 1
            if trained and tokens + length + (prompt if is_new else 0) > token_budget:
                passes.append((tokens, trained))
                tokens = 0
                trained = 0
                is_new = True
            tokens += length + (prompt if is_new else 0)
            trained += length
            is_new = False
    if trained:
        passes.append((tokens, trained))
    return passes
