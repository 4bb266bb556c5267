"""The cursor: each index once an epoch, resumable anywhere, retired indices left out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.data.cursor import Cursor
from postgrad.errors import ConfigError, RunError

sizes = st.integers(1, 30)
seeds = st.integers(0, 2**63)


def test_without_shuffle_in_order_across_epochs():
    cursor = Cursor(5, seed=0, shuffle=False)
    assert [cursor.take(3), cursor.take(3), cursor.take(0), cursor.take(4)] == [
        [0, 1, 2],
        [3, 4, 0],
        [],
        [1, 2, 3, 4],
    ]
    assert cursor.epoch == 2.0
    assert (cursor.take(1), cursor.epoch) == ([0], 2.2)


def test_golden_order():
    """Must never change: a resumed run continues in this order."""
    cursor = Cursor(8, seed=3)
    assert [cursor.take(8), cursor.take(8)] == [[3, 1, 5, 6, 7, 4, 0, 2], [4, 3, 6, 2, 7, 0, 5, 1]]


def test_order_follows_from_seed_and_epoch():
    orders = [tuple(Cursor(50, seed).take(50)) for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    cursor = Cursor(50)
    assert cursor.take(50) != cursor.take(50)


@settings(max_examples=60, deadline=None)
@given(sizes, seeds, st.booleans(), st.lists(st.integers(0, 30), max_size=20))
def test_each_index_once_an_epoch(size: int, seed: int, shuffle: bool, takes: list[int]):
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
    """Taking, retiring, saving as JSON and going on elsewhere is the same as never stopping."""
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
def test_retired_are_left_out_and_the_others_still_come_once(
    data: st.DataObject, size: int, seed: int
):
    retired = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    cursor, left = Cursor(size, seed), size - len(retired)
    cursor.take(size)
    cursor.retire(retired)
    for _ in range(3):
        assert sorted(cursor.take(left)) == sorted(set(range(size)) - retired)


def test_too_few_items():
    with pytest.raises(
        ConfigError,
        match=r"6 problems a step wanted, the data hold 5; set training.problems_per_step=5 or less",
    ):
        Cursor(5).take(6)
    cursor = Cursor(5)
    cursor.retire([1, 1, 2])
    assert len(cursor.take(3)) == 3
    with pytest.raises(
        RunError, match=r"4 problems a step wanted, 3 of 5 are left, the others are retired"
    ):
        cursor.take(4)
    with pytest.raises(ConfigError, match="no problems"):
        Cursor(0)
    with pytest.raises(IndexError, match="index 5"):
        cursor.retire([5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_items": 6},
            "num_items is 5 here and 6 in the checkpoint.* give data.train as it was",
        ),
        ({"seed": 1}, "seed is 0 here and 1 in the checkpoint"),
        (
            {"shuffle": False},
            "shuffle is True here and False in the checkpoint.* give data.shuffle as it was",
        ),
        ({"position": 6}, "damaged"),
        ({"epoch": -1}, "damaged"),
        ({"retired": [9]}, "damaged"),
        ({"other": 1}, "differs at 'other'"),
    ],
)
def test_refuses_a_state_that_does_not_fit(change: dict[str, object], message: str):
    cursor = Cursor(5)
    cursor.take(2)
    before = cursor.state()
    with pytest.raises(ConfigError, match=message):
        cursor.load(cursor.state() | change)
    assert cursor.state() == before
