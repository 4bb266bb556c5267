"""Packed attention in plain torch against one dense mask: values and gradients."""

import pytest
import torch

from postgrad.model.passes.row_attention import make_padded_segments, padded_segment_attention


def make_segments(bundles):
    """Return the segments and the number of tokens of (shared length, own lengths) bundles."""
    segments = []
    begin = 0
    for shared, owns in bundles:
        shared_start = begin
        shared_end = begin + shared
        if shared:
            segments.append((shared_start, shared_end, 0, 0, shared_end + sum(owns)))
        begin = shared_end
        for own in owns:
            segments.append((begin, begin + own, shared_start, shared_end, begin + own))
            begin += own
    return segments, begin


def dense_mask(segments, tokens):
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, end, shared_start, shared_end, _ in segments:
        mask[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        mask[start:end, shared_start:shared_end] = True
    return mask


def dense_attention(q, k, v, mask):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


SHAPES = {
    "one row": [(0, [5])],
    "equal rows without a prompt": [(0, [4]), (0, [4]), (0, [4])],
    "a group": [(6, [3, 3, 3])],
    "groups of all sizes": [(7, [3, 9, 1]), (0, [5, 2]), (1, [1]), (12, [4, 4, 8, 2, 30])],
}


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("bundles", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients_equal_a_dense_mask(bundles, heads):
    segments, tokens = make_segments(bundles)
    generator = torch.Generator().manual_seed(0)

    def draw(num_heads):
        return torch.randn(tokens, num_heads, 4, generator=generator, dtype=torch.float64)

    inputs = [draw(num_heads).requires_grad_() for num_heads in (heads, 2, 2)]
    grad_out = draw(heads)
    actual = padded_segment_attention(*inputs, make_padded_segments(segments), None)
    expected = dense_attention(*inputs, dense_mask(segments, tokens))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    actual_grads = torch.autograd.grad((actual * grad_out).sum(), inputs)
    expected_grads = torch.autograd.grad((expected * grad_out).sum(), inputs)
    for a, b in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_rows_of_different_lengths_are_in_separate_groups():
    segments, tokens = make_segments([(0, [100]), (0, [10]), (0, [9]), (0, [9])])
    padded = make_padded_segments(segments)
    assert [(group.num_rows, group.num_queries) for group in padded.groups] == [(1, 100), (3, 10)]
    assert len(padded.query_tokens) < 1.1 * tokens + 3


def test_a_shared_key_sums_its_gradient_in_float32():
    """Each of 300 responses adds a half; bfloat16 sums would stop growing at 128."""
    segments, tokens = make_segments([(1, [1] * 300)])
    key, query = torch.zeros(2, tokens, 1, 16, dtype=torch.bfloat16)
    value = torch.zeros(tokens, 1, 16, dtype=torch.bfloat16).requires_grad_()
    out = padded_segment_attention(query, key, value, make_padded_segments(segments), None)
    out.sum().backward()
    # The prompt attends to itself (1); each response weighs the prompt and itself equally.
    expected = torch.full((1, 16), 1 + 300 / 2, dtype=torch.bfloat16)
    torch.testing.assert_close(value.grad[0], expected)
