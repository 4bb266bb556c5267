"""Will it fit, how long: what a run needs, foretold from its configuration and the model's, before a weight is loaded.

Memory is simulated: one and two of the model's own blocks run forward and backward on fake tensors, shapes without data, while
every storage is counted; the other blocks add the same again. Time is arithmetic over the rates that doctor.py measures.
Responses are taken at their longest, so both are upper bounds for models that stop earlier.
"""

import copy
import dataclasses
import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from postgrad.config.schema import Config
from postgrad.data.cursor import Cursor
from postgrad.errors import ConfigError
from postgrad.methods.base import Method, Ports, Step
from postgrad.model import attention
from postgrad.model.device import DTYPES
from postgrad.model.head import token_outputs
from postgrad.model.layout import MicroBatch, make_micro_batches
from postgrad.model.load import Loaded
from postgrad.model.policy import LocalPolicy
from postgrad.model.views import FULL, hidden_states
from postgrad.rollout.native.cache import Prefill
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
class Layout:
    """One step as it is computed. `padded_tokens` run forward and backward; `biggest` is the largest forward pass."""

    rows: int
    sampled: int
    tokens: int  # prompts and responses of all rows
    response_tokens: int
    padded_tokens: int
    num_passes: int
    biggest: MicroBatch


@dataclass(frozen=True)
class Size:
    """The model in numbers."""

    parameters: int
    bytes_each: int
    blocks: int
    vocabulary: int
    largest: int  # parameters of the largest tensor
    linears: int  # different shapes of matrix products

    @property
    def weights(self) -> int:
        return self.parameters * self.bytes_each


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
    parameter_s: float  # optimiser step of one parameter


# ---- what a step holds


def read_load(config: Config, method: Method, inputs: Inputs) -> Load:
    """Compose the first step as the driver would and keep the lengths. Samples nothing, changes nothing."""
    method.bind(Ports(None, None, inputs.judge, inputs.prompts))  # type: ignore[arg-type]
    order = Cursor(len(inputs.train), config.seed, config.data.shuffle)
    problems = [inputs.train[i] for i in order.take(config.training.problems_per_step)]
    composed = method.compose(problems, Step(1, {problem.uid: problem for problem in problems}))
    groups = [
        Group(len(inputs.prompts.encode(g.problem)), tuple(len(t.response) for t in g.given), g.num_samples) for g in composed
    ]
    longest = max(len(inputs.prompts.encode(problem)) for problem in [*inputs.train, *inputs.validation])
    return Load(groups, longest, len(inputs.validation) if method.judges() else 0)


def lay_out(config: Config, load: Load, width: int, response_tokens: int) -> Layout:
    """The step in micro-batches, by the trainer's own code; every sampled response has `response_tokens` tokens."""
    training = config.training
    rows: list[Trajectory] = []
    laid = 0
    # A few micro-batches tell of all: the groups of an update are alike, and a table of the whole step could be large.
    for group in load.groups[: math.ceil(len(load.groups) / training.updates_per_step)]:
        for length in _responses(group, response_tokens):
            rows.append(Trajectory(str(laid), [laid] * group.prompt, [0] * length, laid))
        laid += 1
        if sum(len(row.prompt) + len(row.response) for row in rows) > 4 * training.token_budget:
            break
    passes = make_micro_batches(Batch.of(rows), training.token_budget, width)
    share = len(load.groups) / laid
    lengths = [length for group in load.groups for length in _responses(group, response_tokens)]
    return Layout(
        rows=len(lengths),
        sampled=sum(group.num_samples for group in load.groups),
        tokens=sum(group.prompt * len(_responses(group, 1)) for group in load.groups) + sum(lengths),
        response_tokens=sum(lengths),
        padded_tokens=round(share * sum(micro.num_tokens for micro in passes)),
        num_passes=round(share * len(passes)),
        biggest=max(passes, key=lambda micro: micro.num_tokens),
    )


def _responses(group: Group, response_tokens: int) -> list[int]:
    return [*group.given, *[response_tokens] * group.num_samples]


# ---- the model without weights


def build(config: Config, model_config: Any, blocks: int | None = None, vocabulary: int | None = None) -> Any:
    """The model as its configuration says, on the current torch device, with random weights; `blocks` and `vocabulary` cut it."""
    from transformers import AutoModelForCausalLM

    cut = copy.deepcopy(model_config)
    text = cut.get_text_config()
    if blocks is not None:
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:blocks]
        text.num_hidden_layers = blocks
    if vocabulary is not None:
        text.vocab_size, text.pad_token_id = vocabulary, None
    try:
        model = AutoModelForCausalLM.from_config(
            cut,
            dtype=DTYPES[config.model.dtype],
            attn_implementation=attention.install(),
            trust_remote_code=config.model.trust_remote_code,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.path={config.model.path} cannot be built from its configuration: {str(error).splitlines()[0]}"
        ) from error
    model.train()
    if config.model.activation_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def measure(config: Config, model_config: Any) -> Size:
    """Count the parameters on the meta device: no memory is used, a tied head counts once."""
    with torch.device("meta"):
        model = build(config, model_config)
    parameters = list(model.parameters())
    text = model_config.get_text_config()
    return Size(
        parameters=sum(p.numel() for p in parameters),
        bytes_each=parameters[0].element_size(),
        blocks=int(text.num_hidden_layers),
        vocabulary=int(text.vocab_size),
        largest=max(p.numel() for p in parameters),
        linears=len({tuple(p.shape) for p in parameters if p.dim() == 2}),
    )


# ---- memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors alive that were made inside; views and what was there before count nothing."""

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self.seen = weakref.WeakSet(tensor.untyped_storage() for tensor in before)
        self.before = [tensor.untyped_storage() for tensor in before]  # a weak set alone would forget them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage: Any) -> None:
        if storage not in self.seen:
            self.seen.add(storage)
            size = storage.nbytes()
            weakref.finalize(storage, self.free, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def free(self, size: int) -> None:
        self.now -= size


def simulate_update(config: Config, model_config: Any, micro: MicroBatch) -> tuple[int, int]:
    """Bytes of (what the forward pass keeps for the backward, what the head adds at the peak) for one micro-batch."""
    kept, peaks = zip(*(_simulate_blocks(config, model_config, micro, blocks) for blocks in (1, 2)), strict=True)
    more = int(model_config.get_text_config().num_hidden_layers) - 1
    return kept[0] + more * (kept[1] - kept[0]), peaks[0] - kept[0]


def _simulate_blocks(config: Config, model_config: Any, micro: MicroBatch, blocks: int) -> tuple[int, int]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    device = torch.device(config.model.device)
    with FakeTensorMode(), device:
        policy = LocalPolicy(config, Loaded(build(config, model_config, blocks), None), None)  # type: ignore[arg-type]
        masters = list(policy.optimiser.masters.values())
        for master in masters:  # the gradient of an earlier micro-batch
            master.grad = torch.zeros_like(master)
        gradients = [master.grad for master in masters if master.grad is not None]
        count = LiveBytes([*policy.model.parameters(), *masters, *gradients])
        with count:
            ids, positions = (torch.zeros(micro.ids.shape, dtype=torch.int64) for _ in range(2))
            mask = None if micro.mask is None else torch.ones(micro.mask.shape, dtype=torch.bool)
            hidden = hidden_states(policy.model, ids, positions, mask, FULL)
            kept = count.now
            gather = torch.zeros(micro.gather.shape, dtype=torch.int64)
            outputs = token_outputs(hidden.flatten(0, 1)[gather], policy.model.get_output_embeddings().weight, gather)
            outputs.logprobs.sum().backward()
    return kept, count.peak


def cache_bytes(config: Config, model_config: Any) -> int:
    """Bytes of keys and values of one token in all blocks."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        kept = Prefill()
        one = torch.zeros(1, 1, dtype=torch.int64)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        decoder = build(config, model_config, blocks=1).eval().base_model
        decoder(input_ids=one, position_ids=one, attention_mask=mask, past_key_values=kept, use_cache=True)
        block = sum(tensor.numel() * tensor.element_size() for tensor in (*kept.keys, *kept.values))
    return block * int(model_config.get_text_config().num_hidden_layers)


def decode_rows(config: Config, load: Load) -> int:
    """Most rows the engine decodes at once."""
    return min(config.rollout.max_rows, max(sum(group.num_samples for group in load.groups), load.num_validation))


def foretell_memory(config: Config, model_config: Any, load: Load, process: int, kernel: int = 0) -> Memory:
    """Peak memory of the run.

    Args:
        process: bytes of a process that has imported everything and loaded the data; 0 where only the accelerator's memory counts.
        kernel: bytes that one new matrix shape costs this machine's product kernels (0 in float32).
    """
    size = measure(config, model_config)
    text = model_config.get_text_config()
    layout = lay_out(config, load, int(text.hidden_size), config.rollout.max_response_tokens)
    activations, head = simulate_update(config, model_config, layout.biggest)
    rows = decode_rows(config, load)
    masters = 0 if config.model.dtype == "float32" else 4 * size.parameters
    on_cpu = config.model.device == "cpu"
    widened = 4 * size.vocabulary * int(text.hidden_size) if on_cpu and masters else 0
    # AdamW works tensor by tensor on the CPU and on all of them at once on an accelerator.
    working = 2 * 4 * size.largest if on_cpu else 4 * size.parameters
    rollout = {
        "KV cache": rows * (load.longest_prompt + config.rollout.max_response_tokens) * cache_bytes(config, model_config),
        "sampling": 4 * 4 * rows * size.vocabulary + widened,
    }
    shapes = min(KEPT_KERNELS, size.linears * (rows + 3 * layout.num_passes * config.training.steps))
    held = {"process": process, "weights": size.weights, "optimiser state": 8 * size.parameters, "float32 masters": masters}
    held["kernels by shape"] = kernel * shapes
    if config.cluster.place == "process":
        held["driver process"] = process
    if config.cluster.engine_apart:
        held["engine process"] = process + size.weights + masters + sum(rollout.values())
        rollout = {}
    gradients = {"gradients": 4 * size.parameters}
    phases = {
        "update": gradients | {"activations": activations, "head": head},
        "optimiser step": gradients | {"working copy": working},
    }
    phases |= {"rollout": rollout} if rows else {}
    if on_cpu:
        for parts in phases.values():
            parts["heap slack"] = round(HEAP_SLACK * sum(parts.values()))
    return Memory({name: n for name, n in held.items() if n}, phases)


def remedies(config: Config, model_config: Any, load: Load, process: int, kernel: int = 0) -> list[tuple[str, int]]:
    """Settings that lower the peak, each alone, with the bytes it saves; the most effective first."""
    peak = foretell_memory(config, model_config, load, process, kernel).peak
    changes: dict[str, Any] = {
        "training.token_budget": config.training.token_budget // 2,
        "model.activation_checkpointing": True,
        "model.dtype": "bfloat16",
        "rollout.max_rows": max(1, config.rollout.max_rows // 2),
        "rollout.max_response_tokens": max(1, config.rollout.max_response_tokens // 2),
        "rollout.samples": max(2, config.rollout.samples // 2),
    }
    out: list[tuple[str, int]] = []
    for key, value in changes.items():
        section, name = key.split(".")
        if value != getattr(getattr(config, section), name):
            tried = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: value})})
            tried_load = load
            if name == "samples":
                tried_load = dataclasses.replace(
                    load, groups=[dataclasses.replace(g, num_samples=g.num_samples // 2) for g in load.groups]
                )
            saved = peak - foretell_memory(tried, model_config, tried_load, process, kernel).peak
            out.append((f"{key}={str(value).lower()}", saved))
    return sorted([change for change in out if change[1] > 0], key=lambda change: -change[1])


# ---- time and disk


def foretell_step(
    config: Config, stages: list[str], layout: Layout, size: Size, rates: Rates, load: Load, response_tokens: int
) -> dict[str, float]:
    """Seconds of one step by stage. Verifiers, logging and checkpoints are not in it."""
    out: dict[str, float] = {}
    if layout.sampled:
        prompts = sum(group.prompt for group in load.groups if group.num_samples)
        out["sample"] = generate_s(layout.sampled, prompts, response_tokens, rates)
    if "remember" in stages:
        out["remember"] = layout.padded_tokens * rates.forward_token_s
    out["update"] = (
        layout.padded_tokens * rates.train_token_s + config.training.updates_per_step * size.parameters * rates.parameter_s
    )
    return out


def generate_s(rows: int, prompt_tokens: int, response_tokens: int, rates: Rates) -> float:
    """Seconds to sample `rows` responses of this length: the prompts once, then full waves of decode steps."""
    waves = max(1.0, rows / rates.decode_rows)
    return prompt_tokens * rates.forward_token_s + waves * response_tokens * rates.decode_s


def foretell_validations(config: Config, load: Load, rates: Rates) -> float:
    """Seconds of all validations that answer problems: before, after and on the way, each greedy and sampled."""
    if not load.num_validation:
        return 0.0
    every, steps = config.training.validate_every, config.training.steps
    count = 2 + ((steps - 1) // every if every else 0)
    prompts = load.num_validation * sum(group.prompt for group in load.groups) // len(load.groups)
    return count * 2 * generate_s(load.num_validation, prompts, config.rollout.max_response_tokens, rates)


def checkpoint_bytes(size: Size) -> int:
    """Weights, Adam's two moments and, beside bfloat16 weights, the float32 masters."""
    return size.weights + (8 if size.bytes_each == 4 else 12) * size.parameters


def disk_bytes(config: Config, size: Size, layout: Layout) -> int:
    """Most disk the run folder takes: the checkpoints kept, one being written, and the rollouts."""
    training = config.training
    saves = math.ceil(training.steps / training.checkpoint_every)
    return min(saves, training.keep_checkpoints + 1) * checkpoint_bytes(size) + training.steps * layout.tokens * ROLLOUT_BYTES
