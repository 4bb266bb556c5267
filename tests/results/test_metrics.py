"""avg@k, pass@k, maj@k and intervals against enumeration, published and hand-computed numbers."""

import itertools
import math
import random

import pytest

from postgrad.algorithms.passk import pass_at_k
from postgrad.results.metrics import interval, maj_at_k, majority, powers_of_two, summarize


def row(uid, sample, right, answer="x", **more):
    base = {
        "uid": uid,
        "sample": sample,
        "right": right,
        "score": float(right),
        "parts": {},
        "failure": None,
        "data_source": "s",
    }
    return base | {"answer": answer, "can_vote": True, "finish": "stop", "length": 3} | more


def rows_of(rights: list[list[bool]], **more):
    return [
        row(f"p{i}", j, ok, **more) for i, group in enumerate(rights) for j, ok in enumerate(group)
    ]


def test_pass_at_k_equals_enumeration_of_subsets():
    """For every n <= 8, c and k."""
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
                expected = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15), (n, c, k)


def test_summary_averages_over_problems():
    result = summarize(rows_of([[True, True, False, False], [False] * 4, [True] * 4]))
    assert (result["problems"], result["samples"]) == (3, 4)
    assert result["avg"]["value"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert result["pass"]["1"]["value"] == pytest.approx(result["avg"]["value"]), "pass@1 is avg@n"
    assert result["pass"]["2"]["value"] == pytest.approx((5 / 6 + 0 + 1) / 3)  # 1 - C(2,2)/C(4,2)
    assert result["pass"]["4"]["value"] == pytest.approx((1 + 0 + 1) / 3)


@pytest.mark.parametrize(
    ("n", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_reported_k_doubles_up_to_n(n, ks):
    assert powers_of_two(n) == ks


def test_majority_with_ties_and_missing_answers():
    assert majority(["1", "1", "2"], [True, True, False]) == 1.0
    assert majority(["2", "1", "2"], [False, True, False]) == 0.0
    assert majority(["1", "2"], [True, False]) == 0.5, "a tie is the mean of the tied answers"
    assert majority(["1", "2", "3"], [True, False, False]) == pytest.approx(1 / 3)
    assert majority([None, None, "1"], [False, False, True]) == 1.0, "no answer, no vote"
    assert majority([None, None], [False, False]) == 0.0
    assert majority(["1", "1"], [True, False]) == 0.5, "an answer scored both ways counts half"


def test_maj_at_k_is_the_mean_over_consecutive_blocks():
    votes = ["1", "1", "2", "2", "1"]
    right = [True, True, False, False, True]
    assert maj_at_k(votes, right, 2) == 0.5  # 1 1 | 2 2 | the fifth sample is unused
    assert maj_at_k(votes, right, 5) == 1.0
    assert maj_at_k(votes, right, 1) == pytest.approx(3 / 5)


def test_maj_at_k_is_unbiased():
    """Its mean over all orders of the samples is the mean over all subsets of size k."""
    votes = ["1", "1", "2", "2", "3", None]
    right = [True, True, False, False, False, False]
    pairs = list(zip(votes, right, strict=True))
    subsets = [majority(*zip(*subset, strict=True)) for subset in itertools.combinations(pairs, 3)]
    orders = [maj_at_k(*zip(*order, strict=True), 3) for order in itertools.permutations(pairs)]
    assert sum(orders) / len(orders) == pytest.approx(sum(subsets) / len(subsets))


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),  # published Wilson intervals
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 2, 0.0945, 0.9055),
        (50, 100, 0.4038, 0.5962),
    ],
)
def test_one_sample_gives_the_wilson_interval(right, count, low, high):
    assert interval([1.0] * right + [0.0] * (count - right)) == (
        pytest.approx(low, abs=1e-4),
        pytest.approx(high, abs=1e-4),
    )


def test_equal_samples_of_a_problem_count_as_one_trial():
    """Independent samples count as up to one trial each."""
    once = interval([1.0, 0.0, 1.0, 1.0])
    assert interval([1.0, 0.0, 1.0, 1.0], samples=16) == once
    different = interval([1.0, 0.0] * 20, samples=4)
    equal = interval([0.5] * 40, samples=4)
    assert equal == pytest.approx(interval([1.0] * 80 + [0.0] * 80)), (
        "no variance between problems: as many trials as responses"
    )
    assert equal[1] - equal[0] < different[1] - different[0]


def test_interval_has_the_stated_coverage():
    """60 problems with random success rates, 4 samples each: 95% of the intervals are right."""
    draw = random.Random(0)
    num_covered = 0
    trials = 600
    for _ in range(trials):
        rates = [draw.betavariate(0.6, 0.9) for _ in range(60)]
        values = [sum(draw.random() < p for _ in range(4)) / 4 for p in rates]
        low, high = interval(values, samples=4)
        num_covered += low <= 0.4 <= high  # 0.6 / (0.6 + 0.9)
    noise = 3.5 * math.sqrt(0.95 * 0.05 / trials)
    assert abs(num_covered / trials - 0.95) < noise


def test_lengths_failures_parts_and_classes():
    rows = [
        row("a", 0, True, length=2, parts={"format": 1.0, "answer": 1.0}),
        row("b", 0, False, length=4, parts={"format": 0.0, "answer": 1.0}, finish="length"),
        row("c", 0, False, length=9, parts={"format": 1.0, "answer": 0.0}),
        row("d", 0, False, length=5, score=None, failure={"kind": "timeout", "reason": "slow"}),
    ]
    result = summarize(rows)
    assert result["classes"] == {"11": 1, "10": 1, "01": 1, "00": 0}, (
        "a response that failed to be scored is in no class"
    )
    assert result["parts"] == {"answer": pytest.approx(2 / 3), "format": pytest.approx(2 / 3)}
    assert result["length"] == {"mean": 5.0, "median": 4.5, "max": 9, "right": 2.0, "wrong": 6.0}
    assert result["truncated"] == 0.25 and result["failures"] == {"timeout": 1}
    assert result["avg"]["value"] == 0.25 and result["score"] == 0.25 and result["maj"] is None


def test_classes_use_the_verdict_if_there_is_no_part_answer():
    rows = [row("a", 0, True, parts={"format": 1.0}), row("b", 0, False, parts={"format": 0.0})]
    assert summarize(rows)["classes"] == {"11": 1, "10": 0, "01": 0, "00": 1}
    assert summarize(rows_of([[True]]))["classes"] is None


def test_data_sources_are_averaged_with_equal_weight():
    rows = [
        row("a", 0, True, data_source="aime"),
        row("b", 0, True, data_source="amc"),
        row("c", 0, False, data_source="amc"),
    ]
    result = summarize(rows)
    assert {name: source["avg"]["value"] for name, source in result["sources"].items()} == {
        "aime": 1.0,
        "amc": 0.5,
    }
    assert result["mean_of_sources"] == 0.75 and result["avg"]["value"] == pytest.approx(2 / 3)


def test_no_majority_if_answers_cannot_vote():
    assert summarize(rows_of([[True, False]], can_vote=False))["maj"] is None
    assert summarize(rows_of([[True, False]]))["maj"]["2"]["value"] == 0.5
