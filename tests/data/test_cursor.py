"""The cursor: each index once per epoch, resumable anywhere, retired indices left out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused

from postgrad.data.problem_queue import Cursor
from postgrad.errors import RunError

sizes = st.integers(1, 30)
seeds = st.integers(0, 2**63)


def test_without_shuffle_in_order_across_epochs():
    cursor = Cursor(5, seed=0, shuffle=False)
    taken = [cursor.take(n) for n in (3, 3, 0, 4)]
    assert taken == [[0, 1, 2], [3, 4, 0], [], [1, 2, 3, 4]]
    assert cursor.epoch == 2.0
    assert (cursor.take(1), cursor.epoch) == ([0], 2.2)


def test_golden_order():
    """Must never change: a resumed run continues in this order."""
    cursor = Cursor(8, seed=3)
    assert [cursor.take(8), cursor.take(8)] == [[3, 1, 5, 6, 7, 4, 0, 2], [4, 3, 6, 2, 7, 0, 5, 1]]


def test_order_depends_on_seed_and_epoch_only():
    orders = [tuple(Cursor(50, seed).take(50)) for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    cursor = Cursor(50)
    assert cursor.take(50) != cursor.take(50)


@settings(max_examples=60, deadline=None)
@given(sizes, seeds, st.booleans(), st.lists(st.integers(0, 30), max_size=20))
def test_each_index_comes_once_per_epoch(size: int, seed: int, shuffle: bool, takes: list[int]):
    cursor = Cursor(size, seed, shuffle)
    taken = [i for n in takes for i in cursor.take(min(n, size))]
    for start in range(0, len(taken) - size + 1, size):
        assert sorted(taken[start : start + size]) == list(range(size))
    assert cursor.epoch == pytest.approx(len(taken) / size)


@settings(max_examples=60, deadline=None)
@given(
    st.data(), sizes, seeds, st.booleans(), st.lists(st.integers(1, 30), min_size=1, max_size=12)
)
def test_resumes_at_any_point(
    data: st.DataObject, size: int, seed: int, shuffle: bool, takes: list[int]
):
    """A cursor restored from JSON continues exactly as one that was never saved."""
    stop = data.draw(st.integers(0, len(takes)))
    retire_at = data.draw(st.integers(0, len(takes)))
    retired = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    limit = size - len(retired)
    one, other = Cursor(size, seed, shuffle), Cursor(size, seed, shuffle)
    for i, n in enumerate(takes):
        if i == stop:
            state = json.loads(json.dumps(other.state()))
            other = Cursor(size, seed, shuffle)
            other.load(state)
        if i == retire_at:
            one.retire(retired)
            other.retire(retired)
        assert one.take(min(n, limit)) == other.take(min(n, limit))
        assert one.state() == other.state()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 30), seeds)
def test_retired_indices_are_left_out_and_the_others_come_once(
    data: st.DataObject, size: int, seed: int
):
    retired = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    cursor, left = Cursor(size, seed), size - len(retired)
    cursor.take(size)
    cursor.retire(retired)
    for _ in range(3):
        assert sorted(cursor.take(left)) == sorted(set(range(size)) - retired)


def test_too_few_items():
    with refused("too_large", "training.problems_per_step", shows="=5"):
        Cursor(5).take(6)
    cursor = Cursor(5)
    cursor.retire([1, 1, 2])
    assert len(cursor.take(3)) == 3
    with pytest.raises(RunError, match="3 of 5"):
        cursor.take(4)
    with refused("missing", "data.train"):
        Cursor(0)
    with pytest.raises(IndexError, match="index 5"):
        cursor.retire([5])


@pytest.mark.parametrize(
    ("change", "code", "at"),
    [
        ({"num_items": 6}, "changed", "data.train"),
        ({"seed": 1}, "changed", "seed"),
        ({"shuffle": False}, "changed", "data.shuffle"),
        ({"position": 6}, "damaged", ""),
        ({"epoch": -1}, "damaged", ""),
        ({"retired": [9]}, "damaged", ""),
        ({"other": 1}, "changed", ""),
    ],
)
def test_state_of_other_data_is_refused(change: dict[str, object], code: str, at: str):
    cursor = Cursor(5)
    cursor.take(2)
    before = cursor.state()
    with refused(code, at):
        cursor.load(cursor.state() | change)
    assert cursor.state() == before
