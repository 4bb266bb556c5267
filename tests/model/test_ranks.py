"""How rows, requests and metrics are divided over ranks and put together again; no processes needed."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import random_batch

from postgrad.cluster.ray_backend import merged, share_requests
from postgrad.model.policy import MetricAccumulator
from postgrad.model.ranks import UNEVEN, divide
from postgrad.rollout.engine import Request
from postgrad.types import Batch, Trajectory


def rows(lengths: list[tuple[int, int]]) -> Batch:
    """Rows of (prompt, response length); rows of one prompt length have the same prompt."""
    return Batch.of([Trajectory("p", [1] * p, [2] * r, group=p) for p, r in lengths])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans())
def test_every_row_is_computed_once_and_units_stay_together(seed, size, paired):
    batch = random_batch(seed, groups=5, samples=4)
    row_groups = [i // 2 for i in range(len(batch))] if paired else None
    shares = divide(batch, row_groups, size)
    assert len(shares) == size and sorted(row for share in shares for row in share) == list(
        range(len(batch))
    )
    assert shares == divide(batch, row_groups, size), "every rank must come to the same division"
    if row_groups is not None:
        assert all(
            len({i for i, share in enumerate(shares) for row in share if row_groups[row] == unit})
            == 1
            for unit in set(row_groups)
        )


def test_lengths_are_balanced():
    draw = random.Random(1)
    batch = rows([(4, draw.randint(1, 400)) for _ in range(64)])
    loads = [
        sum(4 + int(batch.response.lengths[row]) for row in share)
        for share in divide(batch, None, 4)
    ]
    assert max(loads) <= UNEVEN * sum(loads) / 4
    assert max(loads) < 0.7 * sum(
        sorted((4 + n for n in batch.response.lengths.tolist()), reverse=True)[:16]
    ), "as a plain cut could be"


def test_rows_of_one_prompt_stay_together_unless_that_unbalances():
    even = rows([(3, 5)] * 4 + [(4, 4)] * 4)
    assert divide(even, None, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [len(share) for share in divide(rows([(3, 5)] * 8), None, 2)] == [4, 4]
    assert divide(rows([(3, 5)]), None, 3) == [[0], [], []]
    assert divide(rows([(3, 5)]).select([]), None, 2) == [[], []]


def test_requests_are_shared_whole_by_their_number_of_continuations():
    requests = [Request([1], list(range(n))) for n in (8, 1, 1, 2, 4)]
    shares = share_requests(requests, 2)
    assert shares == [[0], [1, 2, 3, 4]]
    assert merged([([0, 2], ["a", "c"]), ([1], ["b"])]) == ["a", "b", "c"]
    assert share_requests(requests[:1], 3) == [[0], [], []]


@pytest.mark.parametrize("cut", [0, 2, 5])
def test_the_tallies_of_parts_are_the_tally_of_the_whole(cut):
    values, mask = (
        torch.tensor([1.0, -2.0, 4.0, 8.0, 0.5]),
        torch.tensor([True, False, True, True, True]),
    )

    def metrics(part: slice) -> MetricAccumulator:
        out = MetricAccumulator()
        if len(values[part]):
            out.mean("mean", values[part], mask[part])
            out.peak("peak", values[part], mask[part])
            out.total("total", values[part].sum())
        return out

    whole = metrics(slice(None)).result()
    assert (
        MetricAccumulator.merge(
            [metrics(slice(0, cut)).to_dict(), metrics(slice(cut, None)).to_dict()]
        ).result()
        == whole
    )
    assert whole == {"mean": 13.5 / 4, "total": 11.5, "peak": 8.0}
