"""Settings that lower the memory of a run, the most effective first."""

import dataclasses
from collections.abc import Callable
from typing import Any

from postgrad.errors import ConfigError
from postgrad.sizing.memory import Memory
from postgrad.sizing.plan import Plan
from postgrad.sizing.simulate import reuse_results


def suggest_settings(plan: Plan, estimate_plan: Callable[[Plan], Memory]) -> list[tuple[str, int]]:
    """Return (setting, bytes saved) of settings that lower the peak, the most effective first.

    Each is tried alone; those that save less than 1% are left out. `estimate_plan` returns the
    memory of a plan.
    """
    with reuse_results():
        return _try_settings(plan, estimate_plan)


def _try_settings(plan: Plan, estimate_plan: Callable[[Plan], Memory]) -> list[tuple[str, int]]:
    config = plan.config
    peak = estimate_plan(plan).peak
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
        section, name = key.split(".")
        settings = dataclasses.replace(getattr(config, section), **{name: value})
        changed = dataclasses.replace(config, **{section: settings})
        try:
            other = estimate_plan(dataclasses.replace(plan, config=changed))
        except ConfigError:  # not every model can be quantized
            continue
        saved = peak - other.peak
        if saved > 0.01 * peak:
            suggestions.append((f"{key}={str(value).lower()}", saved))
    return sorted(suggestions, key=lambda suggestion: -suggestion[1])
