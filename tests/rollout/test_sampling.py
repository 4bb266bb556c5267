"""Picking tokens: filters keep the right ones, log-probs stay those of the whole distribution."""

import numpy as np
import pytest
import torch

from postgrad.errors import RunError
from postgrad.rollout.engine import Completion, Sampling
from postgrad.rollout.native.sampling import SeededRandom, _filter, filter_rows, sample_tokens

PROBS = torch.tensor([0.05, 0.4, 0.02, 0.25, 0.18, 0.1])
GRID = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000


def shares(**settings) -> torch.Tensor:
    """Token frequencies for uniforms that cover [0, 1) evenly; log-probs are unfiltered."""
    sampling = Sampling(**settings)
    logits = PROBS.log().expand(len(GRID), -1)
    tokens, logprobs = sample_tokens(logits, GRID, sampling)
    whole = (PROBS.log() / sampling.temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs, whole[tokens], rtol=0, atol=1e-6)
    return torch.bincount(tokens, minlength=len(PROBS)) / len(GRID)


def expect(found: torch.Tensor, weights: list[float]) -> None:
    wanted = torch.tensor(weights)
    torch.testing.assert_close(found, wanted / wanted.sum(), rtol=0, atol=2e-4)


def test_no_filter_is_the_distribution_itself():
    expect(shares(), PROBS.tolist())


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_or_flattens(temperature):
    expect(shares(temperature=temperature), PROBS.pow(1 / temperature).tolist())


def test_top_k_keeps_the_k_likeliest():
    expect(shares(top_k=2), [0, 0.4, 0, 0.25, 0, 0])
    expect(shares(top_k=1), [0, 1, 0, 0, 0, 0])
    expect(shares(top_k=6), PROBS.tolist())
    expect(shares(top_k=100), PROBS.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    expect(shares(top_p=0.39), [0, 1, 0, 0, 0, 0])
    expect(shares(top_p=1e-50), [0, 1, 0, 0, 0, 0])  # 0 in float32
    expect(shares(top_p=0.41), [0, 0.4, 0, 0.25, 0, 0])
    expect(shares(top_p=0.64), [0, 0.4, 0, 0.25, 0, 0])
    expect(shares(top_p=0.66), [0, 0.4, 0, 0.25, 0.18, 0])
    expect(shares(top_p=0.99), [0.05, 0.4, 0.02, 0.25, 0.18, 0.1])


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    expect(shares(min_p=0.24), [0, 0.4, 0, 0.25, 0.18, 0.1])  # floor 0.096
    expect(shares(min_p=0.26), [0, 0.4, 0, 0.25, 0.18, 0])  # floor 0.104
    expect(shares(min_p=1.0), [0, 1, 0, 0, 0, 0])


def test_top_p_filters_what_top_k_keeps():
    expect(
        shares(top_k=3, top_p=0.7), [0, 0.4, 0, 0.25, 0, 0]
    )  # 0.4 of 0.83 is 48%, with 0.25 it is 78%
    expect(shares(top_k=4, min_p=0.5), [0, 0.4, 0, 0.25, 0, 0])


def test_rows_with_their_own_filters_keep_what_a_call_per_row_keeps():
    settings = [
        Sampling(),
        Sampling(top_k=2),
        Sampling(top_k=1 << 30),
        Sampling(top_p=0.64),
        Sampling(min_p=0.26),
        Sampling(top_k=3, top_p=0.7),
        Sampling(top_k=4, min_p=0.5),
        Sampling(top_k=5, top_p=0.9, min_p=0.1),
    ]
    probs = torch.rand(len(settings), 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    for rows in (probs, PROBS.expand(len(settings), -1), torch.full_like(probs, 0.02)):
        columns = [torch.tensor([getattr(one, name) for one in settings], dtype=torch.float32)
                   for name in ("top_k", "top_p", "min_p")]  # fmt: skip
        kept = filter_rows(rows, *columns)
        alone = [_filter(row[None], one)[0] for row, one in zip(rows, settings, strict=True)]
        torch.testing.assert_close(kept, torch.stack(alone), rtol=0, atol=0)


def test_filters_are_taken_at_the_sampling_temperature():
    flat = PROBS.pow(0.5) / PROBS.pow(0.5).sum()
    kept = flat >= 0.6 * flat.max()  # at temperature 1 only 0.4 and 0.25 would stay
    assert kept.sum() == 3
    expect(shares(temperature=2.0, min_p=0.6), (flat * kept).tolist())


def test_greedy_takes_the_likeliest_whatever_the_uniform():
    tokens, logprobs = sample_tokens(
        PROBS.log()[None].expand(3, -1), torch.tensor([0.0, 0.5, 0.999]), Sampling(temperature=0.0)
    )
    assert tokens.tolist() == [1, 1, 1]
    assert logprobs.tolist() == pytest.approx([PROBS[1].log().item()] * 3)


def test_the_ends_of_the_unit_interval_never_pick_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    for uniform in (
        0.0,
        1e-300,
        0.5,
        1 - 1e-16,
        torch.nextafter(
            torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
        ).item(),
    ):
        token, logprob = sample_tokens(
            logits, torch.tensor([uniform], dtype=torch.float64), Sampling()
        )
        assert int(token) in (1, 3) and torch.isfinite(logprob).all()
    many = torch.zeros(1, 150_000)  # rounding of a long cumulative sum must not run over the end
    token, _ = sample_tokens(many, torch.tensor([1 - 1e-16], dtype=torch.float64), Sampling())
    assert 0 <= int(token) < 150_000


def test_rows_have_their_own_uniforms():
    tokens, _ = sample_tokens(
        PROBS.log()[None].expand(3, -1), torch.tensor([0.01, 0.3, 0.99]), Sampling()
    )
    assert tokens.tolist() == [0, 1, 5]


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_the_number_of_a_token_is_its_seeds_however_it_is_drawn(seed):
    numbers = np.random.Generator(np.random.Philox(key=seed)).random(1000)
    random = SeededRandom()
    for first, count in ((0, 5), (3, 9), (256, 256), (7, 1), (999, 1), (0, 1000)):
        random.draw(8, first, 3)
        assert (random.draw(seed, first, count) == numbers[first : first + count]).all()


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(0.7, top_p=0.9)])
def test_a_token_of_broken_logits_has_no_log_prob_and_is_no_completion(sampling):
    logits = torch.randn(2, 6)
    logits[1, 3] = torch.nan
    tokens, logprobs = sample_tokens(logits, torch.tensor([0.5, 0.5]), sampling)
    assert (tokens < 6).all() and logprobs.isnan().tolist() == [False, True]
    Completion(tokens[:1].tolist(), logprobs[:1].tolist())
    with pytest.raises(RunError, match="not numbers"):
        Completion(tokens.tolist(), logprobs.tolist())
