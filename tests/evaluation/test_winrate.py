"""Win rates of two answers: worked out by hand, against a slow reference, and on judges whose taste is known."""

import math

import numpy as np
import pytest

from postgrad.evaluation.metrics import interval
from postgrad.evaluation.winrate import RIDGE, length_controlled, win_rates


def row(uid, win, response="abc", reference="ab"):
    """A line of a result file; win=None is a response without a verdict."""
    failure = {"kind": "judge", "reason": "no ranking"} if win is None else None
    parts = {} if win is None else {"win": win}
    return {
        "uid": uid,
        "parts": parts,
        "failure": failure,
        "response": response,
        "ground_truth": reference,
    }


def test_ties_are_half_and_failures_are_neither_won_nor_lost():
    found = win_rates(
        [
            row("a", 1.0),
            row("b", 0.5, "abcde"),
            row("c", 0.0, "a"),
            row("d", None, "x" * 99),
            row("e", 1.0, "", "abcd"),
        ]
    )
    low, high = interval([1.0, 0.5, 0.0, 1.0])
    assert found["rate"] == {"value": 2.5 / 4, "low": low, "high": high}
    assert (found["won"], found["tied"], found["lost"], found["failed"], found["problems"]) == (
        2,
        1,
        1,
        1,
        4,
    )
    assert found["characters"] == {"own": (3 + 5 + 1 + 0) / 4, "reference": (2 + 2 + 2 + 4) / 4}, (
        "the failed answer is in neither"
    )


def test_several_samples_of_a_problem_count_once():
    found = win_rates(
        [row("a", 1.0), row("a", 0.0), row("a", None), row("b", 1.0), row("b", 1.0), row("b", 0.75)]
    )
    assert (
        found["rate"]["value"] == pytest.approx((0.5 + 2.75 / 3) / 2)
        and found["problems"] == 2
        and found["failed"] == 1
    )
    assert (found["won"], found["tied"], found["lost"]) == (4, 0, 1)


def test_without_any_verdict_there_is_no_rate():
    found = win_rates([row("a", None), row("b", None)])
    assert (
        found["rate"] is None
        and found["length_controlled"] is None
        and found["failed"] == 2
        and found["problems"] == 0
    )


def test_the_fit_is_the_minimum_of_its_loss():
    """A grid around the constant and the slope, in plain loops: nothing is better than what was found."""
    rng = np.random.default_rng(3)
    gaps = rng.normal(40, 100, 60)
    shares = rng.choice([0.0, 0.5, 1.0], 60)
    spread = math.sqrt(sum((gap - gaps.mean()) ** 2 for gap in gaps) / 59)

    def loss(constant, slope):
        total = RIDGE / 2 * (constant**2 + slope**2)
        for share, gap in zip(shares, gaps, strict=True):
            z = constant + slope * math.tanh(gap / spread)
            total += math.log1p(math.exp(-z)) * share + math.log1p(math.exp(z)) * (1 - share)
        return total

    value = length_controlled(list(shares), list(gaps))["value"]
    constant = math.log(value / (1 - value))
    slopes = np.linspace(-3, 3, 1201)
    slope = min(slopes, key=lambda at: loss(constant, at))
    best = loss(constant, slope)
    assert all(
        loss(constant + d, at) > best
        for d in (-0.01, 0.01)
        for at in (slope - 0.005, slope, slope + 0.005)
    )


def lengths(seed: int, count: int = 805) -> np.ndarray:
    """Ours minus the reference's: mostly longer, by lengths as people's answers have them."""
    rng = np.random.default_rng(seed)
    return np.round(rng.lognormal(6.8, 0.6, count)) - np.round(rng.lognormal(6.2, 0.6, count))


@pytest.mark.parametrize("seed", range(3))
def test_a_judge_that_prefers_only_length_is_seen_through(seed):
    gaps = lengths(seed)
    shares = (np.sign(gaps) + 1) / 2
    found = length_controlled(list(shares), list(gaps))
    assert (
        shares.mean() > 0.73
        and abs(found["value"] - 0.5) < 0.06
        and found["low"] < 0.5 < found["high"]
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_judge_that_prefers_quality_keeps_its_rate(seed):
    gaps, rng = lengths(seed), np.random.default_rng(seed + 10)
    shares = (rng.random(len(gaps)) < 0.7).astype(float)
    found = length_controlled(list(shares), list(gaps))
    assert (
        abs(found["value"] - shares.mean()) < 0.035 and found["low"] < shares.mean() < found["high"]
    )


def test_a_judge_with_both_tastes_has_its_length_taken_away():
    """The preference is drawn from the model itself, so the answer is known: 62.2 % at equal length."""
    found, raw, hit = [], [], 0
    truth = 1 / (1 + math.exp(-0.5))
    for seed in range(40):
        gaps, rng = lengths(seed), np.random.default_rng(seed + 100)
        chance = 1 / (1 + np.exp(-0.5 - 1.5 * np.tanh(gaps / gaps.std(ddof=1))))
        shares = (rng.random(len(gaps)) < chance).astype(float)
        one = length_controlled(list(shares), list(gaps))
        found.append(one["value"])
        raw.append(shares.mean())
        hit += one["low"] < truth < one["high"]
    assert np.mean(found) == pytest.approx(truth, abs=0.01) and np.mean(raw) > 0.69
    assert hit >= 34, "a 95 % interval"


def test_turning_the_comparison_round_turns_the_rate_round():
    gaps, rng = lengths(5, 100), np.random.default_rng(6)
    shares = rng.choice([0.0, 0.5, 1.0], 100)
    ours, theirs = (
        length_controlled(list(shares), list(gaps)),
        length_controlled(list(1 - shares), list(-gaps)),
    )
    assert ours["value"] == pytest.approx(1 - theirs["value"]) and ours["low"] == pytest.approx(
        1 - theirs["high"]
    )


def test_lengths_that_cannot_tell():
    assert (
        length_controlled([1.0], [3.0]) is None
        and length_controlled([1.0, 0.0], [3.0, 3.0]) is None
    )
    level = length_controlled([1.0, 0.0] * 50, [0.0] * 100)
    assert level["value"] == pytest.approx(0.5) and level["low"] < 0.45
    always = length_controlled([1.0] * 805, list(lengths(0)))
    assert 0.99 < always["value"] < 1.0 and all(map(math.isfinite, always.values())), (
        "no overflow where there is no finite fit"
    )
