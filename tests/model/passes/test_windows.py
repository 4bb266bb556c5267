"""Sliding windows in packed attention: the Triton kernels, in the interpreter, and plain torch.

Both are compared with a dense mask: values and gradients.
"""

from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted
from test_row_attention import dense_attention, dense_mask, make_segments

from postgrad.model.passes.packing import make_packing
from postgrad.model.passes.row_attention import make_padded_segments, padded_segment_attention

# (shared tokens, own tokens of each row)
BUNDLES = [(70, (5, 80)), (0, (30,)), (130, (129, 64))]


def make_inputs(tokens, heads=2, key_heads=1, width=16):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(tokens, h, width, generator=generator).requires_grad_()
        for h in (heads, key_heads, key_heads)
    )


def compare(attend, bundles, window):
    """Compare outputs and gradients of `attend(q, k, v, segments)` with a dense mask."""
    segments, tokens = make_segments(bundles)
    inputs = make_inputs(tokens)
    mask = dense_mask(segments, tokens)
    if window:
        positions = make_packing(segments).positions
        mask &= positions[:, None] - positions[None, :] < window
    expected = dense_attention(*inputs, mask)
    grad_out = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected_grads = torch.autograd.grad(expected, inputs, grad_out)
    actual = attend(*inputs, segments)
    grads = torch.autograd.grad(actual, inputs, grad_out)
    for a, b in zip((actual, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_positions_continue_from_the_prompt_to_each_response():
    segments, _ = make_segments([(2, [3, 1]), (0, [2])])
    assert make_packing(segments).positions.tolist() == [0, 1, 2, 3, 4, 2, 0, 1]


@pytest.mark.parametrize("window", [0, 1, 3, 64, 65, 100, 1000])
def test_plain_torch_applies_the_window(window):
    compare(
        lambda q, k, v, segments: padded_segment_attention(
            q, k, v, make_padded_segments(segments), None, window
        ),
        BUNDLES,
        window,
    )


PROGRAM = """
import sys
import torch
sys.path[:0] = sys.argv[1:]
import test_windows as t
from postgrad.model.kernels.packed_attention import packed_attention
from postgrad.model.passes.packing import make_packing

# The last bundle has more keys than a chunk of 512.
for bundles, window in ((t.BUNDLES, 0), (t.BUNDLES, 3), (t.BUNDLES, 65), ([(300, (290, 5))], 80)):
    t.compare(
        lambda q, k, v, segments: packed_attention(
            q, k, v, make_packing(segments), q.shape[2] ** -0.5, window
        ),
        bundles,
        window,
    )
print("same")
"""


@pytest.mark.slow
def test_the_kernels_apply_the_window():
    folder = Path(__file__).parent
    run_interpreted(PROGRAM, folder, folder.parents[1], warnings="error::RuntimeWarning")
