"""Activation checkpointing: kept attention, and MLPs in chunks.

A checkpointed block keeps its input and recomputes the rest in the backward pass. `chunk_mlps` runs
the MLP of a long pass some tokens at a time, because its wide activations would fill the memory.
`keep_attention` spends memory to save time: recomputed blocks do not compute their attention again.
Neither changes what is computed; chunks change it by rounding.
"""

import threading
from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 8192  # of an MLP at a time


# ---- attention that is not computed again


def keep_attention(model: Any, num_blocks: int) -> None:
    """Let the last checkpointed blocks keep their attention outputs for the recomputation."""
    blocks = list(getattr(model.base_model, "layers", ()))
    for block in blocks[max(0, len(blocks) - num_blocks) :]:
        block._gradient_checkpointing_func = partial(
            checkpoint, use_reentrant=False, context_fn=attention_contexts
        )


# ---- MLPs in chunks


def chunk_mlps(model: Any, chunk_tokens: int = CHUNK_TOKENS) -> None:
    """Let the MLPs of the blocks compute long passes in chunks of tokens.

    Each chunk is recomputed in the backward pass. MLPs with experts are left as they are.
    """
    for block in getattr(model.base_model, "layers", ()):
        mlp = getattr(block, "mlp", None)
        if mlp is not None and hasattr(mlp, "down_proj"):
            mlp.forward = partial(_chunked_forward, mlp, mlp.forward, chunk_tokens)


def _chunked_forward(mlp: Any, forward: Any, chunk_tokens: int, hidden_states: Tensor) -> Tensor:
    """Return forward(hidden_states) of (batch, length, width), computed chunk by chunk."""
    tokens = hidden_states.flatten(0, -2)
    if len(tokens) <= chunk_tokens:
        return forward(hidden_states)
    if not torch.is_grad_enabled():
        return _run_chunks(forward, tokens, chunk_tokens).view(hidden_states.shape)
    parameters = [p for p in mlp.parameters() if p.requires_grad]
    if not parameters and not tokens.requires_grad:
        return _run_chunks(forward, tokens, chunk_tokens).view(hidden_states.shape)
    if not tokens.requires_grad:  # otherwise torch would not keep it
        tokens = tokens.detach().requires_grad_()
    # The input is kept before anything is computed. Where nothing after the MLP keeps a tensor,
    # the recomputation of the block ends here, and the MLP is computed again only in chunks.
    kept = _KeptInput()
    tokens = _KeepInput.apply(tokens, kept)
    out = _ChunkedMlp.apply(tokens, forward, chunk_tokens, kept, *parameters)
    return out.view(hidden_states.shape)  # type: ignore[union-attr]


def _run_chunks(forward: Any, tokens: Tensor, chunk_tokens: int) -> Tensor:
    return torch.cat([forward(chunk[None])[0] for chunk in tokens.split(chunk_tokens)])


class _KeptInput:
    """The context whose saved tensor is the input of an MLP."""

    context: Any = None


class _KeepInput(torch.autograd.Function):
    """Returns its input and saves it for another function's backward pass."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, kept: _KeptInput) -> Tensor:
        ctx.save_for_backward(tokens)
        kept.context = ctx
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grads[0], None


class _ChunkedMlp(torch.autograd.Function):
    """Computes an MLP chunk by chunk, and again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        forward: Any,
        chunk_tokens: int,
        kept: _KeptInput,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.forward, ctx.chunk_tokens, ctx.kept = forward, chunk_tokens, kept
        ctx.parameters = parameters
        return _run_chunks(forward, tokens, chunk_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (tokens,) = ctx.kept.context.saved_tensors
        grad_tokens: list[Tensor] = []
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        parts = zip(tokens.split(ctx.chunk_tokens), grads[0].split(ctx.chunk_tokens), strict=True)
        for chunk, grad in parts:
            chunk = chunk.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.forward(chunk[None])[0]
            inputs = [chunk, *ctx.parameters]
            first, *others = torch.autograd.grad(out, inputs, grad, allow_unused=True)
            grad_tokens.append(first)
            for i, other in enumerate(others):  # None where a product added it
                before = sums[i]
                if other is not None:
                    sums[i] = other if before is None else before + other
        return torch.cat(grad_tokens), None, None, None, *sums


# ---- attention outputs of checkpointed blocks, which are not computed again

Result = tuple[Tensor, Tensor]  # outputs and logarithms of the sums of weights, without gradient

_active = threading.local()  # backward passes recompute in threads of their own


class _Context:
    """While it is entered, attention is kept in `results` or taken from there."""

    def __init__(self, results: "deque[Result]", is_forward: bool) -> None:
        self.results = results
        self.is_forward = is_forward
        self.outer: _Context | None = None

    def __enter__(self) -> None:
        self.outer = getattr(_active, "context", None)
        _active.context = self

    def __exit__(self, *error: object) -> None:
        _active.context = self.outer


def attention_contexts() -> tuple[_Context, _Context]:
    """Return the contexts of a block's forward pass and of its recomputation.

    This is the `context_fn` of torch's checkpoint, which calls it once per pass of a block.
    """
    results: deque[Result] = deque()
    return _Context(results, is_forward=True), _Context(results, is_forward=False)


def keep_result(out: Tensor, lse: Tensor) -> None:
    """Keep the result of an attention that has gradients, if the block's forward pass wants it."""
    context: _Context | None = getattr(_active, "context", None)
    if context is not None and context.is_forward:
        # Without its gradient function, which would refer to the checkpoint that refers to this.
        context.results.append((out.detach(), lse))


def take_result() -> Result | None:
    """Return the result of the block's next attention in its recomputation; None if not kept.

    Each is returned once, so its memory is free after the block's backward pass.
    """
    context: _Context | None = getattr(_active, "context", None)
    if context is None or context.is_forward or not context.results:
        return None
    return context.results.popleft()
