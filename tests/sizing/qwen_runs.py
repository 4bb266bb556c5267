"""Plans of runs with Qwen3's shapes on a GPU, and the memory that `doctor --fit` estimates."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from postgrad.config.compose import compose
from postgrad.methods import find_method
from postgrad.model.passes.layout import default_token_budget
from postgrad.sizing import memory
from postgrad.sizing.workload import GroupLengths, Plan, Workload

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from speed import make_config

PROMPT = 100


def recompute(kept: int) -> tuple[str, ...]:
    """Return the settings of checkpointing with this many blocks whose attention is kept."""
    return "model.activation_checkpointing=true", f"model.kept_attention_blocks={kept}"


@dataclass(frozen=True)
class Run:
    """A rollout, an update, or a whole GRPO step, with prompts of 100 tokens."""

    work: str  # rollout, update or step
    shape: str
    problems: int
    samples: int
    tokens: int
    overrides: tuple[str, ...] = ()


def make_plan(run: Run) -> Plan:
    """Return the plan of a run as `postgrad doctor --fit` makes it from the settings."""
    settings = {
        "model.path": "qwen3",
        "data.train": "problems.jsonl",
        "model.device": "cuda",
        "model.dtype": "bfloat16",
        "rollout.max_rows": 2048,
        "rollout.samples": run.samples,
        "rollout.max_response_tokens": run.tokens,
        "training.problems_per_step": run.problems,
        "optimizer.kind": "adamw_fused",
    }
    overrides = [*(f"{key}={value}" for key, value in settings.items()), *run.overrides]
    config = compose("grpo", overrides, lambda name: find_method(name).Settings)
    if not config.training.token_budget:
        eager = bool(config.model.lora.rank or config.model.activation_checkpointing)
        config.training.token_budget = default_token_budget(torch.device("cuda"), eager)
    groups = [GroupLengths(PROMPT, (), run.samples)] * run.problems
    return Plan(config, make_config(run.shape), Workload(groups, PROMPT), packed=True)


def estimate_gib(run: Run, gpu: Any) -> float:
    """Return the estimated GiB of what the run measures."""
    estimated = memory.estimate(make_plan(run), gpu)
    rollout_held = estimated.held.get("KV cache", 0) + estimated.held.get("decode graphs", 0)
    if run.work == "rollout":
        rollout = sum(estimated.phases["rollout"].values())
        return (estimated.held["weights"] + rollout_held + rollout) / 2**30
    if run.work == "update":
        return (estimated.bytes_in("update") - rollout_held) / 2**30
    return estimated.peak / 2**30
