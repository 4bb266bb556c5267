"""Products that add weight gradients to float32 sums, on a CPU: the sums, and who makes them.

tests/gpu/test_float32_sums.py checks the GPU's own product.
"""

from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted
from torch import nn

from postgrad.config.schema import OptimizerConfig
from postgrad.model.kernels.linear import fuse_linears, fused_linear
from postgrad.model.optimizers import gradient_sums
from postgrad.model.optimizers.gradient_sums import returned_gradients
from postgrad.model.optimizers.optimizer import Optimizer

SIZES = (6, 2, 4)
WIDTH = 5


def add_exactly(total, a, b):
    """What the GPU's product does: bfloat16 factors, float32 sums."""
    total += a.float() @ b.float()


@pytest.fixture
def products(monkeypatch):
    monkeypatch.setattr(gradient_sums, "adds_products", lambda device: True)
    monkeypatch.setattr(gradient_sums, "add_product", add_exactly)


def make_layers(bias=False):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, size, bias=bias) for size in SIZES]
    return nn.ModuleList(layers).bfloat16()


def passes():
    """Inputs and gradients of the outputs, of two passes."""
    torch.manual_seed(1)
    return [
        (torch.randn(7, WIDTH).bfloat16(), torch.randn(7, sum(SIZES)).bfloat16()) for _ in range(2)
    ]


def run(layers, x, grad):
    fused = fuse_linears(list(layers))
    fused_linear(x, fused, list(layers)).backward(grad)


def expected_sums():
    total = sum(grad.double().T @ x.double() for x, grad in passes())
    return total.split(SIZES)


@pytest.mark.parametrize("kind", ["adamw", "adamw_offloaded", "adamw_8bit"])
@pytest.mark.parametrize("bias", [False, True])
def test_products_add_to_the_masters_gradients(products, kind, bias):
    layers = make_layers(bias)
    optimizer = Optimizer(layers, OptimizerConfig(kind=kind))
    for x, grad in passes():
        run(layers, x, grad)
    for i, expected in enumerate(expected_sums()):
        actual = optimizer.masters[f"{i}.weight"].grad
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
        assert layers[i].weight.grad is None or optimizer.masters[f"{i}.weight"] is layers[i].weight
    if bias:
        expected = sum(grad.double().sum(0) for _, grad in passes()).float().split(SIZES)
        for i in range(len(SIZES)):
            actual = optimizer.masters[f"{i}.bias"].grad
            torch.testing.assert_close(actual, expected[i], rtol=0.02, atol=0.05)
    before = layers[0].weight.detach().clone()
    optimizer.step(0.1)
    assert not torch.equal(layers[0].weight, before)
    assert not optimizer.has_gradients()


def test_other_passes_add_to_the_same_sums(products):
    """A pass through the stock modules gives autograd bfloat16 gradients, which are added."""
    layers = make_layers()
    optimizer = Optimizer(layers, OptimizerConfig())
    (x, grad), (other_x, other_grad) = passes()
    run(layers, x, grad)
    outputs = torch.cat([layer(other_x) for layer in layers], dim=1)
    outputs.backward(other_grad)
    for i, expected in enumerate(expected_sums()):
        actual = optimizer.masters[f"{i}.weight"].grad
        torch.testing.assert_close(actual, expected.float(), rtol=0.02, atol=0.02)


def test_gradients_that_are_not_in_one_tensor_are_returned(products):
    """As those of captured passes, which have a buffer for each parameter."""
    layers = make_layers()
    optimizer = Optimizer(layers, OptimizerConfig())
    buffers = {}
    for name, master in optimizer.masters.items():
        buffers[name] = master.grad = torch.zeros_like(master)
    for x, grad in passes():
        run(layers, x, grad)
    for i, expected in enumerate(expected_sums()):
        assert optimizer.masters[f"{i}.weight"].grad is buffers[f"{i}.weight"]
        torch.testing.assert_close(buffers[f"{i}.weight"], expected.float(), rtol=0.02, atol=0.02)


def test_a_layer_that_is_frozen_later_gets_no_gradient(products):
    layers = make_layers()
    optimizer = Optimizer(layers, OptimizerConfig())
    layers[1].requires_grad_(False)
    for x, grad in passes():
        run(layers, x, grad)
    assert optimizer.masters["1.weight"].grad is None
    for i in (0, 2):
        actual = optimizer.masters[f"{i}.weight"].grad
        torch.testing.assert_close(actual, expected_sums()[i].float(), rtol=0.02, atol=0.02)


def test_returned_gradients_reach_autograd_and_no_master(products):
    layers = make_layers()
    optimizer = Optimizer(layers, OptimizerConfig())
    x, grad = passes()[0]
    fused = fuse_linears(list(layers))
    with returned_gradients():
        out = fused_linear(x, fused, list(layers))
        grads = torch.autograd.grad(out, list(layers.parameters()), grad)
    assert all(one is not None for one in grads)
    assert not optimizer.has_gradients()


def test_a_device_without_such_products_is_left_alone():
    layers = make_layers()
    Optimizer(layers, OptimizerConfig())
    assert not any(gradient_sums.has_master(p) for p in layers.parameters())


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (add_exactly, True),
        (lambda total, a, b: total.copy_(a.float() @ b.float()), False),
        (lambda total, a, b: torch.addmm(total, a, b, out_dtype=torch.float32, out=total), False),
    ],
    ids=["right", "wrong", "missing"],
)
def test_the_product_is_tried_before_it_is_used(monkeypatch, product, expected):
    monkeypatch.setattr(gradient_sums, "has_float32_accumulation", lambda device: True)
    monkeypatch.setattr(gradient_sums, "_add_in_float32", product)
    gradient_sums.adds_products.cache_clear()
    try:
        assert gradient_sums.adds_products(CPU) is expected
    finally:
        gradient_sums.adds_products.cache_clear()


PROGRAM = """
import sys
import torch
sys.path.insert(0, sys.argv[2])
from tiny_runs import config_of, random_batch
from postgrad.config.schema import ModelConfig
from postgrad.methods import find_method
from postgrad.model.optimizers import gradient_sums
from postgrad.model.load.load import load
from postgrad.model.passes import head
from postgrad.model.kernels.install import install_kernels
from postgrad.model.passes.layout import make_packed_micro_batches
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL

added = []

def add_exactly(total, a, b):
    added.append(total.shape)
    total += a.float() @ b.float()

def gradients(dtype, products):
    gradient_sums.adds_products = lambda device: products
    gradient_sums.add_product = head.add_product = add_exactly
    loaded = load(ModelConfig(path=sys.argv[1], dtype=dtype), torch.device("cpu"))
    install_kernels(loaded.model)
    config = config_of("grpo", sys.argv[1])
    policy = LocalPolicy(config, loaded, find_method("grpo")(config).objective)
    batch = random_batch(1, groups=2, samples=2, longest_prompt=3, longest=4)
    for micro in make_packed_micro_batches(batch, 6):
        targets = batch.response.values[batch.response.positions(torch.tensor(micro.rows))]
        outputs = policy.forward(micro, targets, FULL)
        (outputs.logprobs * torch.arange(1.0, 1 + len(targets))).sum().backward()
    return {name: master.grad for name, master in policy.optimizer.masters.items()}

exact = gradients("float32", False)
stock = gradients("bfloat16", False)
added.clear()
ours = gradients("bfloat16", True)
layers = 1 + max(int(name.split(".")[2]) for name in ours if ".layers." in name)
# Four products per block and pass: q/k/v, output, gate and up, down.
assert len(added) >= 2 * 4 * layers and len(added) % (4 * layers) == 0, len(added)

def error(gradient, name):
    return float((gradient[name] - exact[name]).norm() / exact[name].norm())

for name in exact:
    assert error(ours, name) < 1.2 * error(stock, name) + 1e-3, name
print("same")
"""


@pytest.mark.slow
def test_packed_passes_add_the_gradients_of_every_matrix(tiny):
    run_interpreted(PROGRAM, tiny, str(Path(__file__).parents[1]))


def test_an_estimate_follows_the_product_without_calling_it(monkeypatch):
    """The call of torch 2.11 does not work on tensors without data."""
    monkeypatch.setattr(torch, "addmm", None)
    meta = {"device": "meta", "dtype": torch.bfloat16}
    total = torch.zeros(6, 5, device="meta")
    gradient_sums.add_product(total, torch.zeros(6, 7, **meta), torch.zeros(7, 5, **meta))
    assert total.shape == (6, 5)
