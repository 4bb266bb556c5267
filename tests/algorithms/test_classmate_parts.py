"""Thought spans and rewards of Classmate-CoT, by the numbers of its specification (8.1-8.3)."""

import random

import pytest
import torch
from refused import refused

from postgrad.algorithms.classmate_rewards import channel_metrics, correlation, gate, pair
from postgrad.data.thought_spans import (
    Span,
    check_keep,
    draw_share,
    find_ids,
    keep_words,
    split_cot,
    split_text,
)

OPEN, CLOSE = [100], [101]


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
