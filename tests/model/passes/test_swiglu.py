"""SwiGLU and a down projection with an adapter, interpreted on the CPU, against peft's layer."""

import pytest
from interpreted import run_interpreted

pytest.importorskip("peft")
PROGRAM = """
import torch
from torch import nn
from postgrad.config.schema import LoraConfig
from postgrad.model.lora import add_adapters
from postgrad.model.lora import adapter_products, lora_matrices
from postgrad.model.kernels.install import _down_projection
from postgrad.model.quantized import QuantizedLinear, quantize


class Mlp(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.gate_proj = nn.Linear(24, 64)
        self.down_proj = nn.Linear(64, 24, bias=kind == "bias")
        if kind == "4bit":
            self.down_proj = QuantizedLinear(quantize(self.down_proj.weight), None)

    def get_output_embeddings(self):
        return None


def compare(kind):
    torch.manual_seed(0)
    model = Mlp(kind)
    add_adapters(model, LoraConfig(rank=4, alpha=6, targets="down_proj"), 0)
    down = model.down_proj
    with torch.no_grad():
        lora_matrices(down)[1].normal_()
    assert adapter_products(down) is not None
    kept = []

    def run(function):
        draw = torch.Generator().manual_seed(1)
        gate_up = torch.randn(5, 128, generator=draw, requires_grad=True)
        weights = torch.randn(5, 24, generator=draw)
        torch.manual_seed(3)
        kept.clear()
        hooks = torch.autograd.graph.saved_tensors_hooks
        with hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
            out = function(gate_up)
        grads = torch.autograd.grad((out * weights).sum(), [gate_up, *lora_matrices(down)])
        return out, *grads

    def reference(gate_up):
        gate, up = gate_up.chunk(2, 1)
        return down(nn.functional.silu(gate) * up)

    wanted = run(reference)
    for ours, theirs in zip(run(lambda x: _down_projection(down, x, False)), wanted):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (5, 64) not in kept, kept


for kind in ("plain", "bias", "4bit"):
    compare(kind)
print("same")
"""


@pytest.mark.slow
def test_down_projection_with_an_adapter_recomputes_its_input() -> None:
    run_interpreted(PROGRAM)
