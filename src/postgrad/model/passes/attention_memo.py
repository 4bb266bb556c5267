"""Attention outputs of checkpointed blocks, kept so that they are not computed again.

A checkpointed block runs its forward pass a second time in the backward pass. Over a long row most
of that is attention, whose output is one of the block's smaller tensors. A block whose attention
is kept computes it once: the recomputation gets the same bits from here.
"""

import threading
from collections import deque
from types import TracebackType

from torch import Tensor

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
