"""Norms and rotary positions of projected heads, interpreted on the CPU, against plain torch."""

import pytest
from interpreted import run_interpreted

PROGRAM = """
import torch
from postgrad.model.kernels import heads as kernels
from postgrad.model.kernels.heads import HeadNorms, projected_heads

kernels.MAX_PROGRAMS = 5  # so that a program sums the weights' gradient over several tokens


def reference(qkv, heads, key_heads, cos, sin, norms):
    width = cos.shape[1]
    parts = qkv.split([heads * width, key_heads * width, key_heads * width], 1)
    q, k, v = (part.unflatten(1, (-1, width)) for part in parts)

    def normalize(x, weight):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + norms.eps)
        return x * scale * (weight + 1 if norms.centered else weight)

    def rotate(x):
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * cos[:, None] + half * sin[:, None]

    if norms is not None:
        q, k = normalize(q, norms.query), normalize(k, norms.key)
    return rotate(q), rotate(k), v


def compare(heads, key_heads, width, has_norms, centered):
    torch.manual_seed(0)
    qkv = torch.randn(17, (heads + 2 * key_heads) * width, requires_grad=True)
    angle = 6 * torch.rand(17, width // 2).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    weights = [torch.randn(width, requires_grad=True) for _ in range(2)] if has_norms else []
    norms = HeadNorms(*weights, 1e-6, centered) if has_norms else None
    ours = projected_heads(qkv, heads, cos, sin, norms)
    wanted = reference(qkv, heads, key_heads, cos, sin, norms)
    grads = [torch.randn_like(out) for out in wanted]
    grads[2] = grads[2][..., :1].expand_as(grads[2])  # as a sum's gradient is
    inputs = [qkv, *weights]
    ours = [*ours, *torch.autograd.grad(ours, inputs, grads)]
    wanted = [*wanted, *torch.autograd.grad(wanted, inputs, grads)]
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


compare(4, 2, 32, True, False)
compare(6, 1, 24, True, True)
compare(9, 3, 16, False, False)
print("same")
"""


@pytest.mark.slow
def test_heads_and_their_gradients_are_those_of_plain_torch():
    run_interpreted(PROGRAM)
