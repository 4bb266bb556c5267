"""Will it fit, how long: what a run needs, foretold from its configuration and the model's, before a weight is loaded.

Memory is counted by what holds it; the activations come from simulate.py. Time is arithmetic over the rates that probe.py measures.
Responses are taken at their longest, so both are upper bounds for models that stop earlier.
"""

import dataclasses
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from postgrad.config.schema import Config
from postgrad.data.feed import Feed
from postgrad.doctor.simulate import Size, cache_bytes, measure, simulate_update
from postgrad.errors import ConfigError, RunError
from postgrad.methods.base import Method, Ports, Step
from postgrad.model.device import supports_state_streaming
from postgrad.model.offload import NUM_SLOTS, SLICE_ELEMENTS
from postgrad.model.passes.layout import MicroBatch, make_padded_micro_batches
from postgrad.training.prepare import Inputs
from postgrad.types import Batch, Trajectory

ROLLOUT_BYTES = 10  # of rollouts/ a token: parquet, compressed; measured 8 to 9
KEPT_KERNELS = 1024  # matrix shapes whose kernels oneDNN keeps
HEAP_SLACK = 0.25  # what the CPU's heap loses to gaps between tensors of changing sizes; measured 0.1 to 0.3 of a phase


@dataclass(frozen=True)
class Group:
    """One problem's group as lengths in tokens: its prompt, the rows given to it, how many are sampled."""

    prompt: int
    given: tuple[int, ...]
    num_samples: int


@dataclass(frozen=True)
class Load:
    """What the data bring: the first step's groups, the longest prompt of all, the problems answered in a validation."""

    groups: list[Group]
    longest_prompt: int
    num_validation: int = 0


@dataclass(frozen=True)
class Plan:
    """What is foretold of: a resolved configuration, the transformers configurations of its models, its data as lengths."""

    config: Config
    model: Any
    load: Load
    roles: dict[str, tuple[str, Any]] = dataclasses.field(
        default_factory=dict
    )  # name: (kind, transformers configuration)

    @property
    def width(self) -> int:
        return int(self.model.get_text_config().hidden_size)

    @property
    def decode_rows(self) -> int:
        """Most rows the engine decodes at once."""
        sampled = sum(group.num_samples for group in self.load.groups)
        return min(self.config.rollout.max_rows or 256, max(sampled, self.load.num_validation))

    @property
    def budget(self) -> int:
        """Most tokens of one pass."""
        return self.config.training.token_budget or 8192


@dataclass(frozen=True)
class Layout:
    """One step as it is computed. `padded_tokens` run forward and backward; `biggest` is the largest forward pass."""

    rows: int
    sampled: int  # rows that the engine writes,
    sampled_tokens: int  # each this long,
    prompt_tokens: int  # from prompts of this many tokens together
    tokens: int  # prompts and responses of all rows
    padded_tokens: int
    num_passes: int
    biggest: MicroBatch


@dataclass(frozen=True)
class Memory:
    """Bytes by what holds them. `phases` follow one another; the peak is what is always held and the largest phase."""

    held: dict[str, int]
    phases: dict[str, dict[str, int]]

    @property
    def phase(self) -> str:
        """The phase with the peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + sum(self.phases[self.phase].values())


@dataclass(frozen=True)
class Rates:
    """Measured seconds on this machine, for the whole depth of the model."""

    forward_token_s: float  # of one padded token, without gradient
    train_token_s: float  # forward and backward
    decode_s: float  # one decode step of `decode_rows` rows
    decode_rows: int
    parameter_s: float  # optimizer step of one parameter


# ---- what a step holds


def read_load(config: Config, method: Method, inputs: Inputs) -> Load:
    """Compose the first step as the driver would and keep the lengths. Samples nothing, changes nothing."""
    engine: Any = SimpleNamespace(shares_weights=not config.cluster.engine_apart)
    method.bind(Ports(None, engine, inputs.scorer, inputs.prompts))  # type: ignore[arg-type]
    step = Step(1, Feed(inputs.train, config.seed, config.data.shuffle))
    try:
        composed = method.compose(method.draw(None, step), step)
    except (
        RunError
    ) as error:  # the data lack what the method needs: nothing has run yet, so the input is wrong
        raise ConfigError(str(error)) from error
    groups = [
        Group(
            len(inputs.prompts.encode(g.problem)),
            tuple(len(t.response) for t in g.given_rows),
            g.num_samples,
        )
        for g in composed
    ]
    held_out = [problem for problems in inputs.validation.values() for problem in problems]
    longest = max(len(inputs.prompts.encode(problem)) for problem in [*inputs.train, *held_out])
    return Load(groups, longest, len(held_out) if method.needs_verifier() else 0)


def check_context(plan: Plan, size: Size) -> None:
    """Refuse rows that are longer than the model can read."""
    prompt, response = plan.load.longest_prompt, plan.config.rollout.max_response_tokens
    if plan.decode_rows and prompt + response > size.context:
        raise ConfigError(
            f"a prompt of {prompt} tokens and rollout.max_response_tokens={response} exceed the model's context of "
            f"{size.context}; lower rollout.max_response_tokens or data.max_prompt_tokens"
        )


def lay_out(plan: Plan, response_tokens: int) -> Layout:
    """The step in micro-batches, by the trainer's own code; every sampled response has `response_tokens` tokens."""
    training, groups = plan.config.training, plan.load.groups
    rows: list[Trajectory] = []
    laid = 0
    # A few micro-batches tell of all: the groups of an update are alike, and a table of the whole step could be large.
    for group in groups[: math.ceil(len(groups) / training.updates_per_step)]:
        for length in _responses(group, response_tokens):
            rows.append(Trajectory(str(laid), [laid] * group.prompt, [0] * length, laid))
        laid += 1
        if sum(len(row.prompt) + len(row.response) for row in rows) > 4 * plan.budget:
            break
    passes = make_padded_micro_batches(Batch.of(rows), plan.budget, plan.width)
    share = len(groups) / laid
    lengths = [length for group in groups for length in _responses(group, response_tokens)]
    return Layout(
        rows=len(lengths),
        sampled=sum(group.num_samples for group in groups),
        sampled_tokens=response_tokens,
        prompt_tokens=sum(group.prompt for group in groups if group.num_samples),
        tokens=sum(group.prompt * len(_responses(group, 1)) for group in groups) + sum(lengths),
        padded_tokens=round(share * sum(micro.num_tokens for micro in passes)),
        num_passes=round(share * len(passes)),
        biggest=max(passes, key=lambda micro: micro.num_tokens),
    )


def _responses(group: Group, response_tokens: int) -> list[int]:
    return [*group.given, *[response_tokens] * group.num_samples]


# ---- memory


def state_bytes(config: Config, size: Size) -> dict[str, int]:
    """What the optimizer keeps of one model, wherever it keeps it."""
    each = 2 if config.optimizer.kind == "adamw_8bit" else 8
    masters = 0 if config.model.dtype == "float32" else 4
    return {"optimizer state": each * size.trained, "float32 masters": masters * size.trained}


def _working_bytes(config: Config, size: Size) -> int:
    """What one optimizer step needs on top: AdamW works tensor by tensor on the CPU and on all of them at once elsewhere."""
    if config.optimizer.kind == "adamw_fused":
        return 0
    if config.model.device == "cpu":
        return 2 * 4 * size.largest
    return (
        NUM_SLOTS * 3 * 4 * SLICE_ELEMENTS
        if config.optimizer.kind == "adamw_offloaded"
        else 4 * size.trained
    )


def _rollout_bytes(plan: Plan, size: Size) -> dict[str, int]:
    rows, config = plan.decode_rows, plan.config
    cached = (
        rows
        * (plan.load.longest_prompt + config.rollout.max_response_tokens)
        * cache_bytes(config, plan.model)
    )
    widened = (
        4 * size.vocabulary * plan.width
        if config.model.device == "cpu" and size.bytes_each == 2
        else 0
    )
    # Logits, their log-softmax, the probabilities and their running sum are alive together.
    return (
        {"KV cache": cached, "sampling": 4 * 4 * rows * size.vocabulary + widened} if rows else {}
    )


def _role_bytes(plan: Plan, layout: Layout) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """What the models beside the policy hold, and the phases of those that learn."""
    held: dict[str, int] = {}
    phases: dict[str, dict[str, int]] = {}
    for name, (kind, model) in plan.roles.items():
        size = measure(plan.config, model, adapters=False)
        shared = (
            kind == "frozen" and plan.config.model.lora.rank > 0
        )  # the policy's own weights, asked without the adapters
        held[name] = 0 if shared else size.weights
        if kind == "critic":
            held[f"{name}'s optimizer"] = sum(_on_device(plan.config, size).values())
            activations, _ = simulate_update(plan.config, model, layout.biggest)
            phases[f"{name}'s update"] = {
                "gradients": 4 * size.parameters,
                "activations": activations,
            }
    return held, phases


def _on_device(config: Config, size: Size) -> dict[str, int]:
    offloaded = config.optimizer.kind == "adamw_offloaded" and supports_state_streaming(
        torch.device(config.model.device)
    )
    return {} if offloaded else state_bytes(config, size)


def _kernel_shapes(plan: Plan, size: Size, layout: Layout) -> int:
    """Shapes of matrix products that a run meets: rows leave the engine one by one, and passes differ where lengths do."""
    steps = plan.config.training.steps
    alike = not layout.sampled and len(set(plan.load.groups)) == 1
    passes = 1 if alike else layout.num_passes * steps
    return size.linears * (
        min(plan.decode_rows, steps * plan.config.rollout.max_response_tokens) + 3 * passes
    )


def foretell_memory(plan: Plan, process: int, kernel: int = 0) -> Memory:
    """Peak memory of the run.

    Args:
        process: bytes of a process that has imported everything and loaded the data; 0 where only the accelerator's memory counts.
        kernel: bytes that one new shape of matrix product costs on this machine (0 in float32).
    """
    config, size = plan.config, measure(plan.config, plan.model)
    layout = lay_out(plan, config.rollout.max_response_tokens)
    activations, head = simulate_update(config, plan.model, layout.biggest)
    rollout, state = _rollout_bytes(plan, size), _on_device(config, size)
    others, other_phases = _role_bytes(plan, layout)
    kernels = kernel * min(KEPT_KERNELS, _kernel_shapes(plan, size, layout))
    held = {
        "process": process,
        "weights": size.weights,
        **state,
        **others,
        "kernels by shape": kernels,
    }
    if config.cluster.backend == "process":
        held["driver process"] = process
    if config.cluster.engine_apart:
        held["engine process"] = (
            process + size.weights + sum(rollout.values()) + state.get("float32 masters", 0)
        )
        rollout = {}
    gradients = {"gradients": 4 * size.trained}
    phases = {
        "update": gradients | {"activations": activations, "head": head},
        "optimizer step": gradients | {"working copy": _working_bytes(config, size)},
        "rollout": rollout,
        **other_phases,
    }
    if config.model.device == "cpu":
        for parts in phases.values():
            parts["heap slack"] = round(HEAP_SLACK * sum(parts.values()))
    return Memory(
        {name: n for name, n in held.items() if n},
        {name: parts for name, parts in phases.items() if sum(parts.values())},
    )


def remedies(plan: Plan, process: int, kernel: int = 0) -> list[tuple[str, int]]:
    """Settings that lower the peak, each alone, with the bytes it saves; the most effective first."""
    config, peak = plan.config, foretell_memory(plan, process, kernel).peak
    changes: dict[str, Any] = {
        "training.token_budget": max(1, plan.budget // 2),
        "model.activation_checkpointing": True,
        "model.dtype": "bfloat16",
        "rollout.max_rows": max(1, (config.rollout.max_rows or 256) // 2),
        "rollout.max_response_tokens": max(1, config.rollout.max_response_tokens // 2),
        "optimizer.kind": "adamw_offloaded",
    }
    out: list[tuple[str, int]] = []
    for key, value in changes.items():
        section, name = key.split(".")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        tried = dataclasses.replace(plan, config=dataclasses.replace(config, **{section: changed}))
        out.append(
            (f"{key}={str(value).lower()}", peak - foretell_memory(tried, process, kernel).peak)
        )
    return sorted(
        [change for change in out if change[1] > 0.01 * peak], key=lambda change: -change[1]
    )


# ---- time and disk


def foretell_step(plan: Plan, stages: list[str], layout: Layout, rates: Rates) -> dict[str, float]:
    """Seconds of one step by stage. Verifiers, refills, logging and checkpoints are not in it."""
    out: dict[str, float] = {}
    size = measure(plan.config, plan.model)
    updates, tokens = plan.config.training.updates_per_step, layout.padded_tokens
    if layout.sampled:
        out["sample"] = generate_s(
            layout.sampled, layout.prompt_tokens, layout.sampled_tokens, rates
        )
    if "sample_greedy" in stages:
        out["sample_greedy"] = generate_s(
            len(plan.load.groups), layout.prompt_tokens, layout.sampled_tokens, rates
        )
    if "compute_old_logprobs" in stages:
        out["compute_old_logprobs"] = tokens * rates.forward_token_s
    for name, (
        kind,
        model,
    ) in plan.roles.items():  # each answers once a step; its time goes by its size
        other = measure(plan.config, model, adapters=False)
        seconds = tokens * (
            rates.forward_token_s + (rates.train_token_s if kind == "critic" else 0.0)
        )
        steps = updates * other.parameters * rates.parameter_s if kind == "critic" else 0.0
        out[name] = seconds * other.parameters / size.parameters + steps
    out["update"] = tokens * rates.train_token_s + updates * size.trained * rates.parameter_s
    return out


def generate_s(rows: int, prompt_tokens: int, response_tokens: int, rates: Rates) -> float:
    """Seconds to sample `rows` responses of this length: the prompts once, then full waves of decode steps."""
    waves = max(1.0, rows / rates.decode_rows)
    return prompt_tokens * rates.forward_token_s + waves * response_tokens * rates.decode_s


def foretell_validations(plan: Plan, rates: Rates) -> float:
    """Seconds of all validations that answer problems: before, after and on the way, each greedy and sampled."""
    load, training = plan.load, plan.config.training
    if not load.num_validation:
        return 0.0
    count = 2 + ((training.steps - 1) // training.validate_every if training.validate_every else 0)
    prompts = load.num_validation * sum(group.prompt for group in load.groups) // len(load.groups)
    return (
        count
        * 2
        * generate_s(load.num_validation, prompts, plan.config.rollout.max_response_tokens, rates)
    )


def checkpoint_bytes(plan: Plan) -> int:
    """The weights and what the optimizer keeps, of every model that learns."""
    critics = [model for kind, model in plan.roles.values() if kind == "critic"]
    sizes = [
        measure(plan.config, plan.model),
        *(measure(plan.config, model, adapters=False) for model in critics),
    ]
    return sum(size.weights + sum(state_bytes(plan.config, size).values()) for size in sizes)


def disk_bytes(plan: Plan, layout: Layout) -> int:
    """Most disk the run folder takes: the checkpoints kept, the best one too, one being written, and the rollouts."""
    training = plan.config.training
    best = bool(training.keep_best)
    saves = math.ceil(training.steps / training.checkpoint_every) + (
        training.steps // training.validate_every if best else 0
    )
    checkpoints = min(saves, training.keep_checkpoints + best + 1) * checkpoint_bytes(plan)
    return checkpoints + training.steps * layout.tokens * ROLLOUT_BYTES
