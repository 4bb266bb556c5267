"""Small functions that the tests of algorithms share."""

import torch
from torch import Tensor

F64 = torch.float64


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def row_index(*lengths: int) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))


def trues(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bool)


def same_group(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64)


def close(actual: Tensor | float, expected, digits: int = 6) -> None:
    """Asserts equality to `digits` printed decimals.

    The tolerance is 0.6 of the last one: 0.5 for rounding, the rest for float32 references.
    """
    actual = torch.as_tensor(actual, dtype=F64).detach()
    expected = torch.as_tensor(expected, dtype=F64)
    assert actual.shape == expected.shape, (
        f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.6 * 10.0**-digits)


def exactly(actual: Tensor, expected) -> None:
    assert torch.equal(actual.detach().double(), torch.as_tensor(expected, dtype=F64)), (
        f"{actual} is not exactly {expected}"
    )


def gradient(function, at: Tensor) -> Tensor:
    """d function(x) / dx at `at`, for a scalar function."""
    x = at.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(x), x)
    return grad
