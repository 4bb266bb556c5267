"""Batch, the ragged table of trajectories: building, selecting, concatenating, extra columns."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from postgrad.problem import Problem
from postgrad.types import DEMONSTRATION, POLICY, TOOL, Batch, Columns, Ragged, Trajectory


def three_rows() -> Batch:
    """Returns rows with responses of 2, 0 and 3 tokens."""
    given = {"source": DEMONSTRATION, "finish": "given", "loss_mask": [True, False, True]}
    rows: list[tuple[str, list[int], list[int], list[float], dict[str, Any]]] = [
        ("a", [1, 2], [3, 4], [0.25, 0.5], {"behavior_logprobs": [-0.5, -1.0]}),
        ("b", [5], [], [], {"index": 1, "finish": "length"}),
        ("c", [6, 7, 8], [9, 10, 11], [1.0, 2.0, 3.0], {"group": 1} | given),
    ]
    notes = ("x", "y", None)
    made = []
    for level, (uid, prompt, response, judge, more) in enumerate(rows, start=1):
        columns = {"tokens": {"judge": judge}, "rows": {"level": level, "note": notes[level - 1]}}
        made.append(Trajectory(uid, prompt, response, **more, **columns))
    return Batch.of(made)


def test_of_flattens_rows_and_fills_the_standard_columns():
    batch = three_rows()
    assert len(batch) == 3
    assert batch.num_tokens == 5
    assert batch.prompt.values.tolist() == [1, 2, 5, 6, 7, 8]
    assert batch.prompt.lengths.tolist() == [2, 1, 3]
    assert batch.response.values.tolist() == [3, 4, 9, 10, 11]
    assert batch.response.lengths.tolist() == [2, 0, 3]
    assert batch.tokens["loss_mask"].tolist() == [True, True, True, False, True]
    assert batch.tokens["behavior_logprobs"].tolist() == [-0.5, -1.0, 0.0, 0.0, 0.0]
    assert batch.tokens["token_source"].tolist() == [POLICY] * 2 + [DEMONSTRATION] * 3
    assert batch.rows["uid"] == ["a", "b", "c"]
    assert batch.rows["finish"] == ["stop", "length", "given"]
    assert batch.rows["group"].tolist() == [0, 0, 1]
    assert batch.rows["index"].tolist() == [0, 1, 0]
    assert batch.rows["source"].tolist() == [POLICY, POLICY, DEMONSTRATION]
    assert batch.tokens["judge"].tolist() == [0.25, 0.5, 1.0, 2.0, 3.0]
    assert batch.rows["level"].tolist() == [1, 2, 3]
    assert batch.rows["note"] == ["x", "y", None]


def test_trajectories_are_the_rows_that_of_takes():
    batch = three_rows()
    kept = Trajectory("a", [1], [2, 3], kept_ids=[[2], [3, 5]])
    for one in (batch, Batch.of([kept, Trajectory("b", [1], [])])):
        again = Batch.of(one.trajectories())
        for name, column in (*one.tokens.items(), *one.rows.items()):
            other = again.tokens[name] if name in again.tokens else again.rows[name]
            assert type(other) is type(column)
            assert len(other) == len(column)
            for left, right in zip(column, other, strict=True):
                assert left == right if not isinstance(left, torch.Tensor) else left.equal(right)
        assert again.prompt.values.equal(one.prompt.values)
        assert again.response.lengths.equal(one.response.lengths)
    rows = batch.trajectories()
    rows[0].response = [3, 4, 9]
    with pytest.raises(ValueError, match="trajectory a"):
        Batch.of(rows)


def test_a_token_may_have_another_source_than_its_row():
    batch = Batch.of([Trajectory("a", [1], [2, 3, 4], token_source=[POLICY, TOOL, POLICY])])
    assert batch.tokens["token_source"].tolist() == [POLICY, TOOL, POLICY]
    assert batch.rows["source"].tolist() == [POLICY]


def test_row_index_expand_and_sum_tokens():
    batch = three_rows()
    assert batch.row_index.tolist() == [0, 0, 2, 2, 2]
    assert batch.expand(torch.tensor([10.0, 20.0, 30.0])).tolist() == [10, 10, 30, 30, 30]
    assert batch.sum_tokens(batch.tokens["judge"]).tolist() == [0.75, 0.0, 6.0]


def test_mask_from_spans_and_row_names():
    batch = three_rows()
    assert batch.mask([(1, 2), (0, 0), (0, 2)]).tolist() == [False, True, True, True, False]
    with pytest.raises(ValueError, match="shorter"):
        batch.mask([(0, 1)])
    assert batch.names == ["a/0/0", "b/0/1", "c/1/0"]


def test_select_takes_rows_in_the_given_order_with_every_column():
    batch = three_rows()
    batch.tokens["vector"] = torch.arange(10.0).view(5, 2)  # a column may have more dimensions
    picked = batch.select([2, 1, 0, 2])
    assert picked.rows["uid"] == ["c", "b", "a", "c"]
    assert picked.rows["note"] == [None, "y", "x", None]
    assert picked.prompt.values.tolist() == [6, 7, 8, 5, 1, 2, 6, 7, 8]
    assert picked.response.values.tolist() == [9, 10, 11, 3, 4, 9, 10, 11]
    assert picked.tokens["judge"].tolist() == [1, 2, 3, 0.25, 0.5, 1, 2, 3]
    vectors = picked.tokens["vector"].flatten().tolist()
    assert vectors == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert set(picked.tokens) == set(batch.tokens)
    assert set(picked.rows) == set(batch.rows)


def test_select_of_nothing_is_an_empty_batch_with_every_column():
    none = three_rows().select([])
    assert len(none) == 0
    assert none.num_tokens == 0
    assert "judge" in none.tokens
    assert none.rows["note"] == []


def test_select_copies_so_that_the_source_does_not_change():
    batch = three_rows()
    picked = batch.select([0, 1, 2])
    picked.tokens["judge"][0] = 99.0
    picked.tokens["new"] = torch.zeros(5)
    assert batch.tokens["judge"][0] == 0.25 and "new" not in batch.tokens


def test_concat_appends_the_rows_of_all_batches():
    one, two = three_rows(), three_rows().select([2])
    both = Batch.concat([one, two])
    assert both.rows["uid"] == ["a", "b", "c", "c"]
    assert both.response.values.tolist() == [3, 4, 9, 10, 11, 9, 10, 11]
    assert both.tokens["judge"].tolist() == [0.25, 0.5, 1, 2, 3, 1, 2, 3]
    assert both.rows["level"].tolist() == [1, 2, 3, 3]
    assert both.rows["note"] == ["x", "y", None, None]


def test_concat_refuses_batches_with_different_columns_and_names_the_column():
    one, two = three_rows(), three_rows()
    two.tokens["only_here"] = torch.zeros(5)
    with pytest.raises(ValueError, match="'only_here'"):
        Batch.concat([one, two])
    three, four = three_rows(), three_rows()
    del four.rows["level"]
    with pytest.raises(ValueError, match="'level'"):
        Batch.concat([three, four])


def test_a_column_of_the_wrong_length_is_refused_by_name_and_size():
    batch = three_rows()
    with pytest.raises(ValueError, match=r"'advantages' has 4 .* 5 token"):
        batch.tokens["advantages"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"'reward' has 5 .* 3 row"):
        batch.rows["reward"] = torch.zeros(5)


def test_a_missing_column_error_names_the_existing_ones():
    batch = three_rows()
    with pytest.raises(KeyError, match=r"token column 'advantage'.*behavior_logprobs"):
        batch.tokens["advantage"]
    with pytest.raises(KeyError, match=r"row column 'rewards'.*finish"):
        batch.rows["rewards"]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("loss_mask", {"loss_mask": [True]}),
        ("behavior_logprobs", {"behavior_logprobs": [0.0, 0.0, 0.0]}),
        ("token_source", {"token_source": [0]}),
        ("classmate", {"tokens": {"classmate": [0.0]}}),
    ],
)
def test_of_refuses_a_token_column_of_the_wrong_length_and_names_row_and_column(name, field):
    with pytest.raises(ValueError, match=rf"row-7.*{name}"):
        Batch.of([Trajectory("row-7", [1], [2, 3], **field)])


def test_of_refuses_token_columns_of_which_only_the_total_length_is_right():
    rows = [
        Trajectory("a", [1], [2, 3], token_source=[0]),
        Trajectory("b", [1], [2], token_source=[0, 0]),
    ]
    with pytest.raises(ValueError, match="token_source"):
        Batch.of(rows)


def test_of_refuses_a_column_that_only_some_rows_have():
    with pytest.raises(ValueError, match="'level'"):
        Batch.of([Trajectory("a", [1], [2], rows={"level": 1}), Trajectory("b", [1], [2])])
    with pytest.raises(ValueError, match="'judge'"):
        Batch.of([Trajectory("a", [1], [2], tokens={"judge": [1.0]}), Trajectory("b", [1], [2])])


def test_columns_behave_as_a_mapping():
    columns = Columns("token", 2, {"a": torch.zeros(2)})
    columns["b"] = [1, 2]
    assert sorted(columns) == ["a", "b"]
    assert "a" in columns
    assert len(columns) == 2
    del columns["a"]
    assert dict(columns) == {"b": [1, 2]}


def test_ragged_offsets_split_and_positions():
    ragged = Ragged.of([[1, 2], [], [3, 4, 5]])
    assert ragged.offsets.tolist() == [0, 2, 2, 5]
    assert [part.tolist() for part in ragged.split()] == [[1, 2], [], [3, 4, 5]]
    assert ragged.positions(torch.tensor([2, 1, 0, 2])).tolist() == [2, 3, 4, 0, 1, 2, 3, 4]


@pytest.mark.slow
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_select_then_concat_restores_the_batch(lengths, data):
    rows = [
        Trajectory(str(i), [i], list(range(n)), rows={"number": i}, tokens={"c": [float(i)] * n})
        for i, n in enumerate(lengths)
    ]
    batch = Batch.of(rows)
    cut = data.draw(st.integers(0, len(rows)))
    order = data.draw(st.permutations(range(len(rows))))
    joined = Batch.concat([batch.select(order[:cut]), batch.select(order[cut:])])
    back = joined.select(torch.tensor(order).argsort())
    assert back.rows["uid"] == batch.rows["uid"]
    assert back.response.values.tolist() == batch.response.values.tolist()
    assert torch.equal(back.tokens["c"], batch.tokens["c"])
    assert torch.equal(back.rows["number"], batch.rows["number"])
    assert torch.equal(back.tokens["c"], back.expand(back.rows["number"].float()))


def test_to_keeps_every_column():
    moved = three_rows().to("cpu")
    assert moved.rows["note"] == ["x", "y", None]
    assert moved.tokens["judge"].tolist() == [0.25, 0.5, 1, 2, 3]


def test_a_column_that_is_no_attribute_of_a_problem_is_named_with_its_place():
    problem = Problem("a", (), "4", extra={"topic": "sums"})
    with pytest.raises(AttributeError, match="ground_truth"):
        problem.answer  # noqa: B018
    with pytest.raises(AttributeError, match=r"problem\.extra\['topic'\]"):
        problem.topic  # noqa: B018
    assert not hasattr(problem, "__array__")
    assert pickle.loads(pickle.dumps(problem)) == copy.deepcopy(problem) == problem
