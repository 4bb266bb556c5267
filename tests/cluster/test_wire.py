"""Values sent to another process arrive unchanged or are refused; none can run code."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import random_batch
from vision_models import square

from postgrad.cluster.wire import decode, encode
from postgrad.config.schema import ModelConfig
from postgrad.model.port import FULL, after
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.types import Batch, Problem

TEXT = st.text(max_size=8) | st.sampled_from(["tensor", "batch", "object", "dict", "fields"])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 2, shape).to(dtype)
    return tensor.transpose(0, -1) if draw(st.booleans()) and len(shape) > 1 else tensor


OBJECTS = st.builds(
    Request,
    st.lists(st.integers(0, 9), max_size=4),
    st.lists(st.integers(0, 2**64 - 1), max_size=3),
)
OBJECTS |= st.builds(
    Completion,
    st.lists(st.integers(0, 9), max_size=4),
    st.lists(st.floats(allow_nan=False), max_size=4),
    st.sampled_from(["stop", "length"]),
)
OBJECTS |= st.builds(Sampling, st.floats(0, 2), st.integers(1, 99)) | st.sampled_from(
    [FULL, after(3), after(2, "final")]
)
VALUES = st.recursive(
    PLAIN | tensors() | OBJECTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


def is_same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a, b)
        )
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(is_same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_values_arrive_unchanged(value):
    assert is_same(decode(encode(value)), value)


def test_special_numbers_arrive_unchanged():
    decoded = decode(encode([math.inf, -math.inf, math.nan, 2**70, -0.0, 1e-320]))
    assert decoded[:2] == [math.inf, -math.inf] and math.isnan(decoded[2]) and decoded[3] == 2**70
    assert math.copysign(1, decoded[4]) == -1 and decoded[5] == 1e-320


@pytest.mark.parametrize("seed", [1, 2])
def test_batch_arrives_with_all_its_columns(seed):
    batch = random_batch(seed)
    batch.rows["text"] = [f"row {i} ä" for i in range(len(batch))]
    batch.rows["reward"] = torch.arange(len(batch)) / 3
    batch.tokens["wide"] = torch.randn(batch.num_tokens, 2)
    decoded = decode(encode(["x", batch]))[1]
    assert isinstance(decoded, Batch)
    assert decoded.rows.keys() == batch.rows.keys()
    assert decoded.tokens.keys() == batch.tokens.keys()
    for name in batch.tokens:
        assert is_same(decoded.tokens[name], batch.tokens[name]), name
    for name in batch.rows:
        assert is_same(decoded.rows[name], batch.rows[name]), name
    assert is_same(decoded.response.values, batch.response.values)
    assert is_same(decoded.prompt.lengths, batch.prompt.lengths)


def test_rows_of_a_group_share_their_picture():
    picture = square("red")
    decoded = decode(encode([Request([1], [2], images=(picture,)) for _ in range(2)]))
    (first,), (second,) = (request.images for request in decoded)
    assert first is second and first == picture and first.data == picture.data


def test_empty_batch_arrives():
    decoded = decode(encode(random_batch(1).select([])))
    assert len(decoded) == 0 and "advantages" in decoded.tokens


def test_slice_is_sent_without_the_rest_of_its_tensor():
    large = torch.arange(100_000)
    assert len(encode(large[:3])) < 1000 and is_same(decode(encode(large[:3])), large[:3])


def test_decoded_tensor_does_not_share_memory():
    sent = torch.zeros(3, requires_grad=True)
    decoded = decode(encode(sent))
    with torch.no_grad():
        decoded += 1
    assert sent.sum().item() == 0.0 and not decoded.requires_grad


class Unknown:
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Unknown(),
        {1, 2},
        b"bytes",
        np.float32(1.0),
        np.zeros(2),
        len,
        ModelConfig(),
        Problem("u", (), ""),
        1j,
        {1: "a"},
        {("a",): 1},
    ],
    ids=lambda value: type(value).__name__ + str(value)[:8],
)
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        encode(["deep", {"inside": [value]}])


def test_another_class_with_a_known_name_is_refused():
    import dataclasses

    other_class = dataclasses.make_dataclass("Request", [("prompt", list), ("seeds", list)])
    with pytest.raises(TypeError, match="Request"):
        encode(other_class([1], [2]))


@pytest.mark.parametrize("name", ["Popen", "os.system", "Config", "Batch"])
def test_unknown_objects_are_not_decoded(name):
    plain = json.dumps({"object": name, "fields": {"args": ["touch", "/tmp/x"]}}).encode()
    with pytest.raises(KeyError):
        decode(len(plain).to_bytes(8, "little") + plain)
