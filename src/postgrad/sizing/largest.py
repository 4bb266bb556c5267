"""The largest settings with which a run still fits: tokens per pass, group and response."""

from collections.abc import Callable
from dataclasses import replace

from postgrad.model.load.context import context_length
from postgrad.sizing.gpu_memory import GpuEstimator, wanted_cache_bytes
from postgrad.sizing.plan import GroupLengths, Plan

BUDGET_STEP = 1024
LENGTH_STEP = 256
MAX_BUDGET = 1 << 18
MAX_GROUP = 1024


def largest_settings(plan: Plan, estimator: GpuEstimator) -> dict[str, int]:
    """Return the largest value of each setting that fits while the others stay as they are.

    The group is the largest whose responses decode all at the same time. A setting is left out if
    the run does not use it.
    """
    largest = {"training.token_budget": largest_budget(plan, estimator)}
    if plan.decode_rows:
        largest["rollout.samples"] = largest_group(plan, estimator)
        largest["rollout.max_response_tokens"] = largest_response(plan, estimator)
    return {setting: value for setting, value in largest.items() if value}


def largest_budget(plan: Plan, estimator: GpuEstimator) -> int:
    """Return the largest training.token_budget that fits, a multiple of 1,024; 0 if none does.

    A budget that holds all tokens of an update is the most that has an effect.
    """
    length = plan.config.rollout.max_response_tokens
    tokens = 0
    for group in plan.workload.groups:
        tokens += group.prompt + sum(group.responses(length))
    tokens //= plan.config.training.updates_per_step
    most = min(MAX_BUDGET, -(-tokens // BUDGET_STEP) * BUDGET_STEP)

    def fits(steps: int) -> bool:
        return _fits(with_budget(plan, steps * BUDGET_STEP), estimator)

    return BUDGET_STEP * _largest(most // BUDGET_STEP, fits)


def largest_group(plan: Plan, estimator: GpuEstimator) -> int:
    """Return the largest rollout.samples whose rows decode at once and which fits; 0 if none."""

    def fits(samples: int) -> bool:
        groups = [
            replace(group, num_samples=samples if group.num_samples else 0)
            for group in plan.workload.groups
        ]
        changed = replace(plan, workload=replace(plan.workload, groups=groups))
        if _sampled_rows(groups) > plan.max_rows:
            return False
        memory = estimator.estimate(changed)
        held = sum(memory.held.values())
        held -= memory.held.get("KV cache", 0)
        wanted = wanted_cache_bytes(changed)
        return memory.peak <= estimator.gpu.usable and (
            estimator.cache_bytes(changed, held) >= wanted
        )

    return _largest(MAX_GROUP, fits)


def _sampled_rows(groups: list[GroupLengths]) -> int:
    return sum(group.num_samples for group in groups)


def largest_response(plan: Plan, estimator: GpuEstimator) -> int:
    """Return the largest rollout.max_response_tokens that fits, a multiple of 256; 0 if none."""
    context = context_length(plan.model)
    most = (context - plan.workload.longest_prompt) // LENGTH_STEP

    def fits(steps: int) -> bool:
        rollout = replace(plan.config.rollout, max_response_tokens=steps * LENGTH_STEP)
        changed = replace(plan, config=replace(plan.config, rollout=rollout))
        return _fits(changed, estimator)

    return LENGTH_STEP * _largest(most, fits)


def with_budget(plan: Plan, tokens: int) -> Plan:
    """Return the plan with another training.token_budget."""
    training = replace(plan.config.training, token_budget=tokens)
    return replace(plan, config=replace(plan.config, training=training))


def _fits(plan: Plan, estimator: GpuEstimator) -> bool:
    return estimator.estimate(plan).peak <= estimator.gpu.usable


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `most` that fits, within 3%; 0 if 1 does not.

    Numbers that are smaller than one that fits must fit.
    """
    low = 0
    high = most + 1  # the smallest number that is known not to fit, or is too many
    probe = 1
    while probe < high and fits(probe):
        low = probe
        probe *= 2
    high = min(high, probe)
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
