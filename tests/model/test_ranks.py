"""How rows, requests and metrics are divided over ranks and merged again; no processes needed."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import random_batch

from postgrad.cluster.actor_pool import merge_results, split_requests
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.parallel.ranks import MAX_IMBALANCE, divide_rows
from postgrad.rollout.engine import Request
from postgrad.types import Batch, Trajectory


def make_batch(lengths: list[tuple[int, int]]) -> Batch:
    """Rows of (prompt, response length); rows of one prompt length have the same prompt."""
    return Batch.of([Trajectory("p", [1] * p, [2] * r, group=p) for p, r in lengths])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans())
def test_every_row_is_computed_once_and_row_groups_stay_together(seed, size, paired):
    batch = random_batch(seed, groups=5, samples=4)
    row_groups = [i // 2 for i in range(len(batch))] if paired else None
    shares = divide_rows(batch, row_groups, size)
    assert len(shares) == size
    assert sorted(row for share in shares for row in share) == list(range(len(batch)))
    assert shares == divide_rows(batch, row_groups, size), "every rank computes the same division"
    if row_groups is not None:
        rank_of = {row: rank for rank, share in enumerate(shares) for row in share}
        ranks_of_group: dict[int, set[int]] = {}
        for row, group in enumerate(row_groups):
            ranks_of_group.setdefault(group, set()).add(rank_of[row])
        assert all(len(ranks) == 1 for ranks in ranks_of_group.values())


def test_tokens_are_balanced_over_ranks():
    draw = random.Random(1)
    batch = make_batch([(4, draw.randint(1, 400)) for _ in range(64)])
    costs = [4 + length for length in batch.response.lengths.tolist()]
    loads = [sum(costs[row] for row in share) for share in divide_rows(batch, None, 4)]
    assert max(loads) <= MAX_IMBALANCE * sum(loads) / 4
    worst_cut = sum(sorted(costs, reverse=True)[:16])
    assert max(loads) < 0.7 * worst_cut


def test_rows_of_one_prompt_stay_together_unless_ranks_become_unbalanced():
    balanced = make_batch([(3, 5)] * 4 + [(4, 4)] * 4)
    assert divide_rows(balanced, None, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    one_prompt = make_batch([(3, 5)] * 8)
    assert [len(share) for share in divide_rows(one_prompt, None, 2)] == [4, 4]
    one_row = make_batch([(3, 5)])
    assert divide_rows(one_row, None, 3) == [[0], [], []]
    assert divide_rows(one_row.select([]), None, 2) == [[], []]


def test_requests_are_shared_by_their_number_of_samples():
    requests = [Request([1], list(range(n))) for n in (8, 1, 1, 2, 4)]
    assert split_requests(requests, 2) == [[0], [1, 2, 3, 4]]
    assert split_requests(requests[:1], 3) == [[0], [], []]
    assert merge_results([([0, 2], ["a", "c"]), ([1], ["b"])]) == ["a", "b", "c"]


@pytest.mark.parametrize("cut", [0, 2, 5])
def test_merged_metrics_of_parts_equal_those_of_all_rows(cut):
    values = torch.tensor([1.0, -2.0, 4.0, 8.0, 0.5])
    mask = torch.tensor([True, False, True, True, True])

    def metrics(part: slice) -> MetricAccumulator:
        accumulator = MetricAccumulator()
        if len(values[part]):
            accumulator.mean("mean", values[part], mask[part])
            accumulator.peak("peak", values[part], mask[part])
            accumulator.total("total", values[part].sum())
        return accumulator

    parts = [metrics(slice(0, cut)).to_dict(), metrics(slice(cut, None)).to_dict()]
    expected = {"mean": 13.5 / 4, "total": 11.5, "peak": 8.0}
    assert metrics(slice(None)).result() == expected
    assert MetricAccumulator.merge(parts).result() == expected
