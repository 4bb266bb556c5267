"""avg@k, pass@k, maj@k and the intervals, against enumeration, published numbers and cases worked out by hand."""

import itertools
import math
import random

import pytest

from postgrad.algorithms.passk import pass_at_k
from postgrad.evaluation.metrics import interval, ladder, maj_at_k, majority, summarize


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
    return base | {"answer": answer, "votes": True, "finish": "stop", "length": 3} | more


def rows_of(rights: list[list[bool]], **more):
    return [
        row(f"p{i}", j, ok, **more) for i, group in enumerate(rights) for j, ok in enumerate(group)
    ]


def test_pass_at_k_is_the_share_of_subsets_for_all_n_up_to_eight():
    """Every n <= 8, c and k, and every subset."""
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(
                    sum(any(s) for s in subsets) / len(subsets), abs=1e-15
                ), (n, c, k)


def test_a_summary_averages_over_problems():
    result = summarize(rows_of([[True, True, False, False], [False] * 4, [True] * 4]))
    assert (result["problems"], result["samples"]) == (3, 4)
    assert result["avg"]["value"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert result["pass"]["1"]["value"] == pytest.approx(result["avg"]["value"]), "pass@1 is avg@n"
    assert result["pass"]["2"]["value"] == pytest.approx((5 / 6 + 0 + 1) / 3)  # 1 - C(2,2)/C(4,2)
    assert result["pass"]["4"]["value"] == pytest.approx((1 + 0 + 1) / 3)


@pytest.mark.parametrize(
    ("n", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_k_doubles_up_to_n(n, ks):
    assert ladder(n) == ks


def test_majority_and_its_ties():
    assert majority(["1", "1", "2"], [True, True, False]) == 1.0
    assert majority(["2", "1", "2"], [False, True, False]) == 0.0
    assert majority(["1", "2"], [True, False]) == 0.5, "a tie is a fair draw"
    assert majority(["1", "2", "3"], [True, False, False]) == pytest.approx(1 / 3)
    assert majority([None, None, "1"], [False, False, True]) == 1.0, "no answer, no vote"
    assert majority([None, None], [False, False]) == 0.0
    assert majority(["1", "1"], [True, False]) == 0.5, "one spelling judged both ways counts half"


def test_maj_at_k_is_the_mean_over_blocks_in_their_order():
    votes, right = ["1", "1", "2", "2", "1"], [True, True, False, False, True]
    assert maj_at_k(votes, right, 2) == 0.5  # 1 1 | 2 2 | the fifth has no partner
    assert maj_at_k(votes, right, 5) == 1.0
    assert maj_at_k(votes, right, 1) == pytest.approx(3 / 5)


def test_maj_at_k_has_no_bias():
    """Over all orders of the samples its mean is the mean over all subsets of k."""
    votes, right = ["1", "1", "2", "2", "3", None], [True, True, False, False, False, False]
    pairs = list(zip(votes, right, strict=True))
    subsets = [majority(*zip(*subset, strict=True)) for subset in itertools.combinations(pairs, 3)]
    orders = [maj_at_k(*zip(*order, strict=True), 3) for order in itertools.permutations(pairs)]
    assert sum(orders) / len(orders) == pytest.approx(sum(subsets) / len(subsets))


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),  # Wilson's interval, as tables and other software give it
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 2, 0.0945, 0.9055),
        (50, 100, 0.4038, 0.5962),
    ],
)
def test_one_sample_gives_wilsons_interval(right, count, low, high):
    assert interval([1.0] * right + [0.0] * (count - right)) == (
        pytest.approx(low, abs=1e-4),
        pytest.approx(high, abs=1e-4),
    )


def test_samples_that_agree_within_a_problem_are_worth_one_answer():
    """Copies of one answer say no more than the answer; independent ones say more, up to one each."""
    once = interval([1.0, 0.0, 1.0, 1.0])
    assert interval([1.0, 0.0, 1.0, 1.0], samples=16) == once
    spread, even = interval([1.0, 0.0] * 20, samples=4), interval([0.5] * 40, samples=4)
    assert even == pytest.approx(interval([1.0] * 80 + [0.0] * 80)), (
        "no spread between problems: as many trials as responses"
    )
    assert even[1] - even[0] < spread[1] - spread[0]


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    """Problems with different odds, 4 samples each: the mean of all problems' odds lies inside in 95 % of the draws, within noise."""
    draw = random.Random(0)
    inside, trials = 0, 600
    for _ in range(trials):
        odds = [draw.betavariate(0.6, 0.9) for _ in range(60)]
        values = [sum(draw.random() < p for _ in range(4)) / 4 for p in odds]
        low, high = interval(values, samples=4)
        inside += low <= 0.4 <= high  # 0.6 / (0.6 + 0.9)
    noise = 3.5 * math.sqrt(0.95 * 0.05 / trials)
    assert abs(inside / trials - 0.95) < noise, inside / trials


def test_lengths_failures_parts_and_classes():
    rows = [
        row("a", 0, True, length=2, parts={"format": 1.0, "answer": 1.0}),
        row("b", 0, False, length=4, parts={"format": 0.0, "answer": 1.0}, finish="length"),
        row("c", 0, False, length=9, parts={"format": 1.0, "answer": 0.0}),
        row("d", 0, False, length=5, score=None, failure={"kind": "timeout", "reason": "slow"}),
    ]
    result = summarize(rows)
    assert result["classes"] == {"11": 1, "10": 1, "01": 1, "00": 0}, (
        "what was not judged is in no class"
    )
    assert result["parts"] == {"answer": pytest.approx(2 / 3), "format": pytest.approx(2 / 3)}
    assert result["length"] == {"mean": 5.0, "median": 4.5, "max": 9, "right": 2.0, "wrong": 6.0}
    assert result["truncated"] == 0.25 and result["failures"] == {"timeout": 1}
    assert result["avg"]["value"] == 0.25 and result["score"] == 0.25 and result["maj"] is None


def test_a_part_format_alone_is_crossed_with_the_verdict():
    rows = [row("a", 0, True, parts={"format": 1.0}), row("b", 0, False, parts={"format": 0.0})]
    assert summarize(rows)["classes"] == {"11": 1, "10": 0, "01": 0, "00": 1}
    assert summarize(rows_of([[True]]))["classes"] is None


def test_sources_of_one_file_are_told_apart_and_averaged_alike():
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


def test_verifiers_without_an_answer_have_no_majority():
    assert summarize(rows_of([[True, False]], votes=False))["maj"] is None
    assert summarize(rows_of([[True, False]]))["maj"]["2"]["value"] == 0.5
