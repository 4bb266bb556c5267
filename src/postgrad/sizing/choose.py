"""Sets what a run leaves to the machine so that it fits into memory, and says what would save some.

The estimate decides, before anything is loaded: first fewer tokens per pass, which costs little
time; then activation checkpointing, which computes the blocks twice. A row is never split over
passes, so long rows need the latter. What memory is left then keeps attention outputs.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from postgrad.errors import ConfigError
from postgrad.model.load.context import context_length
from postgrad.sizing.devices import Device
from postgrad.sizing.memory import (
    LayerWidths,
    cache_bytes,
    estimate,
    picture_bytes,
    wanted_cache_bytes,
)
from postgrad.sizing.simulate import measure_size
from postgrad.sizing.workload import Plan, lay_out_step

SPARE_SHARE = 0.85  # of the memory may be used for kept attention
STATE_BYTES = 22  # per weight, at most: weight, master, moments, gradient, working copy
BUDGET_STEP = 1024
LENGTH_STEP = 256
MAX_BUDGET = 1 << 18
MAX_GROUP = 1024


def choose_passes(
    plan: Plan, gpu: Device, default_budget: int, recomputed_budget: int
) -> tuple[int, bool]:
    """Return training.token_budget and model.activation_checkpointing of the run.

    Args:
        plan: the run; a token budget of 0 and checkpointing None are free to choose.
        gpu: where it runs.
        default_budget: tokens per pass if memory is no limit.
        recomputed_budget: the same with activation checkpointing.

    If nothing fits, these are the first choice: the run then says what it needs memory for.
    """
    budget = plan.config.training.token_budget
    checkpointing = plan.config.model.activation_checkpointing
    kinds = (False, True) if checkpointing is None else (checkpointing,)
    for recompute in kinds:
        wanted = budget or (recomputed_budget if recompute else default_budget)
        changed = plan.changed("training.token_budget", wanted)
        changed = changed.changed("model.activation_checkpointing", recompute)
        if _surely_fits(changed, gpu) or _fits(changed, gpu):
            return wanted, recompute
        largest = 0 if budget else min(wanted, largest_budget(changed, gpu))
        if largest:
            return largest, recompute
    return budget or (recomputed_budget if kinds[0] else default_budget), kinds[0]


def _surely_fits(plan: Plan, gpu: Device) -> bool:
    """Return whether a run is so small that the estimate, which takes a second, is not needed."""
    size = measure_size(plan.config, plan.model)
    responses = max(group.rows_per_loss for group in plan.workload.groups)
    responses *= plan.config.rollout.max_response_tokens
    tokens = max(plan.workload.longest_prompt + responses, plan.token_budget)
    widths = LayerWidths.of(plan.model)
    block = 4 * widths.hidden + 2 * widths.intermediate + 3 * widths.query + 4 * widths.key
    activations = tokens * size.blocks * block * size.bytes_each
    state = STATE_BYTES * size.parameters * (1 + len(plan.roles))
    pictures = sum(sum(parts.values()) for parts in picture_bytes(plan, lay_out_step(plan)))
    return 2 * (state + 2 * activations + pictures) < gpu.usable


def choose_kept_attention(plan: Plan, gpu: Device) -> int:
    """Return how many recomputed blocks keep their attention outputs: as many as fit.

    The estimate may be wrong by some percent, so not all of the memory is used for what only saves
    time.
    """

    def update_bytes(num_kept: int) -> int:
        changed = plan.changed("model.kept_attention_blocks", num_kept)
        return estimate(changed, gpu).bytes_in("update")

    num_blocks = int(plan.model.get_text_config().num_hidden_layers)
    return bisect_right(range(1, num_blocks + 1), SPARE_SHARE * gpu.usable, key=update_bytes)


# ---- the largest settings with which a run still fits


def largest_settings(plan: Plan, gpu: Device) -> dict[str, int]:
    """Return the largest value of each setting that fits while the others stay as they are.

    The group is the largest whose responses decode all at the same time. A setting is left out if
    the run does not use it.
    """
    largest = {"training.token_budget": largest_budget(plan, gpu)}
    if plan.decode_rows:
        largest["rollout.samples"] = largest_group(plan, gpu)
        largest["rollout.max_response_tokens"] = largest_response(plan, gpu)
    return {setting: value for setting, value in largest.items() if value}


def largest_budget(plan: Plan, gpu: Device) -> int:
    """Return the largest training.token_budget that fits, a multiple of 1,024; 0 if none does.

    A budget that holds all tokens of an update is the most that has an effect.
    """
    in_one_pass = lay_out_step(plan.changed("training.token_budget", MAX_BUDGET))
    most = min(MAX_BUDGET, sum(one.tokens for one in in_one_pass.passes) + BUDGET_STEP - 1)

    def fits(steps: int) -> bool:
        return _fits(plan.changed("training.token_budget", steps * BUDGET_STEP), gpu)

    return BUDGET_STEP * _largest(most // BUDGET_STEP, fits)


def largest_group(plan: Plan, gpu: Device) -> int:
    """Return the largest rollout.samples whose rows decode at once and which fits; 0 if none."""

    def fits(samples: int) -> bool:
        groups = [
            replace(group, num_samples=samples if group.num_samples else 0)
            for group in plan.workload.groups
        ]
        changed = replace(plan, workload=replace(plan.workload, groups=groups))
        if sum(group.num_samples for group in groups) > plan.max_rows:
            return False
        memory = estimate(changed, gpu)
        held = sum(memory.held.values()) - memory.held.get("KV cache", 0)
        has_cache = cache_bytes(changed, gpu, held) >= wanted_cache_bytes(changed)
        return has_cache and memory.peak <= gpu.usable

    return _largest(MAX_GROUP, fits)


def largest_response(plan: Plan, gpu: Device) -> int:
    """Return the largest rollout.max_response_tokens that fits, a multiple of 256; 0 if none."""
    most = (context_length(plan.model) - plan.workload.longest_prompt) // LENGTH_STEP

    def fits(steps: int) -> bool:
        return _fits(plan.changed("rollout.max_response_tokens", steps * LENGTH_STEP), gpu)

    return LENGTH_STEP * _largest(most, fits)


def _fits(plan: Plan, gpu: Device) -> bool:
    return estimate(plan, gpu).peak <= gpu.usable


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


# ---- settings that lower the memory


def suggest_settings(plan: Plan, device: Device) -> list[tuple[str, int]]:
    """Return (setting, bytes saved) of settings that lower the peak, the most effective first.

    Each is tried alone; those that save less than 1% are left out.
    """
    config = plan.config
    peak = estimate(plan, device).peak
    changes: dict[str, Any] = {
        "training.token_budget": max(1, plan.token_budget // 2),
        "model.activation_checkpointing": True,
        "model.dtype": "bfloat16",
        "rollout.max_rows": max(1, plan.max_rows // 2),
        "rollout.max_response_tokens": max(1, config.rollout.max_response_tokens // 2),
        "optimizer.kind": "adamw_offloaded",
    }
    if config.model.kept_attention_blocks:
        changes["model.kept_attention_blocks"] = 0
    if config.model.lora.rank:
        changes["model.quantization"] = "4bit"
    suggestions: list[tuple[str, int]] = []
    for key, value in changes.items():
        try:
            saved = peak - estimate(plan.changed(key, value), device).peak
        except ConfigError:  # not every model can be quantized
            continue
        if saved > 0.01 * peak:
            suggestions.append((f"{key}={str(value).lower()}", saved))
    return sorted(suggestions, key=lambda suggestion: -suggestion[1])
