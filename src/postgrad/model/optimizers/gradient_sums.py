"""Weight gradients that a matrix product adds to their float32 sums itself.

Otherwise each pass would write a bfloat16 gradient, which is then read again and added to the sum:
7% of an update of 4B parameters (benchmarks/NOTES.md), and one more rounding per pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from postgrad.model.device import has_float32_accumulation, is_simulated_gpu

_MASTER = "gradient_master"  # attribute of a parameter
_returned = False  # see returned_gradients


def set_master(p: Tensor, master: Tensor) -> None:
    """Let products add the gradient of `p` to the float32 `.grad` of its master, if they can."""
    if adds_products(p.device):
        setattr(p, _MASTER, master)


def has_master(p: Tensor) -> bool:
    """Return whether products add the gradient of `p`."""
    return hasattr(p, _MASTER)


@contextmanager
def returned_gradients() -> Iterator[None]:
    """Inside of this context gradients are returned to autograd and added to no master."""
    global _returned
    before = _returned
    _returned = True
    try:
        yield
    finally:
        _returned = before


def weight_gradients(weights: Sequence[Tensor], grad: Tensor, x: Tensor) -> Sequence[Tensor | None]:
    """Return the gradients of linear layers' weights, or None each where a product added them.

    Args:
        weights: (outputs, width) of each layer; all read the same input.
        grad: (tokens, outputs of all layers), the gradient of their outputs.
        x: (tokens, width), their input.
    """
    sums = gradient_sums(weights)
    if sums is None:
        return (grad.T @ x).split([len(weight) for weight in weights])
    add_product(sums, grad.T, x)
    return [None] * len(weights)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to the float32 `total`, on a GPU without a result in between."""
    if a.dtype == torch.bfloat16 and adds_products(total.device):
        _add_in_float32(total, a, b)
    else:
        total += a @ b


@cache
def adds_products(device: torch.device) -> bool:
    """Return whether a product of bfloat16 matrices is added to a float32 one rightly here.

    The libraries of some GPUs lack it, so a small product is tried.
    """
    if is_simulated_gpu(device) or not has_float32_accumulation(device):
        return has_float32_accumulation(device)
    matrix = (torch.arange(256, device=device).view(16, 16) % 7).bfloat16()
    total = matrix.float()
    try:
        _add_in_float32(total, matrix.T, matrix)
    except RuntimeError:
        return False
    return torch.equal(total, matrix.float() + matrix.float().T @ matrix.float())


def _add_in_float32(total: Tensor, a: Tensor, b: Tensor) -> None:
    if is_simulated_gpu(total.device):  # torch 2.11 cannot follow the call without data
        return
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def gradient_sums(weights: Sequence[Tensor]) -> Tensor | None:
    """Return one float32 tensor whose rows are the masters' gradients; None if there is none.

    The first pass of an update makes it. Gradients of captured passes are not in one tensor.
    """
    if _returned or not all(has_master(weight) and weight.requires_grad for weight in weights):
        return None
    masters: list[Tensor] = [getattr(weight, _MASTER) for weight in weights]
    grads = [master.grad for master in masters if master.grad is not None]
    if not grads:
        sizes = [len(weight) for weight in weights]
        sums = weights[0].new_zeros(sum(sizes), weights[0].shape[1], dtype=torch.float32)
        for master, part in zip(masters, sums.split(sizes), strict=True):
            master.grad = part
        return sums
    if len(weights) == 1:
        return grads[0]
    base = grads[0]._base
    is_shared = base is not None and len(grads) == len(weights)
    return base if is_shared and all(grad._base is base for grad in grads) else None
