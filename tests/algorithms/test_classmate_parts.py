"""Thought spans and rewards of Classmate-CoT, by the numbers of its specification (8.1-8.3)."""

import random

import pytest
import torch
from refused import refused

from postgrad.algorithms.classmate_rewards import channel_metrics, combine, correlation, gate, pair
from postgrad.data.thought_spans import (
    Span,
    check_keep,
    draw_share,
    find_ids,
    keep,
    keep_words,
    split_cot,
    split_text,
)

OPEN, CLOSE = [100], [101]


@pytest.mark.parametrize(
    ("ids", "length", "cot", "mask", "output"),
    [
        ([100, 5, 6, 7, 101, 8, 9, 0], 7, [5, 6, 7], "01110000", [8, 9]),
        ([100, 5, 6, 7, 8, 0, 0, 0], 5, [5, 6, 7, 8], "01111000", None),
        ([5, 6, 101, 8, 0], 4, [5, 6], "11000", [8]),
        ([5, 6, 7, 0], 3, [5, 6, 7], "1110", None),
    ],
)
def test_the_four_cases(ids, length, cot, mask, output):
    span = split_cot(ids, length, OPEN, CLOSE)
    assert ids[span.start : span.end] == cot
    assert "".join(str(int(span.start <= i < span.end)) for i in range(len(ids))) == mask
    assert (None if span.output is None else ids[span.output : length]) == output


def test_markers_of_several_tokens_and_an_opening_in_the_prompt():
    ids = [9, 1, 2, 5, 1, 2, 3, 4, 6]
    assert split_cot(ids, 9, [1, 2], [3, 4]) == Span(3, 6, 8)
    assert split_cot(ids, 9, [1, 2], [3, 4], opened=True) == Span(0, 6, 8), (
        "what is opened already is not opened again"
    )
    assert split_cot(ids, 7, [1, 2], [3, 4]).output is None, "a marker that the length cuts is none"
    assert split_cot([3, 4, 1, 2, 5], 5, [1, 2], [3, 4]) == Span(4, 5), (
        "a close before the open closes nothing"
    )
    assert split_cot([], 0, [1], [2]) == Span(0, 0) and find_ids([1, 2], [], 0, 2) == -1


def test_markers_that_share_a_token_with_other_text():
    pieces = ["<", "think", ">\n", "5", ".</", "think", ">\\", "boxed"]
    assert split_text(pieces, "<think>", "</think>") == Span(3, 4, 7, "\n", ".", "\\")
    assert split_text(["a", "<think>x</think>y", "z"], "<think>", "</think>") == Span(
        2, 2, 2, "x", "", "y"
    )
    assert split_text(["no", "ne"], "<think>", "</think>") == Span(0, 2)
    assert split_text(
        ["in ", "</", "think", ">", "out"], "<think>", "</think>", opened=True
    ) == Span(0, 1, 4)


def test_how_much_is_kept():
    kept = {
        s: list(range(1, 11))[slice(*keep(0, 10, s))]
        for s in ("1", "0.55", "0.05", "first-3-tokens", "last-3-tokens", "first-100-tokens")
    }
    assert kept == {
        "1": list(range(1, 11)),
        "0.55": [1, 2, 3, 4, 5],
        "0.05": [1],
        "first-3-tokens": [1, 2, 3],
        "last-3-tokens": [8, 9, 10],
        "first-100-tokens": list(range(1, 11)),
    }
    assert keep(4, 4, "0.5") == (4, 4), "nothing stays nothing"


def test_words_keep_the_white_space_between_them():
    assert keep_words("Let x = 2.\n\nThen  2x = 4", 0.5) == "Let x = 2.\n\n"
    assert keep_words("one two", 0.4) == "one two", "no word would be no thought"


def test_random_shares():
    source = random.Random(42)
    assert [draw_share(source, 0.1, 0.9) for _ in range(3)] == pytest.approx(
        [0.6115, 0.1200, 0.3200], abs=5e-5
    )


@pytest.mark.parametrize(
    "spec", ["0", "1.5", "-0.1", "half", "first-0-tokens", "first-x-tokens", "nan"]
)
def test_a_keep_that_means_nothing_is_refused(spec):
    with refused("wrong_value", "method.keep"):
        check_keep(spec)


def test_words_are_kept_by_shares_only():
    check_keep("1e-1", "words")
    check_keep("last-3-tokens", "tokens")
    with refused("conflict", "method.keep"):
        check_keep("last-3-tokens", "words")


def test_combining():
    def one(rows, *weights):
        return float(combine(torch.tensor([rows]), weights))

    assert one([[6.0, 8.0], [2.0, 4.0]]) == 5.0 and one([[6.0, 8.0], [2.0, 4.0]], 0.75, 0.25) == 6.0
    assert one([[6.0, 8.0], [2.0, 4.0]], 3, 1) == 6.0, "weights are shares"
    assert one([[6.0, float("nan")]]) == 3.0
    assert float(combine(torch.tensor([[[6.0, torch.nan]]]), [], no_output_score=-11.0)) == -2.5


@pytest.mark.parametrize(
    ("condition", "right", "wrong"),
    [
        ("always", 2.5, 2.5),
        ("no_classmate_when_main_incorrect", 2.5, 0.0),
        ("neg_classmate_when_main_incorrect", 2.5, -2.5),
        ("no_classmate", 0.0, 0.0),
    ],
)
def test_the_gate(condition, right, wrong):
    assert gate(torch.tensor([7.0, 0.0]), 0.5 * torch.tensor([5.0, 5.0]), condition).tolist() == [
        right,
        wrong,
    ]


def test_an_unknown_condition_is_refused():
    with pytest.raises(ValueError, match="unknown condition"):
        gate(torch.zeros(1), torch.zeros(1), "sometimes")


@pytest.mark.parametrize("size", [2, 3, 7])
def test_pairs_are_one_cycle_over_problems_not_rows(size):
    rows = [f"p{i % size}" for i in range(4 * size)]
    pairs = pair(rows, random.Random(size))
    seen, at = [], "p0"
    for _ in range(size):
        seen.append(at)
        at = pairs[at]
    assert at == "p0" and sorted(seen) == sorted(set(rows)), "one cycle through all of them"
    assert all(a != b for a, b in pairs.items())
    assert pair(["a", "a"], random.Random(0)) == {"a": "a"}, "who is alone helps itself"


def test_metrics_of_the_two_rewards():
    main, classmate = torch.tensor([1.0, 0, 1, 1]), torch.tensor([2.0, 1, 0, 1])
    found = channel_metrics(main, classmate, torch.tensor([0, 0, 1, 1]))
    assert found["groups/flat_main"] == 0.5 and found["groups/flat_classmate"] == 0.0
    assert correlation(main, main * 3 + 1) == pytest.approx(1.0) and correlation(
        main, -main
    ) == pytest.approx(-1.0)
    assert correlation(main, torch.ones(4)) == 0.0
