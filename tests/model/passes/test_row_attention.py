"""Attention over packed tokens without kernels, against one dense mask: values, gradients, and what shares a key's gradient."""

import pytest
import torch

from postgrad.model.passes.row_attention import make_padded_segments, padded_segment_attention


def segments_of(bundles):
    """Segments as layout.make_packed_micro_batches lays them out: (shared length, own lengths) of each bundle."""
    out, at = [], 0
    for shared, owns in bundles:
        begin, end = at, at + shared + sum(owns)
        if shared:
            out.append((begin, begin + shared, 0, 0, end))
        at += shared
        for own in owns:
            out.append((at, at + own, begin, begin + shared, at + own))
            at += own
    return out, at


def visible(segments, tokens):
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, end, shared_start, shared_end, _ in segments:
        mask[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        mask[start:end, shared_start:shared_end] = True
    return mask


def dense(q, k, v, mask):
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
    segments, tokens = segments_of(bundles)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(tokens, h, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for h in (heads, 2, 2)
    ]
    share = torch.randn(tokens, heads, 4, generator=generator, dtype=torch.float64)
    ours, theirs = (
        padded_segment_attention(*inputs, make_padded_segments(segments), None),
        dense(*inputs, visible(segments, tokens)),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    mine = torch.autograd.grad((ours * share).sum(), inputs)
    for a, b in zip(mine, torch.autograd.grad((theirs * share).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_rows_of_different_lengths_are_in_separate_groups():
    segments, tokens = segments_of([(0, [100]), (0, [10]), (0, [9]), (0, [9])])
    padded = make_padded_segments(segments)
    assert [(group.num_rows, group.num_queries) for group in padded.groups] == [(1, 100), (3, 10)]
    assert len(padded.query_tokens) < 1.1 * tokens + 3


def test_a_shared_key_sums_its_gradient_in_float32():
    """256 responses each add one: bfloat16 sums would stop growing at 256 ulps of a half."""
    segments, tokens = segments_of([(1, [1] * 300)])
    key, query = torch.zeros(2, tokens, 1, 16, dtype=torch.bfloat16)
    value = torch.zeros(tokens, 1, 16, dtype=torch.bfloat16).requires_grad_()
    padded_segment_attention(
        query, key, value, make_padded_segments(segments), None
    ).sum().backward()
    # The prompt sees itself once (1); each response looks at the prompt and itself in equal parts.
    torch.testing.assert_close(
        value.grad[0], torch.full((1, 16), 1 + 300 / 2, dtype=torch.bfloat16)
    )
