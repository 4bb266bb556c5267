"""The model without its weights: counted on the meta device, run without data to count memory.

Models of one and of two blocks run forward and backward on tensors that have shapes and no data,
while every storage is counted; each other block adds the same as the second. So the estimate
follows the code of the model and of the passes, whatever the architecture. Packed passes of a GPU
run on meta tensors, where Triton's kernels are not launched; others on fake tensors of the device.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from postgrad.config.schema import Config
from postgrad.errors import RunError, Unsupported, first_line
from postgrad.model.device import DTYPES
from postgrad.model.kernels.install import install_kernels
from postgrad.model.load.context import context_length
from postgrad.model.load.formats import Loaded, auto_class_of, freeze_tower
from postgrad.model.lora import add_adapters
from postgrad.model.passes.attention import register_attention
from postgrad.model.passes.head import head_of, model_outputs
from postgrad.model.passes.layout import MicroBatch, make_micro_batches_of_kind
from postgrad.model.passes.packing import Packing
from postgrad.model.passes.recompute import chunk_mlps
from postgrad.model.passes.support import packing_problem
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL
from postgrad.model.quantized import quantize_linears, quantized_modules
from postgrad.model.views import find_blocks, hidden_states
from postgrad.sizing.workload import Pass, Plan
from postgrad.types import Batch, Trajectory

Result = TypeVar("Result")

# Stands for a method where only forward passes matter and never the loss.
NO_OBJECTIVE: Any = SimpleNamespace(lr_scales=lambda names: {})

_computed: dict[Any, Any] = {}  # sizes and simulations of this process, by what they depend on


def _once(compute: Callable[[], Result], config: Config, model_config: Any, *more: Any) -> Result:
    """Return what `compute` returns for these settings of the model; plans share them."""
    # Kept attention is counted by a formula, so it changes nothing here.
    settings = replace(config.model, kept_attention_blocks=0)
    key = (repr(settings), model_config.to_json_string(use_diff=False), *more)
    if key not in _computed:
        _computed[key] = compute()
    return _computed[key]


@dataclass(frozen=True)
class ModelSize:
    """The size of a model."""

    parameters: int
    bytes_each: int  # per parameter that is not quantized
    weights: int  # bytes of the weights
    dequantized: int  # bytes of the largest 4-bit matrices that are dequantized at once
    blocks: int
    vocabulary: int
    context: int  # tokens that a row may have
    largest: int  # parameters of the largest tensor
    linears: int  # different shapes of weight matrices
    trained: int  # parameters that are trained: all of them, or those of the adapters
    matrices: int  # trained parameters in matrices of the blocks, which Muon updates
    block: int  # parameters of one block


def build_model(config: Config, model_config: Any, num_blocks: int | None = None) -> Any:
    """Return the model with random weights on the current torch device.

    `num_blocks` replaces the number of blocks of the transformers configuration. Raises
    ConfigError if transformers cannot build the model.
    """
    model_config = copy.deepcopy(model_config)
    text_config = model_config.get_text_config()
    if num_blocks is not None:
        if types := getattr(text_config, "layer_types", None):
            text_config.layer_types = [types[i % len(types)] for i in range(num_blocks)]
        text_config.num_hidden_layers = num_blocks
    try:
        model = auto_class_of(model_config).from_config(
            model_config,
            dtype=DTYPES[config.model.dtype],
            attn_implementation=register_attention(),
            trust_remote_code=config.model.trust_remote_code,
        )
    except (ValueError, KeyError, TypeError) as error:
        reason = first_line(error)
        raise Unsupported(
            f"model.path={config.model.path} cannot be built from its configuration: {reason}"
        ) from error
    model.train()
    if config.model.vision == "frozen":
        freeze_tower(model)
    if config.model.activation_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def measure_size(config: Config, model_config: Any, adapters: bool = True) -> ModelSize:
    """Count the parameters on the meta device, which takes no memory; a tied head counts once.

    `adapters`: quantize the model and add LoRA adapters if the configuration says so, which is
    about the policy only.
    """
    return _once(
        lambda: _measure_size(config, model_config, adapters), config, model_config, adapters
    )


def _measure_size(config: Config, model_config: Any, adapters: bool) -> ModelSize:
    with torch.device("meta"):
        model = build_model(config, model_config)
        if adapters and config.model.quantization == "4bit":
            quantize_linears(model, torch.device("meta"))
        if adapters and config.model.lora.rank:
            add_adapters(model, config.model.lora, 0)
    parameters = list(model.parameters())
    quantized = [module.quantized for module in quantized_modules(model).values()]
    blocks = find_blocks(model)
    matrices = [p for block in blocks for p in block.parameters() if p.dim() == 2]
    block = list(blocks[0].parameters())
    block_quantized = [module.quantized for module in quantized_modules(blocks[0]).values()]
    text_config = model_config.get_text_config()
    return ModelSize(
        parameters=sum(p.numel() for p in parameters) + sum(w.shape.numel() for w in quantized),
        bytes_each=parameters[0].element_size(),
        weights=sum(p.nbytes for p in parameters) + sum(w.nbytes for w in quantized),
        # The kernels multiply by two matrices of an MLP at once.
        dequantized=max((2 * w.shape.numel() * w.dtype.itemsize for w in quantized), default=0),
        blocks=int(text_config.num_hidden_layers),
        vocabulary=int(text_config.vocab_size),
        context=context_length(text_config),
        largest=max(p.numel() for p in parameters),
        linears=len({tuple(w.shape) for w in [*parameters, *quantized] if len(w.shape) == 2}),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        matrices=sum(p.numel() for p in matrices if p.requires_grad),
        block=sum(p.numel() for p in block) + sum(w.shape.numel() for w in block_quantized),
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all living tensors that its block made; views count nothing.

    `existing` tensors do not count either.
    """

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.existing = [tensor.untyped_storage() for tensor in existing]  # keeps them alive
        self.counted = weakref.WeakSet(self.existing)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage in self.counted:
            return
        self.counted.add(storage)
        size = storage.nbytes()
        weakref.finalize(storage, self._free, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, size: int) -> None:
        self.now -= size


@dataclass(frozen=True)
class PassMemory:
    """Bytes of one training pass on top of weights, optimizer and gradients."""

    kept: int  # activations between the forward and the backward pass
    blocks_extra: int  # beyond them, at most, in the backward pass of a block
    head_extra: int  # beyond them, at most, in head and loss
    extra: int  # beyond them, at most, in the whole pass

    @property
    def peak(self) -> int:
        return self.kept + self.extra


def simulation_of(plan: Plan, model_config: Any, adapters: bool = True) -> "PassSimulation":
    """Return the simulation of one model of the run; plans with other passes share it."""
    return _once(
        lambda: PassSimulation(plan.config, model_config, plan.packed, adapters),
        plan.config,
        model_config,
        "passes",
        plan.packed,
        adapters,
    )


class PassSimulation:
    """Simulates the training passes of one model.

    Args:
        config: of the run; activation checkpointing and LoRA change the passes.
        model_config: the transformers configuration.
        packed: passes by the kernels of a GPU.
        adapters: add LoRA adapters if the configuration has them.

    Raises:
        RunError: the model does something that tensors without data cannot follow.
    """

    def __init__(
        self, config: Config, model_config: Any, packed: bool, adapters: bool = True
    ) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        # The optimizer's state does not count here, and not every kind takes such tensors.
        self.config = replace(config, optimizer=replace(config.optimizer, kind="adamw"))
        self.packed = packed
        self.adapters = adapters
        self.num_blocks = int(model_config.get_text_config().num_hidden_layers)
        self.device = torch.device("meta" if packed else config.model.device)
        self.mode = nullcontext() if packed else FakeTensorMode(allow_non_fake_inputs=True)
        self.results: dict[Pass, PassMemory] = {}
        with self._without_data():
            self.models = [self._make_policy(model_config, number) for number in (1, 2)]

    @contextmanager
    def _without_data(self) -> Iterator[None]:
        with named_errors(self.config), self.mode, torch.device(self.device):
            yield

    def _make_policy(self, model_config: Any, num_blocks: int) -> LocalPolicy:
        settings = self.config.model
        model = build_model(self.config, model_config, num_blocks)
        adapters = self.adapters and self.packed  # fake tensors take neither adapters nor 4 bits
        if adapters and settings.quantization == "4bit":
            quantize_linears(model, self.device)
        if self.packed:
            install_kernels(model)
        if settings.activation_checkpointing:
            chunk_mlps(model)
        if adapters and settings.lora.rank:
            add_adapters(model, settings.lora, 0)
        policy = LocalPolicy(self.config, Loaded(model, None), NO_OBJECTIVE)
        for master in policy.optimizer.masters.values():  # as after an earlier micro-batch
            master.grad = torch.zeros_like(master)
        return policy

    def run(self, one: Pass) -> PassMemory:
        """Return the memory of a pass. Packed ones need no rows."""
        if self.packed:
            one = one._replace(rows=())
        if one not in self.results:
            micro = None if self.packed else self._micro_batch(one)
            with self._without_data():
                self.results[one] = self._run(one, micro)
        return self.results[one]

    def _micro_batch(self, one: Pass) -> MicroBatch:
        """Return the largest micro-batch that the trainer makes of the rows of a pass."""
        rows: list[Trajectory] = []
        for row in one.rows:
            prompt = [row.problem] * row.prompt
            rows.append(Trajectory(str(row.problem), prompt, [0] * row.response, row.problem))
        model = self.models[0].model
        kind = "shared" if packing_problem(model) else "packed"
        units = [row.unit for row in one.rows]
        micro_batches = make_micro_batches_of_kind(
            kind, Batch.of(rows), one.tokens, model, units, self.device
        )
        return max(micro_batches, key=lambda micro: micro.num_tokens)

    def _run(self, one: Pass, micro: MicroBatch | None) -> PassMemory:
        if micro is None:
            tiles = torch.zeros(1, 5, dtype=torch.int32)
            positions = torch.zeros(one.tokens, dtype=torch.int32)
            ids = torch.zeros(1, one.tokens, dtype=torch.int64)
            gather = torch.zeros(one.response_tokens, dtype=torch.int64)
            micro = MicroBatch([], ids, ids, None, gather, Packing(tiles, tiles, positions))
        small, large = self.models
        kept_by_one, peak_of_one = _train(small, micro, with_head=True)
        kept_by_two, _ = _train(large, micro, with_head=True)
        _, peak_of_blocks = _train(small, micro, with_head=False)
        kept = kept_by_one + (self.num_blocks - 1) * (kept_by_two - kept_by_one)
        return PassMemory(
            kept=kept,
            blocks_extra=max(0, peak_of_blocks - kept_by_one),
            head_extra=_head_peak(small, micro),
            extra=peak_of_one - kept_by_one,
        )


def _train(policy: LocalPolicy, micro: MicroBatch, with_head: bool) -> tuple[int, int]:
    """Return the bytes (kept after the forward pass, at the peak) of a pass."""
    with LiveBytes(existing_tensors(policy)) as live:
        ids = torch.zeros(micro.ids.shape, dtype=torch.int64)
        mask = None if micro.mask is None else torch.ones(micro.mask.shape, dtype=torch.bool)
        hidden = hidden_states(policy.model, ids, ids, mask, FULL, micro.packing)
        kept = live.now
        if with_head:
            _head(policy, hidden, micro).backward()
        else:
            hidden.backward(torch.empty_like(hidden))
    return kept, live.peak


def _head_peak(policy: LocalPolicy, micro: MicroBatch) -> int:
    """Return the peak bytes of head and loss, forward and backward."""
    width = head_of(policy.model).weight.shape[1]
    dtype = next(policy.model.parameters()).dtype
    hidden = torch.empty(1, micro.num_tokens, width, dtype=dtype, requires_grad=True)
    with LiveBytes([hidden, *existing_tensors(policy)]) as live:
        _head(policy, hidden, micro).backward()
    return live.peak


def _head(policy: LocalPolicy, hidden: Tensor, micro: MicroBatch) -> Tensor:
    gather = torch.zeros(micro.gather.shape, dtype=torch.int64)
    states = hidden.flatten(0, 1)[gather]
    return model_outputs(policy.model, states, gather).logprobs.sum()


def existing_tensors(policy: LocalPolicy) -> list[Tensor]:
    """Return the tensors that exist before a pass: parameters, masters and their gradients."""
    masters = list(policy.optimizer.masters.values())
    gradients = [master.grad for master in masters if master.grad is not None]
    return [*policy.model.parameters(), *policy.model.buffers(), *masters, *gradients]


@contextmanager
def named_errors(config: Config) -> Iterator[None]:
    """Raise RunError if a model does something that tensors without data cannot follow."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0][:200] if lines else type(error).__name__
        raise RunError(
            f"the memory of model.path={config.model.path} cannot be estimated: {reason}"
        ) from error
