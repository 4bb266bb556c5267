"""The model without its weights: counted on the meta device, run on fake tensors to count memory.

Fake tensors have shapes and no data. One and two blocks of the model run forward and backward on
them while every storage is counted; each other block adds the same as the second. So the estimate
follows the model's own code, whatever the architecture.
"""

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from postgrad.config.schema import Config
from postgrad.errors import ConfigError, RunError, first_line
from postgrad.model.device import DTYPES
from postgrad.model.load.context import context_length
from postgrad.model.load.formats import Loaded, auto_class_of
from postgrad.model.lora import add_adapters
from postgrad.model.optimizers.muon import find_blocks
from postgrad.model.passes.attention import register_attention
from postgrad.model.passes.head import model_outputs
from postgrad.model.passes.layout import MicroBatch
from postgrad.model.passes.recompute import chunk_mlps
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL
from postgrad.model.quantized import quantize_linears, quantized_modules
from postgrad.model.views import hidden_states

Result = TypeVar("Result")

# Stands for a method where only forward passes matter and never the loss.
NO_OBJECTIVE: Any = SimpleNamespace(lr_scales=lambda names: {})

# What was measured inside `reuse_results`, by what it depends on.
_results: ContextVar[dict[Any, Any] | None] = ContextVar("results", default=None)


@contextmanager
def reuse_results() -> Iterator[None]:
    """Measure a model once inside this block, though plans with other settings ask for it again.

    The plans may differ in settings of the model, in the shapes of a pass and in settings that
    these functions do not read.
    """
    token = _results.set({})
    try:
        yield
    finally:
        _results.reset(token)


def _reuse(compute: Callable[[], Result], config: Config, model_config: Any, *more: Any) -> Result:
    """Return what `compute` returns for these settings of the model; see `reuse_results`."""
    results = _results.get()
    if results is None:
        return compute()
    key = (repr(config.model), model_config.to_json_string(use_diff=False), *more)
    if key not in results:
        results[key] = compute()
    return results[key]


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


def build_model(
    config: Config,
    model_config: Any,
    num_blocks: int | None = None,
    vocabulary: int | None = None,
    stock: bool = False,
) -> Any:
    """Return the model with random weights on the current torch device.

    Args:
        config: the run.
        model_config: transformers configuration of the model.
        num_blocks: replaces the number of blocks.
        vocabulary: replaces the size of the vocabulary.
        stock: leave the attention that transformers chooses.

    Raises ConfigError if transformers cannot build the model.
    """
    model_config = copy.deepcopy(model_config)
    text_config = model_config.get_text_config()
    if num_blocks is not None:
        if types := getattr(text_config, "layer_types", None):
            text_config.layer_types = [types[i % len(types)] for i in range(num_blocks)]
        text_config.num_hidden_layers = num_blocks
    if vocabulary is not None:
        text_config.vocab_size = vocabulary
        text_config.pad_token_id = None
    try:
        model = auto_class_of(model_config).from_config(
            model_config,
            dtype=DTYPES[config.model.dtype],
            attn_implementation=None if stock else register_attention(),
            trust_remote_code=config.model.trust_remote_code,
        )
    except (ValueError, KeyError, TypeError) as error:
        reason = first_line(error)
        raise ConfigError(
            f"model.path={config.model.path} cannot be built from its configuration: {reason}"
        ) from error
    model.train()
    if config.model.activation_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def measure_size(config: Config, model_config: Any, adapters: bool = True) -> ModelSize:
    """Count the parameters on the meta device, which takes no memory; a tied head counts once.

    `adapters`: quantize the model and add LoRA adapters if the configuration says so, which is
    about the policy only.
    """
    return _reuse(
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


def simulate_update(config: Config, model_config: Any, micro: MicroBatch) -> tuple[int, int]:
    """Return the bytes that one micro-batch needs: (activations kept for backward, the head)."""
    mask = None if micro.mask is None else micro.mask.shape
    shapes = ("update", micro.ids.shape, mask, micro.gather.shape)
    return _reuse(
        lambda: _simulate_update(config, model_config, micro), config, model_config, *shapes
    )


def _simulate_update(config: Config, model_config: Any, micro: MicroBatch) -> tuple[int, int]:
    kept_by_one, peak_of_one = _simulate_blocks(config, model_config, micro, 1)
    kept_by_two, _ = _simulate_blocks(config, model_config, micro, 2)
    num_more = int(model_config.get_text_config().num_hidden_layers) - 1
    activations = kept_by_one + num_more * (kept_by_two - kept_by_one)
    return activations, peak_of_one - kept_by_one


def _simulate_blocks(
    config: Config, model_config: Any, micro: MicroBatch, num_blocks: int
) -> tuple[int, int]:
    """Return the bytes (kept after the forward pass, at the peak) of a model of `num_blocks`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # The optimizer's state does not count here, and not every kind takes fake tensors.
    optimizer = dataclasses.replace(config.optimizer, kind="adamw")
    config = dataclasses.replace(config, optimizer=optimizer)
    with named_errors(config), FakeTensorMode(), torch.device(config.model.device):
        loaded = Loaded(build_model(config, model_config, num_blocks), None)
        if config.model.activation_checkpointing:
            chunk_mlps(loaded.model)
        policy = LocalPolicy(config, loaded, NO_OBJECTIVE)
        masters = list(policy.optimizer.masters.values())
        for master in masters:  # as after an earlier micro-batch
            master.grad = torch.zeros_like(master)
        gradients = [master.grad for master in masters if master.grad is not None]
        with LiveBytes([*policy.model.parameters(), *masters, *gradients]) as live:
            ids = torch.zeros(micro.ids.shape, dtype=torch.int64)
            positions = torch.zeros(micro.ids.shape, dtype=torch.int64)
            mask = None
            if micro.mask is not None:
                mask = torch.ones(micro.mask.shape, dtype=torch.bool)
            hidden = hidden_states(policy.model, ids, positions, mask, FULL)
            kept = live.now
            gather = torch.zeros(micro.gather.shape, dtype=torch.int64)
            outputs = model_outputs(policy.model, hidden.flatten(0, 1)[gather], gather)
            outputs.logprobs.sum().backward()
    return kept, live.peak


def cache_bytes(config: Config, model_config: Any) -> int:
    """Return the bytes of the keys and values of one token in all blocks."""
    return _reuse(lambda: _cache_bytes(config, model_config), config, model_config, "cache")


def _cache_bytes(config: Config, model_config: Any) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import DynamicCache

    with named_errors(config), FakeTensorMode(), torch.no_grad():
        cache = DynamicCache()
        token = torch.zeros(1, 1, dtype=torch.int64)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        decoder = build_model(config, model_config, num_blocks=1).eval().base_model
        decoder(
            input_ids=token,
            position_ids=token,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        per_block = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return per_block * int(model_config.get_text_config().num_hidden_layers)


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
