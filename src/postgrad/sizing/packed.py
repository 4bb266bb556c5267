"""The memory of packed passes: the model's modules and Triton kernels, run on meta tensors.

Meta tensors have shapes and no data, and the kernels are not launched. Models of one and of two
blocks run forward and backward while every storage is counted; each other block adds the same as
the second. So the estimate follows the code that a GPU runs, without a GPU.
"""

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from postgrad.config.schema import Config
from postgrad.model.device import KERNEL_DEVICE
from postgrad.model.kernels.install import install_kernels
from postgrad.model.load.formats import Loaded
from postgrad.model.lora import add_adapters
from postgrad.model.passes.head import head_of, model_outputs
from postgrad.model.passes.packing import Packing
from postgrad.model.passes.recompute import chunk_mlps
from postgrad.model.passes.support import CAPTURED_FAMILIES, packing_problem
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL
from postgrad.model.quantized import quantize_linears
from postgrad.model.views import hidden_states
from postgrad.sizing.simulate import NO_OBJECTIVE, LiveBytes, build_model, named_errors

META = torch.device("meta")


def runs_packed(config: Config, model_config: Any) -> bool:
    """Return whether this run's passes are packed and computed by the Triton kernels."""
    text_config = model_config.get_text_config()
    return (
        config.model.device == KERNEL_DEVICE
        and text_config.model_type in CAPTURED_FAMILIES
        and text_config is model_config  # more than a text model otherwise
        and not getattr(text_config, "num_experts", None)  # how many tokens an expert gets is data
        and not packing_problem(SimpleNamespace(config=model_config))
    )


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


class PackedSimulation:
    """Simulates the training passes of one model.

    Args:
        config: of the run; activation checkpointing and LoRA change the passes.
        model_config: the transformers configuration.
        adapters: add LoRA adapters if the configuration has them.

    Raises:
        RunError: the model does something that tensors without data cannot follow.
    """

    def __init__(self, config: Config, model_config: Any, adapters: bool = True) -> None:
        # The optimizer's state does not count here, and not every kind takes meta tensors.
        self.config = replace(config, optimizer=replace(config.optimizer, kind="adamw"))
        self.num_blocks = int(model_config.get_text_config().num_hidden_layers)
        self.model_config = model_config  # held, because estimates are found by its id
        self.models: list[LocalPolicy] = []
        self.results: dict[tuple[int, int], PassMemory] = {}
        with named_errors(config):
            for num_blocks in (1, 2):
                self.models.append(
                    self._make_policy(copy.deepcopy(model_config), num_blocks, adapters)
                )

    def _make_policy(self, model_config: Any, num_blocks: int, adapters: bool) -> LocalPolicy:
        with torch.device(META):
            settings = self.config.model
            model = build_model(self.config, model_config, num_blocks)
            if adapters and settings.quantization == "4bit":
                quantize_linears(model, META)
            install_kernels(model)
            if settings.activation_checkpointing:
                chunk_mlps(model)
            if adapters and settings.lora.rank:
                add_adapters(model, settings.lora, 0)
            policy = LocalPolicy(self.config, Loaded(model, None), NO_OBJECTIVE)
            for master in policy.optimizer.masters.values():  # as after an earlier micro-batch
                master.grad = torch.zeros_like(master)
        return policy

    def run(self, tokens: int, response_tokens: int) -> PassMemory:
        """Return the memory of a pass over `tokens` tokens that trains `response_tokens`."""
        key = (tokens, response_tokens)
        if key not in self.results:
            with named_errors(self.config), torch.device(META):
                self.results[key] = self._run(tokens, response_tokens)
        return self.results[key]

    def _run(self, tokens: int, response_tokens: int) -> PassMemory:
        one, two = self.models
        kept_by_one, peak_of_one = _train(one, tokens, response_tokens)
        kept_by_two, _ = _train(two, tokens, response_tokens)
        _, peak_of_blocks = _train(one, tokens, 0)
        num_more = self.num_blocks - 1
        kept = kept_by_one + num_more * (kept_by_two - kept_by_one)
        return PassMemory(
            kept=kept,
            blocks_extra=max(0, peak_of_blocks - kept_by_one),
            head_extra=_head_peak(one, tokens, response_tokens),
            extra=peak_of_one - kept_by_one,
        )


def _train(policy: LocalPolicy, tokens: int, response_tokens: int) -> tuple[int, int]:
    """Return the bytes (kept after the forward pass, at the peak) of a pass.

    Without response tokens the head is left out.
    """
    with LiveBytes(_existing(policy)) as live:
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        tiles = torch.zeros(1, 5, dtype=torch.int32)
        packing = Packing(tiles, tiles, torch.zeros(tokens, dtype=torch.int32))
        hidden = hidden_states(policy.model, ids, ids, None, FULL, packing)
        kept = live.now
        if response_tokens:
            _head(policy, hidden, response_tokens).backward()
        else:
            hidden.backward(torch.empty_like(hidden))
    return kept, live.peak


def _head_peak(policy: LocalPolicy, tokens: int, response_tokens: int) -> int:
    """Return the peak bytes of head and loss, forward and backward."""
    width = head_of(policy.model).weight.shape[1]
    dtype = next(policy.model.parameters()).dtype
    hidden = torch.empty(1, tokens, width, dtype=dtype, requires_grad=True)
    with LiveBytes([hidden, *_existing(policy)]) as live:
        _head(policy, hidden, response_tokens).backward()
    return live.peak


def _head(policy: LocalPolicy, hidden: Tensor, response_tokens: int) -> Tensor:
    gather = torch.zeros(response_tokens, dtype=torch.int64)
    states = hidden.flatten(0, 1)[gather]
    return model_outputs(policy.model, states, gather).logprobs.sum()


def _existing(policy: LocalPolicy) -> list[Tensor]:
    """Return the tensors that exist before a pass: parameters, masters and their gradients."""
    masters = list(policy.optimizer.masters.values())
    gradients = [master.grad for master in masters if master.grad is not None]
    return [*policy.model.parameters(), *policy.model.buffers(), *masters, *gradients]
