"""Attention kernels of wide heads, interpreted on the CPU, against attention in plain torch."""

import pytest
from interpreted import run_interpreted

PROGRAM = """
import torch
from postgrad.model.kernels import wide_attention
from postgrad.model.kernels.packed_attention import packed_attention
from postgrad.model.passes.packing import make_packing
from postgrad.model.passes.row_attention import make_padded_segments, padded_segment_attention

# A prompt with two responses, a row by itself, and a prompt of whole tiles with one response.
SEGMENTS = [(0, 90, 0, 0, 310), (90, 240, 0, 90, 240), (240, 310, 0, 90, 310)]
SEGMENTS += [(310, 450, 0, 0, 450), (450, 578, 0, 0, 600), (578, 600, 450, 578, 600)]


def compare(heads, key_heads, width):
    torch.manual_seed(0)
    shapes = [(600, h, width) for h in (heads, key_heads, key_heads)]
    # The interpreter has no products of bfloat16.
    inputs = [torch.randn(s, dtype=torch.float16, requires_grad=True) for s in shapes]
    assert wide_attention.supports(inputs[0], 0)
    grad = torch.randn(shapes[0], dtype=torch.float16)
    ours = packed_attention(*inputs, make_packing(SEGMENTS), width**-0.5)
    floats = [x.detach().float().requires_grad_() for x in inputs]
    wanted = padded_segment_attention(*floats, make_padded_segments(SEGMENTS), width**-0.5)
    ours = [ours, *torch.autograd.grad(ours, inputs, grad)]
    wanted = [wanted, *torch.autograd.grad(wanted, floats, grad.float())]
    for a, b in zip(ours, wanted, strict=True):
        error = (a.float() - b).abs().max() / b.abs().max()
        assert error < 1e-3, error


compare(4, 2, 80)  # two query heads per program
compare(3, 1, 128)  # one
q = torch.empty(1, 2, 128, dtype=torch.bfloat16)
assert wide_attention.supports(q, 0) and not wide_attention.supports(q, 7)
assert not wide_attention.supports(q.float(), 0) and not wide_attention.supports(q[..., :64], 0)
print("same")
"""


@pytest.mark.slow
def test_attention_of_wide_heads_and_its_gradients_are_those_of_plain_torch():
    run_interpreted(PROGRAM)
