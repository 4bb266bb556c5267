"""Tensors and weights in the object store: read when their numbers are, sent by reference."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tiny_runs import random_batch

from postgrad.cluster import stored
from postgrad.cluster.stored import (
    StoredTensor,
    TensorStore,
    WeightsRef,
    decode_call,
    store_weights,
)
from postgrad.cluster.wire import encode
from postgrad.errors import RunError
from postgrad.training.guard import _with_last_block_negated
from postgrad.types import Batch

COLUMN = torch.arange(6, dtype=torch.float32)


class LostError(Exception):
    """The error of an object whose owner is gone."""


class FakeRay:
    """An object store in this process, which counts what the driver puts and gets."""

    class exceptions:
        RayError = LostError

    def __init__(self) -> None:
        self.objects: list[bytes] = []
        self.fetched: list[int] = []
        self.is_open = True
        self.is_lost = False

    def is_initialized(self) -> bool:
        return self.is_open

    def put(self, data: bytes) -> int:
        self.objects.append(data)
        return len(self.objects) - 1

    def get(self, reference: int, timeout: float | None) -> bytes:
        self.fetched.append(reference)
        if self.is_lost or reference >= len(self.objects):
            raise LostError("the owner has died")
        return self.objects[reference]


@pytest.fixture
def ray(monkeypatch) -> FakeRay:
    monkeypatch.setattr(stored, "MIN_BYTES", 1)
    return FakeRay()


@pytest.fixture
def store(ray) -> TensorStore:
    return TensorStore(ray, 1.0)


def column_of(store: TensorStore, ray: FakeRay) -> Any:
    """Return a column as a worker's result has it."""
    reference = ray.put(encode(COLUMN))
    result = encode(COLUMN, lambda value: {"part": 0, "shape": [6], "dtype": "float32"})
    return store.decode_result(result, [reference])


def received(store: TensorStore, ray: FakeRay, value: Any) -> Any:
    """Return what a worker gets if the driver sends a value."""
    data, parts = store.encode_call(value)
    return decode_call(data, [ray.objects[part] for part in parts])[0]


def test_shape_and_type_are_known_without_the_numbers(ray, store):
    column = column_of(store, ray)
    assert isinstance(column, torch.Tensor)
    assert len(column) == column.numel() == 6
    assert column.dtype == torch.float32
    batch = random_batch(1)
    batch.tokens["own"] = torch.zeros(batch.num_tokens)
    with pytest.raises(ValueError, match="entries"):
        batch.tokens["stored"] = column
    assert len(ray.fetched) == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda c: c + 1,
        lambda c: 1 - c,
        lambda c: -c,
        lambda c: c.exp(),
        lambda c: torch.cat([COLUMN, c]),
        lambda c: torch.where(COLUMN > 2, c, 0.0),
        lambda c: COLUMN[c.long()],
        lambda c: c[torch.tensor([1, 2])],
        lambda c: c.double().mean(),
        lambda c: c.to("cpu"),
        lambda c: torch.tensor(c.tolist()),
        lambda c: torch.from_numpy(np.asarray(c)),
        lambda c: torch.tensor(pa.array(c.cpu().numpy()).to_pylist()),
        lambda c: c.new_zeros(2),
    ],
)
def test_whatever_reads_the_numbers_gets_them(ray, store, use):
    column = column_of(store, ray)
    result = use(column)
    assert type(result) is torch.Tensor
    assert torch.equal(result, use(COLUMN))
    use(column)
    assert len(ray.fetched) == 1


def test_a_column_that_nobody_read_is_sent_by_reference(ray, store):
    column = column_of(store, ray)
    assert torch.equal(received(store, ray, {"a": column})["a"], COLUMN)
    assert len(ray.fetched) == 0
    assert len(ray.objects) == 1
    column.sum()
    assert torch.equal(received(store, ray, column), COLUMN)
    assert len(ray.objects) == 1, "the workers still have it"


def test_a_column_that_was_changed_is_sent_as_it_is(ray, store):
    column = column_of(store, ray)
    column[2] = 7.0
    assert received(store, ray, column).tolist() == [0, 1, 7, 3, 4, 5]
    column.numpy()[3] = 8.0  # which torch cannot notice
    assert received(store, ray, column).tolist() == [0, 1, 7, 8, 4, 5]


def test_rows_of_another_order_are_fetched_and_sent(ray, store):
    batch = random_batch(1)
    values = torch.rand(batch.num_tokens)
    reference = ray.put(encode(values))
    placed = StoredTensor.make([batch.num_tokens], values.dtype, reference, lambda: values)
    batch.tokens["values"] = placed
    expected = Batch(batch.prompt, batch.response, {"values": values}, {}).select([3, 0])
    assert torch.equal(batch.select([3, 0]).tokens["values"], expected.tokens["values"])
    sent = received(store, ray, batch.select([3, 0]))
    assert torch.equal(sent.tokens["values"], expected.tokens["values"])


def test_the_driver_puts_a_column_once_while_it_is_used(ray, store):
    column = COLUMN + 1
    for _ in range(3):
        assert torch.equal(received(store, ray, column), column)
    assert len(ray.objects) == 1
    for _ in range(stored.KEPT_CALLS):
        store.encode_call(None)
    assert torch.equal(received(store, ray, column), column)
    assert len(ray.objects) == 2


def test_a_column_whose_worker_died_ends_the_run(ray, store):
    column = column_of(store, ray)
    ray.objects.clear()
    with pytest.raises(RunError, match="lost"):
        column.sum()


def test_a_column_is_not_read_after_the_run(ray, store):
    column = column_of(store, ray)
    ray.is_open = False  # ray.get would start a cluster
    with pytest.raises(RunError, match="before the run ended"):
        column.sum()
    assert len(ray.fetched) == 0


# ---- weights: parts of a bounded size, and readers that hold one of them

WEIGHTS = {
    "embed.weight": torch.arange(16.0).view(4, 4),
    "layers.0.norm.weight": torch.ones(4),
    "layers.0.up.weight": torch.full((2, 4), 2.0),
    "layers.1.norm.weight": torch.ones(4),
    "layers.1.up.weight": torch.full((2, 4), 3.0),
    "norm.weight": torch.zeros(4),
}


@pytest.fixture
def weights(ray, monkeypatch):
    monkeypatch.setattr(stored, "MAX_PART_BYTES", 48)  # 12 numbers
    return WeightsRef(ray, store_weights(ray, WEIGHTS.items()))


def test_parts_have_a_largest_size_and_the_order_of_the_model(weights):
    assert [names for names, _ in weights.parts] == [
        ["embed.weight"],  # larger than a part
        ["layers.0.norm.weight", "layers.0.up.weight"],
        ["layers.1.norm.weight", "layers.1.up.weight"],
        ["norm.weight"],
    ]


def test_a_reader_fetches_each_part_once_and_holds_one(weights):
    for name, tensor in weights.items():
        assert torch.equal(tensor, WEIGHTS[name])
        assert len(weights._tensors) <= 2
    assert weights.ray.fetched == [0, 1, 2, 3] and len(weights) == len(WEIGHTS)


def test_weights_with_other_values_of_one_block_fetch_its_part_only(weights):
    negated = _with_last_block_negated(weights)  # type: ignore[arg-type]
    assert set(weights.ray.fetched) == {2}
    for name, tensor in negated.items():
        sign = -1 if name == "layers.1.up.weight" else 1
        assert torch.equal(tensor, sign * WEIGHTS[name]), name
    assert torch.equal(weights["layers.1.up.weight"], WEIGHTS["layers.1.up.weight"])


def test_weights_of_a_worker_that_died_end_the_run_with_one_line(weights):
    weights.ray.is_lost = True
    with pytest.raises(RunError, match="lost"):
        weights["norm.weight"]
