"""A run to estimate: its settings, its models, its data as lengths, and the passes of a step."""

import dataclasses
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from postgrad.config.schema import Config
from postgrad.model.device import KERNEL_DEVICE
from postgrad.model.load.context import context_length
from postgrad.model.passes.layout import plan_packed
from postgrad.model.passes.support import CAPTURED_FAMILIES, packing_problem

DEFAULT_MAX_ROWS = 256
DEFAULT_TOKEN_BUDGET = 8192
# Kind of a model that is the policy without its adapters, and so needs no weights of its own.
SHARED_WEIGHTS = "shared weights"
Roles = dict[str, tuple[str, Any]]  # name -> (kind, transformers configuration)


@dataclass(frozen=True)
class GroupLengths:
    """The group of one problem as numbers of tokens."""

    prompt: int
    given: tuple[int, ...]  # responses that are not sampled, such as demonstrations
    num_samples: int
    rows_per_loss: int = 1  # rows of the group that one loss reads jointly, so that a pass has all
    image_tokens: int = 0  # tokens of the prompt that stand for pictures


class PictureSizes(NamedTuple):
    """The pictures of all problems."""

    tokens: int = 0
    pixel_bytes: float = 0.0  # that a tower reads for one of the tokens


NO_PICTURES = PictureSizes()


@dataclass(frozen=True)
class Workload:
    """The data of a run as lengths: the groups of its first step, and what bounds the others."""

    groups: list[GroupLengths]
    longest_prompt: int
    num_validation: int = 0  # problems that one validation answers
    pictures: PictureSizes = NO_PICTURES


@dataclass(frozen=True)
class Plan:
    """A run to estimate: its resolved configuration, its models and its data as lengths."""

    config: Config
    model: Any  # transformers configuration of the policy
    workload: Workload
    roles: Roles = dataclasses.field(default_factory=dict)  # the models besides the policy
    packed: bool = False  # passes without padding, by the kernels of a GPU

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

    def changed(self, key: str, value: Any) -> "Plan":
        """Return the plan with another value of a setting, such as training.token_budget."""
        section, name = key.split(".")
        settings = replace(getattr(self.config, section), **{name: value})
        return replace(self, config=replace(self.config, **{section: settings}))


def runs_packed(config: Config, model_config: Any) -> bool:
    """Return whether this run's passes are packed and computed by the Triton kernels."""
    text_config = model_config.get_text_config()
    return (
        config.model.device == KERNEL_DEVICE
        and text_config.model_type in CAPTURED_FAMILIES
        # A model of text, or of text and pictures whose tokens do not see later ones.
        and (text_config is model_config or hasattr(model_config, "vision_config"))
        and model_config.model_type != "gemma3"
        and not getattr(text_config, "num_experts", None)  # how many tokens an expert gets is data
        and not packing_problem(SimpleNamespace(config=model_config))
    )


# ---- a plan of settings alone


@dataclass(frozen=True)
class RowKinds:
    """Which rows a method trains on."""

    given_per_problem: int = 0  # 0 if the rows are sampled
    rows_per_loss: int = 1  # rows that one loss reads jointly
    samples_in_validation: bool = True


SAMPLED = RowKinds()


def plan_of_settings(
    config: Config,
    model_config: Any,
    roles: Roles,
    rows: RowKinds = SAMPLED,
    pictures: PictureSizes = NO_PICTURES,
) -> Plan:
    """Return the plan of a run on a GPU with the longest rows that its settings allow.

    With pictures, all tokens of the prompts stand for some.
    """
    prompt = config.data.max_prompt_tokens
    context = context_length(model_config)
    response = min(config.rollout.max_response_tokens, max(1, context - prompt))
    rollout = replace(config.rollout, max_response_tokens=response)
    given = (response,) * rows.given_per_problem
    samples = 0 if given else rollout.samples
    image_tokens = prompt if pictures.tokens else 0
    group = GroupLengths(prompt, given, samples, rows.rows_per_loss, image_tokens)
    num_validation = 0
    if given and rows.samples_in_validation:
        num_validation = rollout.max_rows or DEFAULT_MAX_ROWS
    groups = [group] * config.training.problems_per_step
    workload = Workload(groups, prompt, num_validation, pictures)
    return Plan(replace(config, rollout=rollout), model_config, workload, roles, True)


# ---- one step


class Row(NamedTuple):
    """One trajectory as numbers: its problem, its tokens, and the rows that one loss reads."""

    problem: int
    prompt: int
    response: int
    unit: int
    image_tokens: int = 0


class Pass(NamedTuple):
    """One forward and backward pass."""

    tokens: int
    response_tokens: int
    rows: tuple[Row, ...] = ()

    @property
    def image_tokens(self) -> int:
        return sum({row.problem: row.image_tokens for row in self.rows}.values())


@dataclass(frozen=True)
class StepLayout:
    """One step as it is computed, with all sampled responses at their full length."""

    num_rows: int
    num_sampled: int  # rows that the engine samples
    tokens: int  # prompts and responses of all rows
    num_passes: int
    passes: tuple[Pass, ...]  # of one update, each prompt once per pass

    @property
    def largest_pass(self) -> Pass:
        return max(self.passes)


def lay_out_step(plan: Plan) -> StepLayout:
    """Return one step in the packed passes of the trainer."""
    groups = plan.workload.groups
    rows = _rows(groups, plan.config.rollout.max_response_tokens)
    num_groups = math.ceil(len(groups) / plan.config.training.updates_per_step)
    update = [row for row in rows if row.problem < num_groups]
    planned = plan_packed(
        [row.problem for row in update],
        [row.prompt for row in update],
        [row.response for row in update],
        plan.token_budget,
        [row.unit for row in update],
    )
    passes = tuple(_make_pass([update[i] for i in numbers]) for numbers in planned)
    return StepLayout(
        num_rows=len(rows),
        num_sampled=sum(group.num_samples for group in groups),
        tokens=sum(row.prompt + row.response for row in rows),
        num_passes=round(len(groups) / num_groups * len(passes)),
        passes=passes,
    )


def _rows(groups: list[GroupLengths], response_tokens: int) -> list[Row]:
    """Return the rows of the groups; sampled responses have `response_tokens` tokens."""
    rows: list[Row] = []
    unit = 0
    for number, group in enumerate(groups):
        for place, length in enumerate([*group.given, *[response_tokens] * group.num_samples]):
            unit += place % group.rows_per_loss == 0
            rows.append(Row(number, group.prompt, length, unit, group.image_tokens))
    return rows


def _make_pass(rows: list[Row]) -> Pass:
    responses = sum(row.response for row in rows)
    prompts = {row.problem: row.prompt - 1 for row in rows}
    return Pass(responses + sum(prompts.values()), responses, tuple(rows))
