"""The arithmetic of `postgrad doctor --fit`: memory, time and disk of a run, before it starts.

Memory is counted by what holds it; simulate.py gives the activations. Time is counted with the
rates that probe.py measures. Responses are assumed to have their maximum length, so both are
upper bounds for models that stop earlier.
"""

import dataclasses
import math
from dataclasses import dataclass

from postgrad.sizing.memory import (
    Memory,
    optimizer_working_bytes,
    state_bytes,
    state_bytes_on_device,
)
from postgrad.sizing.plan import (
    AVERAGED_WEIGHTS,
    Plan,
    StepLayout,
    lay_out_step,
    role_weight_bytes,
)
from postgrad.sizing.simulate import ModelSize, cache_bytes, measure_size, simulate_update

ROLLOUT_BYTES = 10  # of rollouts/ per token: compressed parquet; measured 8 to 9
MAX_KERNELS = 1024  # matrix shapes whose kernels oneDNN keeps
# Share of a phase that the CPU heap loses to gaps between tensors; measured 0.1 to 0.3.
HEAP_SLACK = 0.25


@dataclass(frozen=True)
class Rates:
    """Measured seconds on this machine, for the model with all its blocks."""

    forward_token_s: float  # per padded token, without gradient
    train_token_s: float  # per padded token, forward and backward
    decode_s: float  # per decode step of `decode_rows` rows
    decode_rows: int
    parameter_s: float  # per parameter, of an optimizer step


# ---- memory


def estimate_memory(plan: Plan, process: int, kernel: int = 0) -> Memory:
    """Return the peak memory of the run by what holds it.

    Args:
        plan: the run.
        process: bytes of a process that has imported everything and loaded the data; 0 if only
            the accelerator's memory counts.
        kernel: bytes that a new shape of matrix product costs on this machine (0 in float32).
    """
    config = plan.config
    size = measure_size(config, plan.model)
    layout = lay_out_step(plan, config.rollout.max_response_tokens)
    rollout = _rollout_bytes(plan, size)
    state = state_bytes_on_device(config, size)
    role_memory, role_phases = _role_bytes(plan, layout)
    num_kernels = min(MAX_KERNELS, _num_kernel_shapes(plan, size, layout))
    held = {"process": process, "weights": size.weights, **state, **role_memory}
    held["kernels by shape"] = kernel * num_kernels
    if config.cluster.backend == "process":
        held["driver process"] = process
    if config.cluster.engine_apart:
        masters = state.get("float32 masters", 0)
        held["engine process"] = process + size.weights + masters
        if plan.rollouts_overlap:
            held["engine process"] += sum(rollout.values())
            rollout = {}
    activations, head = simulate_update(config, plan.model, layout.largest_pass)
    gradients = 4 * size.trained
    working_copy = optimizer_working_bytes(config, size)
    phases = {
        "update": {"gradients": gradients, "activations": activations, "head": head},
        "optimizer step": {"gradients": gradients, "working copy": working_copy},
        "rollout": rollout,
        **role_phases,
    }
    if size.dequantized:
        phases["update"]["dequantized weights"] = size.dequantized
    if config.model.device == "cpu":
        for parts in phases.values():
            parts["heap slack"] = round(HEAP_SLACK * sum(parts.values()))
    return Memory(
        held={name: size for name, size in held.items() if size},
        phases={name: parts for name, parts in phases.items() if sum(parts.values())},
    )


def _rollout_bytes(plan: Plan, size: ModelSize) -> dict[str, int]:
    """Return the bytes of the KV cache and of sampling; empty if nothing is sampled."""
    rows = plan.decode_rows
    config = plan.config
    if not rows:
        return {}
    length = plan.workload.longest_prompt + config.rollout.max_response_tokens
    # Logits, log-softmax, probabilities and their running sum are alive at the same time.
    sampling = 4 * 4 * rows * size.vocabulary
    if config.model.device == "cpu" and size.bytes_each == 2:
        sampling += 4 * size.vocabulary * plan.width  # the head in float32
    return {"KV cache": rows * length * cache_bytes(config, plan.model), "sampling": sampling}


def _role_bytes(plan: Plan, layout: StepLayout) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Return what the models besides the policy hold, and the update phase of each critic."""
    held: dict[str, int] = {}
    phases: dict[str, dict[str, int]] = {}
    unquantized = dataclasses.replace(plan.config.model, quantization="none")
    role_config = dataclasses.replace(plan.config, model=unquantized)
    for name, (kind, model) in plan.roles.items():
        size = measure_size(plan.config, model, adapters=False)
        held[name] = role_weight_bytes(kind, size)
        if kind == "critic":
            held[f"{name}'s optimizer"] = sum(state_bytes_on_device(plan.config, size).values())
            activations, _ = simulate_update(role_config, model, layout.largest_pass)
            phases[f"{name}'s update"] = {
                "gradients": 4 * size.parameters,
                "activations": activations,
            }
    return held, phases


def _num_kernel_shapes(plan: Plan, size: ModelSize, layout: StepLayout) -> int:
    """Return the number of matrix shapes of a run.

    Rows leave the engine one by one, and passes differ if lengths do.
    """
    steps = plan.config.training.steps
    all_alike = not layout.num_sampled and len(set(plan.workload.groups)) == 1
    num_passes = 1 if all_alike else layout.num_passes * steps
    decode_shapes = min(plan.decode_rows, steps * plan.config.rollout.max_response_tokens)
    return size.linears * (decode_shapes + 3 * num_passes)


# ---- time and disk


def estimate_step(
    plan: Plan, stages: list[str], layout: StepLayout, rates: Rates
) -> dict[str, float]:
    """Return the seconds of one step by stage, without verifiers, refills and checkpoints."""
    seconds: dict[str, float] = {}
    size = measure_size(plan.config, plan.model)
    training = plan.config.training
    num_updates = training.updates_per_step * training.ppo_epochs
    tokens = layout.padded_tokens
    if layout.num_sampled:
        seconds["sample"] = generation_seconds(
            layout.num_sampled, layout.prompt_tokens, layout.sampled_tokens, rates
        )
    if "sample_greedy" in stages:
        seconds["sample_greedy"] = generation_seconds(
            len(plan.workload.groups), layout.prompt_tokens, layout.sampled_tokens, rates
        )
    if "compute_old_logprobs" in stages:
        seconds["compute_old_logprobs"] = tokens * rates.forward_token_s
    for name, (kind, model) in plan.roles.items():
        # Each model computes every row once per step; its time grows with its parameters.
        other = measure_size(plan.config, model, adapters=False)
        relative_size = other.parameters / size.parameters
        seconds[name] = tokens * rates.forward_token_s * relative_size
        if kind == "critic":
            passes = training.ppo_epochs * relative_size
            seconds[name] += tokens * rates.train_token_s * passes
            seconds[name] += num_updates * other.parameters * rates.parameter_s
    optimizer_s = num_updates * size.trained * rates.parameter_s
    seconds["update"] = training.ppo_epochs * tokens * rates.train_token_s + optimizer_s
    return seconds


def generation_seconds(
    num_rows: int, prompt_tokens: int, response_tokens: int, rates: Rates
) -> float:
    """Return the seconds to sample responses: the prompts once, then decode steps of all rows."""
    num_waves = max(1.0, num_rows / rates.decode_rows)
    return prompt_tokens * rates.forward_token_s + num_waves * response_tokens * rates.decode_s


def num_validations(plan: Plan) -> int:
    """Return how often a run validates: before the first step, after the last, and in between."""
    training = plan.config.training
    if not training.validate_every:
        return 2
    return 2 + (training.steps - 1) // training.validate_every


def estimate_validations(plan: Plan, rates: Rates) -> float:
    """Return the seconds of all validations that answer problems, greedy and sampled."""
    workload = plan.workload
    training = plan.config.training
    if not workload.num_validation:
        return 0.0
    count = num_validations(plan)
    all_prompts = sum(group.prompt for group in workload.groups)
    prompt_tokens = workload.num_validation * all_prompts // len(workload.groups)
    response_tokens = plan.config.rollout.max_response_tokens
    num_responses = workload.num_validation * training.validation_samples
    one = generation_seconds(num_responses, prompt_tokens, response_tokens, rates)
    per_validation = 2 if training.validation_temperature is None else 1
    return count * per_validation * one


def checkpoint_bytes(plan: Plan) -> int:
    """Return the bytes of one checkpoint: weights and optimizer state of all trained models.

    Weights are written dequantized. Copies that follow the policy have weights only, in float32 if
    they are averages.
    """
    trained = [measure_size(plan.config, plan.model)]
    total = 0
    for kind, model in plan.roles.values():
        size = measure_size(plan.config, model, adapters=False)
        if kind == "critic":
            trained.append(size)
        elif kind in ("synced", AVERAGED_WEIGHTS):
            total += size.parameters * (4 if kind == AVERAGED_WEIGHTS else size.bytes_each)
    for size in trained:
        state = sum(state_bytes(plan.config, size).values())
        total += size.parameters * size.bytes_each + state
    return total


def disk_bytes(plan: Plan, layout: StepLayout) -> int:
    """Return the largest size of the run folder.

    Counts the kept checkpoints, the best one, one that is being written, and the rollouts.
    """
    training = plan.config.training
    keeps_best = bool(training.keep_best)
    num_saves = math.ceil(training.steps / training.checkpoint_every)
    if keeps_best:
        num_saves += training.steps // training.validate_every
    num_checkpoints = min(num_saves, training.keep_checkpoints + keeps_best + 1)
    rollouts = training.steps * layout.tokens * ROLLOUT_BYTES
    return num_checkpoints * checkpoint_bytes(plan) + rollouts
