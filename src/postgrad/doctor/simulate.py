"""The model without its weights: built on the meta device to be counted, run on fake tensors to see what memory it takes.

Fake tensors have shapes and no data. One and two of the model's own blocks run forward and backward on them while every storage is
counted; the other blocks add the same again. So the answer follows the code, whatever the architecture.
"""

import copy
import dataclasses
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from postgrad.config.schema import Config
from postgrad.errors import ConfigError, RunError
from postgrad.model.device import DTYPES
from postgrad.model.loaded import Loaded
from postgrad.model.lora import add_adapters
from postgrad.model.passes.attention import register_attention
from postgrad.model.passes.head import token_outputs
from postgrad.model.passes.layout import MicroBatch
from postgrad.model.policy import LocalPolicy
from postgrad.model.views import FULL, hidden_states
from postgrad.rollout.native.cache import Prefill

# Stands for a method where only passes through the model are looked at, never its loss.
NO_OBJECTIVE: Any = SimpleNamespace(lr_scales=lambda names: {})


@dataclass(frozen=True)
class Size:
    """The model in numbers."""

    parameters: int
    bytes_each: int
    blocks: int
    vocabulary: int
    context: int  # most tokens a row may have
    largest: int  # parameters of the largest tensor
    linears: int  # different shapes of matrix products
    trained: int  # parameters that are trained: all of them, or those of the adapters

    @property
    def weights(self) -> int:
        return self.parameters * self.bytes_each


def build(
    config: Config, model_config: Any, blocks: int | None = None, vocabulary: int | None = None
) -> Any:
    """The model as its configuration says, with random weights, on the current torch device; with other `blocks` or `vocabulary`."""
    from transformers import AutoModelForCausalLM

    cut = copy.deepcopy(model_config)
    text = cut.get_text_config()
    if blocks is not None:
        if types := getattr(text, "layer_types", None):
            text.layer_types = [types[i % len(types)] for i in range(blocks)]
        text.num_hidden_layers = blocks
    if vocabulary is not None:
        text.vocab_size, text.pad_token_id = vocabulary, None
    try:
        model = AutoModelForCausalLM.from_config(
            cut,
            dtype=DTYPES[config.model.dtype],
            attn_implementation=register_attention(),
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


def measure(config: Config, model_config: Any, adapters: bool = True) -> Size:
    """Count the parameters on the meta device: no memory is used, a tied head counts once. Only the policy has `adapters`."""
    with torch.device("meta"):
        model = build(config, model_config)
        if adapters and config.model.lora.rank:
            add_adapters(model, config.model.lora, 0)
    parameters = list(model.parameters())
    text = model_config.get_text_config()
    return Size(
        parameters=sum(p.numel() for p in parameters),
        bytes_each=parameters[0].element_size(),
        blocks=int(text.num_hidden_layers),
        vocabulary=int(text.vocab_size),
        context=int(text.max_position_embeddings),
        largest=max(p.numel() for p in parameters),
        linears=len({tuple(p.shape) for p in parameters if p.dim() == 2}),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors alive that were made inside; views and what was there before count nothing."""

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self.seen = weakref.WeakSet(tensor.untyped_storage() for tensor in before)
        self.before = [
            tensor.untyped_storage() for tensor in before
        ]  # a weak set alone would forget them

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
    kept, peaks = zip(
        *(_simulate_blocks(config, model_config, micro, blocks) for blocks in (1, 2)), strict=True
    )
    more = int(model_config.get_text_config().num_hidden_layers) - 1
    return kept[0] + more * (kept[1] - kept[0]), peaks[0] - kept[0]


def _simulate_blocks(
    config: Config, model_config: Any, micro: MicroBatch, blocks: int
) -> tuple[int, int]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    # How the optimizer keeps its state plays no part here, and not every kind takes tensors without data.
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, kind="adamw")
    )
    with _named(config), FakeTensorMode(), torch.device(config.model.device):
        policy = LocalPolicy(
            config, Loaded(build(config, model_config, blocks), None), NO_OBJECTIVE
        )
        masters = list(policy.optimizer.masters.values())
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
            outputs = token_outputs(
                hidden.flatten(0, 1)[gather], policy.model.get_output_embeddings().weight, gather
            )
            outputs.logprobs.sum().backward()
    return kept, count.peak


def cache_bytes(config: Config, model_config: Any) -> int:
    """Bytes of keys and values of one token in all blocks."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with _named(config), FakeTensorMode(), torch.no_grad():
        kept = Prefill()
        one = torch.zeros(1, 1, dtype=torch.int64)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        decoder = build(config, model_config, blocks=1).eval().base_model
        decoder(
            input_ids=one,
            position_ids=one,
            attention_mask=mask,
            past_key_values=kept,
            use_cache=True,
        )
        block = sum(tensor.numel() * tensor.element_size() for tensor in (*kept.keys, *kept.values))
    return block * int(model_config.get_text_config().num_hidden_layers)


@contextmanager
def _named(config: Config) -> Iterator[None]:
    """Say in one line when a model does something that tensors without data cannot follow."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise RunError(
            f"the memory of {config.model.path} cannot be foretold: {reason[0][:200]}"
        ) from error
