"""Small things the tests of algorithms share."""

import importlib
import importlib.machinery
import pkgutil
import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

import postgrad
import postgrad.algorithms

F64 = torch.float64
NAMES = sorted(info.name for info in pkgutil.iter_modules(postgrad.algorithms.__path__))


def real() -> SimpleNamespace:
    """The modules of postgrad.algorithms by name, as they are."""
    return SimpleNamespace(
        **{name: importlib.import_module(f"postgrad.algorithms.{name}") for name in NAMES}
    )


class _Mutated(importlib.machinery.SourceFileLoader):
    """Loads one source file with a piece of its text replaced."""

    old, new = "", ""

    def get_code(self, fullname: str):
        source = self.get_data(self.get_filename(fullname)).decode()
        assert source.count(self.old) == 1, (
            f"{fullname}: {self.old!r} is there {source.count(self.old)} times, not once"
        )
        return compile(source.replace(self.old, self.new), f"<mutated {fullname}>", "exec")


class _Finder:
    def __init__(self, fullname: str, old: str, new: str) -> None:
        self.fullname, self.old, self.new = fullname, old, new

    def find_spec(self, fullname: str, path, target: ModuleType | None = None):
        if fullname != self.fullname:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        loader = _Mutated(fullname, spec.origin)
        loader.old, loader.new = self.old, self.new
        return importlib.machinery.ModuleSpec(fullname, loader, origin=spec.origin)


def mutated(module: str, old: str, new: str) -> SimpleNamespace:
    """Fresh modules of postgrad.algorithms, one of them with `old` replaced by `new` in its source. The real ones stay."""
    package = "postgrad.algorithms"
    saved = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name == package or name.startswith(package + ".")
    }
    finder = _Finder(f"{package}.{module}", old, new)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        return SimpleNamespace(
            **{name: importlib.import_module(f"{package}.{name}") for name in NAMES}
        )
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [
            name for name in sys.modules if name == package or name.startswith(package + ".")
        ]:
            del sys.modules[name]
        sys.modules.update(saved)
        postgrad.algorithms = saved[package]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def row_index(*lengths: int) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))


def trues(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bool)


def same_group(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64)


def close(actual: Tensor | float, expected, digits: int = 6) -> None:
    """Equal to `digits` printed decimals: at most 0.6 of the last one apart (0.5 for rounding, the rest for float32 references)."""
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
