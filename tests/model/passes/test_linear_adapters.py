"""Joined linear layers with LoRA adapters, in one product, against peft's layers."""

import pytest
from interpreted import run_interpreted

pytest.importorskip("peft")
PROGRAM = """
import torch
from torch import nn
from postgrad.config.schema import LoraConfig
from postgrad.model.lora import adapted_modules, add_adapters
from postgrad.model.lora import lora_matrices
from postgrad.model.kernels.linear import decode_linear, fuse_linears, fused_linear
from postgrad.model.quantized import QuantizedLinear, quantize


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(1))  # peft looks for a device
        for name, width in (("q_proj", 32), ("k_proj", 16), ("v_proj", 48)):
            layer = nn.Linear(64, width, bias=kind == "bias")
            if kind == "4bit":
                layer = QuantizedLinear(quantize(layer.weight), None)
            setattr(self, name, layer)

    def get_output_embeddings(self):
        return None


def compare(kind, targets):
    torch.manual_seed(0)
    model = Block(kind)
    layers = lambda: [model.q_proj, model.k_proj, model.v_proj]
    fused = fuse_linears(layers())
    add_adapters(model, LoraConfig(rank=4, alpha=6, targets=targets), 0)
    matrices = []
    for module in adapted_modules(model).values():
        with torch.no_grad():
            lora_matrices(module)[1].normal_()
        matrices += lora_matrices(module)

    def run(function):
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(5, 64, generator=draw, requires_grad=True)
        weights = torch.randn(5, 96, generator=draw)
        torch.manual_seed(3)
        out = function(x)
        return out, *torch.autograd.grad((out * weights).sum(), [x, *matrices])

    wanted = run(lambda x: torch.cat([layer(x) for layer in layers()], 1))
    for ours, theirs in zip(run(lambda x: fused_linear(x, fused, layers())), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        out = decode_linear(torch.ones(3, 64), fused, layers())
        theirs = torch.cat([layer(torch.ones(3, 64)) for layer in layers()], 1)
    torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-5)


for kind in ("plain", "bias", "4bit"):
    compare(kind, "q_proj,k_proj,v_proj")
    compare(kind, "q_proj,v_proj")
print("same")
"""


@pytest.mark.slow
def test_outputs_and_gradients_of_joined_layers_with_adapters_are_those_of_peft():
    run_interpreted(PROGRAM)
