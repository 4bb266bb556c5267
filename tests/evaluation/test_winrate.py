"""Win rates: hand-computed cases, a slow reference, and simulated judges."""

import math

import numpy as np
import pytest

from postgrad.evaluation.winrate import RIDGE, SLOPE, SLOPE_WEIGHT, length_controlled, win_rates
from postgrad.results.metrics import interval


def row(uid, win, response="abc", reference="ab"):
    """Returns a row of a result file; win=None is a response without a verdict."""
    failure = {"kind": "judge", "reason": "no ranking"} if win is None else None
    parts = {} if win is None else {"win": win}
    return {
        "uid": uid,
        "parts": parts,
        "failure": failure,
        "response": response,
        "ground_truth": reference,
    }


def test_tie_is_half_a_win_and_failure_is_left_out():
    result = win_rates(
        [
            row("a", 1.0),
            row("b", 0.5, "abcde"),
            row("c", 0.0, "a"),
            row("d", None, "x" * 99),
            row("e", 1.0, "", "abcd"),
        ]
    )
    low, high = interval([1.0, 0.5, 0.0, 1.0])
    assert result["rate"] == {"value": 2.5 / 4, "low": low, "high": high}
    assert (result["won"], result["tied"], result["lost"]) == (2, 1, 1)
    assert result["failed"] == 1
    assert result["problems"] == 4
    expected = {"own": (3 + 5 + 1 + 0) / 4, "reference": (2 + 2 + 2 + 4) / 4}
    assert result["characters"] == expected, "the failed answer is in neither"


def test_problem_counts_once_with_the_mean_of_its_samples():
    result = win_rates(
        [row("a", 1.0), row("a", 0.0), row("a", None), row("b", 1.0), row("b", 1.0), row("b", 0.75)]
    )
    assert result["rate"]["value"] == pytest.approx((0.5 + 2.75 / 3) / 2)
    assert result["problems"] == 2
    assert result["failed"] == 1
    assert (result["won"], result["tied"], result["lost"]) == (4, 0, 1)


def test_no_verdicts_give_no_rate():
    result = win_rates([row("a", None), row("b", None)])
    assert result["rate"] is None
    assert result["length_controlled"] is None
    assert result["failed"] == 2
    assert result["problems"] == 0


def test_fit_minimizes_the_loss():
    """No point of a grid around the fitted constant and coefficient has a lower loss."""
    rng = np.random.default_rng(3)
    gaps = rng.normal(40, 100, 60)
    rates = rng.choice([0.0, 0.5, 1.0], 60)
    std = math.sqrt(sum((gap - gaps.mean()) ** 2 for gap in gaps) / 59)

    def loss(constant, coefficient):
        total = RIDGE / 2 * constant**2
        total += (RIDGE + SLOPE_WEIGHT * 60) / 2 * (coefficient - SLOPE) ** 2
        for rate, gap in zip(rates, gaps, strict=True):
            z = constant + coefficient * math.tanh(gap / std)
            total += math.log1p(math.exp(-z)) * rate + math.log1p(math.exp(z)) * (1 - rate)
        return total

    value = length_controlled(list(rates), list(gaps))["value"]
    constant = math.log(value / (1 - value))
    coefficient = min(np.linspace(-3, 3, 1201), key=lambda x: loss(constant, x))
    best = loss(constant, coefficient)
    for shift in (-0.01, 0.01):
        for other_shift in (-0.005, 0, 0.005):
            assert loss(constant + shift, coefficient + other_shift) > best


def length_differences(seed: int, count: int = 805) -> np.ndarray:
    """Returns answer minus reference lengths; most answers are longer than their reference."""
    rng = np.random.default_rng(seed)
    return np.round(rng.lognormal(6.8, 0.6, count)) - np.round(rng.lognormal(6.2, 0.6, count))


@pytest.mark.parametrize("seed", range(3))
def test_judge_that_prefers_length_comes_closer_to_one_half(seed):
    """Not to one half itself: such a judge is far from SLOPE, and the fit is pulled to it."""
    gaps = length_differences(seed)
    rates = (np.sign(gaps) + 1) / 2
    result = length_controlled(list(rates), list(gaps))
    assert rates.mean() > 0.73
    assert 0.5 < result["value"] < 0.66


@pytest.mark.parametrize("seed", range(3))
def test_judge_that_ignores_length_keeps_its_rate(seed):
    gaps = length_differences(seed)
    rng = np.random.default_rng(seed + 10)
    rates = (rng.random(len(gaps)) < 0.7).astype(float)
    result = length_controlled(list(rates), list(gaps))
    assert -0.05 < result["value"] - rates.mean() < 0, "longer answers lose a little"


def test_effect_of_length_is_removed():
    """Preferences are drawn from the model at SLOPE, so the expected rate is known: 62.2%."""
    estimates = []
    raw_rates = []
    num_covered = 0
    truth = 1 / (1 + math.exp(-0.5))
    for seed in range(40):
        gaps = length_differences(seed)
        rng = np.random.default_rng(seed + 100)
        chance = 1 / (1 + np.exp(-0.5 - SLOPE * np.tanh(gaps / gaps.std(ddof=1))))
        rates = (rng.random(len(gaps)) < chance).astype(float)
        one = length_controlled(list(rates), list(gaps))
        estimates.append(one["value"])
        raw_rates.append(rates.mean())
        num_covered += one["low"] < truth < one["high"]
    assert np.mean(estimates) == pytest.approx(truth, abs=0.01)
    assert np.mean(raw_rates) > truth + 0.05, "the raw rate has the effect of length"
    assert num_covered >= 34, "95% of 40 intervals, minus noise"


def test_swapping_answer_and_reference_gives_one_minus_the_rate():
    gaps = length_differences(5, 100)
    rng = np.random.default_rng(6)
    rates = rng.choice([0.0, 0.5, 1.0], 100)
    ours = length_controlled(list(rates), list(gaps))
    theirs = length_controlled(list(1 - rates), list(-gaps))
    assert ours["value"] == pytest.approx(1 - theirs["value"])
    assert ours["low"] == pytest.approx(1 - theirs["high"])


def test_edge_cases_of_length_control():
    assert length_controlled([1.0], [3.0]) is None
    assert length_controlled([1.0, 0.0], [3.0, 3.0]) is None
    equal_lengths = length_controlled([1.0, 0.0] * 50, [0.0] * 100)
    assert equal_lengths["value"] == pytest.approx(0.5)
    assert equal_lengths["low"] < 0.45
    always_preferred = length_controlled([1.0] * 805, list(length_differences(0)))
    assert 0.99 < always_preferred["value"] < 1.0
    assert all(map(math.isfinite, always_preferred.values())), (
        "no overflow where there is no finite fit"
    )
