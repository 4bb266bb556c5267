"""Sets what a run leaves to the machine so that it fits into the memory of one GPU.

The estimate decides, before anything is loaded: first fewer tokens per pass, which costs little
time; then activation checkpointing, which computes the blocks twice. A row is never split over
passes, so long rows need the latter. What memory is left then keeps attention outputs.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

from postgrad.config.schema import Config
from postgrad.model.load.context import context_length
from postgrad.sizing.devices import GpuSpec
from postgrad.sizing.gpu_memory import GpuEstimator, Widths, kept_bytes
from postgrad.sizing.largest import largest_budget
from postgrad.sizing.plan import (
    DEFAULT_MAX_ROWS,
    GroupLengths,
    Plan,
    Workload,
)
from postgrad.sizing.simulate import measure_size

SPARE_SHARE = 0.85  # of the memory may be used for kept attention
STATE_BYTES = 22  # per weight, at most: weight, master, moments, gradient, working copy
Roles = dict[str, tuple[str, Any]]


@dataclass(frozen=True)
class RowKinds:
    """Which rows a method trains on."""

    given_per_problem: int = 0  # 0 if the rows are sampled
    rows_per_loss: int = 1  # rows that one loss reads jointly
    samples_in_validation: bool = True


SAMPLED = RowKinds()


def plan_of_settings(
    config: Config, model_config: Any, roles: Roles, rows: RowKinds = SAMPLED
) -> Plan:
    """Return the plan of a run on a GPU with the longest rows that its settings allow."""
    prompt = config.data.max_prompt_tokens
    context = context_length(model_config)
    response = min(config.rollout.max_response_tokens, max(1, context - prompt))
    rollout = replace(config.rollout, max_response_tokens=response)
    given = (response,) * rows.given_per_problem
    samples = 0 if given else rollout.samples
    group = GroupLengths(prompt, given, samples, rows.rows_per_loss)
    num_validation = 0
    if given and rows.samples_in_validation:
        num_validation = rollout.max_rows or DEFAULT_MAX_ROWS
    workload = Workload([group] * config.training.problems_per_step, prompt, num_validation)
    return Plan(replace(config, rollout=rollout), model_config, workload, roles, True)


def choose_passes(
    plan: Plan, gpu: GpuSpec, default_budget: int, recomputed_budget: int
) -> tuple[int, bool]:
    """Return training.token_budget and model.activation_checkpointing of the run.

    Args:
        plan: the run; a token budget of 0 and checkpointing None are free to choose.
        gpu: where it runs.
        default_budget: tokens per pass if memory is no limit.
        recomputed_budget: the same with activation checkpointing.

    If nothing fits, these are the first choice: the run then says what it needs memory for.
    """
    estimator = GpuEstimator(gpu)
    budget = plan.config.training.token_budget
    checkpointing = plan.config.model.activation_checkpointing
    kinds = (False, True) if checkpointing is None else (checkpointing,)
    for recompute in kinds:
        wanted = budget or (recomputed_budget if recompute else default_budget)
        changed = _with_passes(plan, wanted, recompute)
        if _surely_fits(changed, gpu) or estimator.estimate(changed).peak <= gpu.usable:
            return wanted, recompute
        largest = 0 if budget else min(wanted, largest_budget(changed, estimator))
        if largest:
            return largest, recompute
    return budget or (recomputed_budget if kinds[0] else default_budget), kinds[0]


def choose_kept_attention(plan: Plan, gpu: GpuSpec) -> int:
    """Return how many recomputed blocks keep their attention outputs: as many as fit.

    The estimate may be wrong by some percent, so not all of the memory is used for what only saves
    time.
    """
    estimator = GpuEstimator(gpu)

    def update_bytes(num_kept: int) -> int:
        memory = estimator.estimate(_with_kept_attention(plan, num_kept))
        return sum(memory.held.values()) + sum(memory.phases["update"].values())

    num_blocks = int(plan.model.get_text_config().num_hidden_layers)
    numbers = range(1, num_blocks + 1)
    return bisect_right(numbers, SPARE_SHARE * gpu.usable, key=update_bytes)


def _with_kept_attention(plan: Plan, num_blocks: int) -> Plan:
    model = replace(plan.config.model, kept_attention_blocks=num_blocks)
    return replace(plan, config=replace(plan.config, model=model))


def _surely_fits(plan: Plan, gpu: GpuSpec) -> bool:
    """Return whether a run is so small that the estimate, which takes a second, is not needed."""
    size = measure_size(plan.config, plan.model)
    responses = max(group.rows_per_loss for group in plan.workload.groups)
    responses *= plan.config.rollout.max_response_tokens
    tokens = max(plan.workload.longest_prompt + responses, plan.token_budget)
    activations = tokens * size.blocks * kept_bytes(Widths.of(plan.model), size.bytes_each)
    state = STATE_BYTES * size.parameters * (1 + len(plan.roles))
    return 2 * (state + 2 * activations) < gpu.usable


def _with_passes(plan: Plan, budget: int, recompute: bool) -> Plan:
    training = replace(plan.config.training, token_budget=budget)
    model = replace(plan.config.model, activation_checkpointing=recompute)
    return replace(plan, config=replace(plan.config, training=training, model=model))
