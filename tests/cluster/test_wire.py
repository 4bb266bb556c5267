"""What crosses a process boundary arrives as it was, or is refused; nothing that arrives can run."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import random_batch

from postgrad.cluster.wire import decode, encode
from postgrad.config.schema import ModelConfig
from postgrad.model.views import FULL, after
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


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a, b)
        )
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_everything_arrives_as_it_was(value):
    assert same(decode(encode(value)), value)


def test_numbers_that_json_does_not_know():
    there = decode(encode([math.inf, -math.inf, math.nan, 2**70, -0.0, 1e-320]))
    assert there[:2] == [math.inf, -math.inf] and math.isnan(there[2]) and there[3] == 2**70
    assert math.copysign(1, there[4]) == -1 and there[5] == 1e-320


@pytest.mark.parametrize("seed", [1, 2])
def test_a_batch_arrives_with_all_its_columns(seed):
    batch = random_batch(seed)
    batch.rows["text"] = [f"row {i} ä" for i in range(len(batch))]
    batch.rows["reward"] = torch.arange(len(batch)) / 3
    batch.tokens["wide"] = torch.randn(batch.num_tokens, 2)
    there = decode(encode(["x", batch]))[1]
    assert (
        isinstance(there, Batch)
        and there.rows.keys() == batch.rows.keys()
        and there.tokens.keys() == batch.tokens.keys()
    )
    for name in batch.tokens:
        assert same(there.tokens[name], batch.tokens[name]), name
    for name in batch.rows:
        assert same(there.rows[name], batch.rows[name]), name
    assert same(there.response.values, batch.response.values) and same(
        there.prompt.lengths, batch.prompt.lengths
    )


def test_an_empty_batch_arrives():
    there = decode(encode(random_batch(1).select([])))
    assert len(there) == 0 and "advantages" in there.tokens


def test_a_part_of_a_tensor_travels_without_the_rest():
    large = torch.arange(100_000)
    assert len(encode(large[:3])) < 1000 and same(decode(encode(large[:3])), large[:3])


def test_the_sender_keeps_its_tensor():
    mine = torch.zeros(3, requires_grad=True)
    there = decode(encode(mine))
    with torch.no_grad():
        there += 1
    assert mine.sum().item() == 0.0 and not there.requires_grad


class Lambda:
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Lambda(),
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
def test_anything_else_is_refused_by_its_type(value):
    with pytest.raises(TypeError, match=r"cannot cross a process boundary"):
        encode(["deep", {"inside": [value]}])


def test_a_stranger_with_a_known_name_is_refused():
    import dataclasses

    reject_reason = dataclasses.make_dataclass("Request", [("prompt", list), ("seeds", list)])(
        [1], [2]
    )
    with pytest.raises(TypeError, match="cannot cross"):
        encode(reject_reason)


@pytest.mark.parametrize("name", ["Popen", "os.system", "Config", "Batch"])
def test_what_arrives_can_only_be_one_of_the_known_objects(name):
    plain = json.dumps({"object": name, "fields": {"args": ["touch", "/tmp/x"]}}).encode()
    with pytest.raises(KeyError):
        decode(len(plain).to_bytes(8, "little") + plain)
