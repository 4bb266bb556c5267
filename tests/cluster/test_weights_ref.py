"""Weights in Ray's object store: parts of a bounded size, and readers that hold one of them."""

import pytest
import torch

from postgrad.cluster import weights_ref
from postgrad.cluster.weights_ref import WeightsRef, store_weights
from postgrad.errors import RunError
from postgrad.training.guard import _with_last_block_negated


class FakeRay:
    """An object store; counts how often each object is fetched."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self) -> None:
        self.objects: list[bytes] = []
        self.fetched: list[int] = []
        self.is_lost = False

    def put(self, value: bytes) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def get(self, reference: int) -> bytes:
        self.fetched.append(reference)
        if self.is_lost:
            raise self.exceptions.RayError("the owner has died")
        return self.objects[reference]


WEIGHTS = {
    "embed.weight": torch.arange(16.0).view(4, 4),
    "layers.0.norm.weight": torch.ones(4),
    "layers.0.up.weight": torch.full((2, 4), 2.0),
    "layers.1.norm.weight": torch.ones(4),
    "layers.1.up.weight": torch.full((2, 4), 3.0),
    "norm.weight": torch.zeros(4),
}


@pytest.fixture
def stored(monkeypatch):
    monkeypatch.setattr(weights_ref, "MAX_PART_BYTES", 48)  # 12 numbers
    ray = FakeRay()
    return WeightsRef(ray, store_weights(ray, WEIGHTS.items()))


def test_parts_have_a_largest_size_and_the_order_of_the_model(stored):
    assert [names for names, _ in stored.parts] == [
        ["embed.weight"],  # larger than a part
        ["layers.0.norm.weight", "layers.0.up.weight"],
        ["layers.1.norm.weight", "layers.1.up.weight"],
        ["norm.weight"],
    ]


def test_a_reader_fetches_each_part_once_and_holds_one(stored):
    for name, tensor in stored.items():
        assert torch.equal(tensor, WEIGHTS[name])
        assert len(stored._tensors) <= 2
    assert stored.ray.fetched == [0, 1, 2, 3] and len(stored) == len(WEIGHTS)


def test_weights_with_other_values_of_one_block_fetch_its_part_only(stored):
    negated = _with_last_block_negated(stored)  # type: ignore[arg-type]
    assert set(stored.ray.fetched) == {2}
    for name, tensor in negated.items():
        sign = -1 if name == "layers.1.up.weight" else 1
        assert torch.equal(tensor, sign * WEIGHTS[name]), name
    assert torch.equal(stored["layers.1.up.weight"], WEIGHTS["layers.1.up.weight"])


def test_weights_of_a_worker_that_died_end_the_run_with_one_line(stored):
    stored.ray.is_lost = True
    with pytest.raises(RunError, match="lost"):
        stored["norm.weight"]
