"""Recomputed blocks that keep their attention compute it once, and give the same gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from interpreted import run_interpreted
from tiny_runs import config_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from postgrad.cluster.host import build_host
from postgrad.errors import ConfigError
from postgrad.model.passes.recompute import (
    attention_contexts,
    keep_attention,
    keep_result,
    take_result,
)
from postgrad.training.prepare import prepare
from postgrad.training.resolve import resolve

computed: list[str] = []


class Square(torch.autograd.Function):
    """Stands for attention: its backward pass needs the output."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        kept = take_result()
        if kept is None:
            computed.append("square")
            kept = x * x, x.sum()
        out, lse = kept
        if any(ctx.needs_input_grad):
            keep_result(out, lse)
        ctx.save_for_backward(out, lse)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        out, _ = ctx.saved_tensors
        return grad * 2 * out.sqrt()


def block(x: Tensor) -> Tensor:
    return Square.apply((Square.apply(x.exp()) + 1).tanh())  # type: ignore[return-value,operator]


def run(contexts) -> tuple[Tensor, list[str]]:
    """Return the gradient through two checkpointed blocks, and what was computed."""
    computed.clear()
    x = torch.linspace(0.1, 1.0, 5, requires_grad=True)
    options = {} if contexts is None else {"context_fn": contexts}
    run_block = partial(checkpoint, block, use_reentrant=False, **options)
    run_block(run_block(x)).sum().backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return x.grad, list(computed)


def test_kept_results_are_used_once_in_the_recomputation() -> None:
    expected, twice = run(None)
    made: list[Any] = []

    def contexts():
        pair = attention_contexts()
        made.append(pair)
        return pair

    actual, once = run(contexts)
    assert torch.equal(actual, expected)
    assert (len(twice), len(once)) == (8, 4)
    assert [len(forward.results) for forward, _ in made] == [0, 0], "their memory is free again"
    assert take_result() is None


def test_without_gradients_nothing_is_kept() -> None:
    made: list[Any] = []
    with torch.no_grad():
        checkpoint(
            block,
            torch.ones(3),
            use_reentrant=False,
            context_fn=lambda: made.append(attention_contexts()) or made[-1],
        )
    assert [len(forward.results) for forward, _ in made] in ([], [0])


def test_the_last_blocks_keep_theirs(tiny) -> None:
    host = build_host(config_of("grpo", tiny, "model.activation_checkpointing=true"))
    blocks = list(host.policy.model.base_model.layers)
    keep_attention(host.policy.model, 1)
    contexts = [block._gradient_checkpointing_func.keywords.get("context_fn") for block in blocks]
    assert contexts == [None] * (len(blocks) - 1) + [attention_contexts]


@pytest.mark.parametrize(
    "settings",
    [
        ("model.activation_checkpointing=false",),
        ("model.activation_checkpointing=true", "cluster.backend=ray"),
        ("model.activation_checkpointing=true",),  # a CPU has no Triton kernels
    ],
)
def test_settings_without_effect_are_refused(tiny, settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"model\.kept_attention_blocks=2"):
        prepare(config_of("grpo", tiny, "model.kept_attention_blocks=2", *settings))


def test_a_cpu_keeps_nothing(tiny) -> None:
    config = resolve(config_of("grpo", tiny, "model.activation_checkpointing=true"))
    assert config.model.kept_attention_blocks == 0


PROGRAM = """
import torch
from unittest.mock import patch
from torch.utils.checkpoint import checkpoint
from postgrad.model.passes.recompute import attention_contexts
from postgrad.model.kernels import packed_attention as kernels
from postgrad.model.passes.packing import make_packing

packing = make_packing([(0, 20, 0, 0, 90), (20, 90, 0, 20, 90)])


def gradients(**options):
    torch.manual_seed(0)
    states = torch.randn(90, 4, 16, requires_grad=True)

    def block(x):
        q, k, v = x[:, :2] * 2, x[:, 2:3].tanh(), x[:, 3:] + 1
        return kernels.packed_attention(q, k, v, packing, 0.25) * x[:, :2]

    with patch.object(kernels, "_attend", wraps=kernels._attend) as attend:
        out = checkpoint(block, states, use_reentrant=False, **options)
        (out * torch.randn(out.shape)).sum().backward()
    return states.grad, attend.call_count


expected, computed = gradients()
kept, computed_once = gradients(context_fn=attention_contexts)
assert (computed, computed_once) == (2, 1)
assert torch.equal(kept, expected) and expected.abs().sum() > 0
print("same")
"""


@pytest.mark.slow
def test_the_kernels_give_the_same_bits() -> None:
    run_interpreted(PROGRAM)
