"""Properties of the advantage estimators on random batches, against slow reference functions."""

import inspect
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from postgrad.algorithms import classmate_advantages as classmate
from postgrad.algorithms.advantages import (
    ADVANTAGES,
    drgrpo,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    grpo_split,
    opo,
    reinforce_pp_baseline,
    rloo,
)
from postgrad.algorithms.groups import normalize_rows
from postgrad.algorithms.token_advantages import (
    gae,
    optimal_token_baseline,
    outcome_rewards,
    reinforce_pp,
    remax,
    tir_optimal_token_baseline,
)

from .batches import Ragged, examples, members, ragged, slow_gae, slow_grpo, slow_whiten
from .helpers import F64, column, exactly, row_index, same_group, trues

EMPTY = Ragged([], trues(0), same_group(0), column(), 0)


def near(actual, expected, atol=1e-9):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=F64), rtol=1e-9, atol=atol)


def group_estimates(b: Ragged) -> dict[str, torch.Tensor]:
    """Every row-level estimator on one batch."""
    on_policy = torch.tensor([i % 3 != 0 for i in range(b.num_rows)], dtype=torch.bool)
    named = {"a": b.rewards, "b": b.rewards.square()}
    return {
        "grpo": grpo(b.rewards, b.groups),
        "drgrpo": drgrpo(b.rewards, b.groups),
        "grpo_passk": grpo_passk(b.rewards, b.groups),
        "rloo": rloo(b.rewards, b.groups),
        "opo": opo(b.rewards, b.groups, b.trainable),
        "gpg": gpg(b.rewards, b.groups),
        "reinforce_pp_baseline": reinforce_pp_baseline(b.rewards, b.groups, b.trainable),
        "gdpo": gdpo(named, b.groups, {"b": 0.5}, b.trainable),
        "gdpo_rows": gdpo(named, b.groups, whiten_over="rows"),
        "grpo_split": grpo_split(b.rewards, b.groups, on_policy),
    }


@examples
@given(ragged())
def test_group_estimators_equal_slow_references(b):
    rewards, groups, lengths = b.rewards.tolist(), b.groups.tolist(), b.trainable.tolist()
    near(grpo(b.rewards, b.groups, eps=1e-3), slow_grpo(rewards, groups, True, 1e-3), 1e-7)
    near(drgrpo(b.rewards, b.groups), slow_grpo(rewards, groups, False))
    leave_one_out, length_weighed = rloo(b.rewards, b.groups), opo(b.rewards, b.groups, b.trainable)
    for i in range(b.num_rows):
        others = [rewards[j] for j in members(groups, i) if j != i]
        near(leave_one_out[i], rewards[i] - (sum(others) / len(others) if others else 0.0))
        weight = sum(lengths[j] for j in members(groups, i))
        weighed = sum(lengths[j] * rewards[j] for j in members(groups, i))
        equal = len({rewards[j] for j in members(groups, i)}) == 1
        baseline = (
            0.0 if not others else rewards[i] if equal else weighed / weight if weight else 0.0
        )
        near(length_weighed[i], rewards[i] - baseline)


@examples
@given(ragged(min_rows=1), st.randoms(use_true_random=False))
def test_permuting_rows_permutes_advantages(b, rng):
    order = list(range(b.num_rows))
    rng.shuffle(order)
    before, after = group_estimates(b), group_estimates(b.reordered(order))
    for name in before.keys() - {"grpo_split"}:  # its on-policy column goes by position here
        near(after[name], before[name][order], 1e-7)


@pytest.mark.parametrize("name", ["grpo", "drgrpo", "grpo_passk", "rloo", "opo", "gpg"])
def test_the_one_rule(name):
    """A group of one keeps its reward; equal rewards give exactly 0 even if their mean rounds."""
    rewards, groups = torch.tensor([0.1, 0.7, 0.1, 0.1, 2.0]), torch.tensor([4, 9, 4, 4, 8])
    extra = (torch.tensor([1, 2, 3, 4, 5]),) if name == "opo" else ()
    advantages = ADVANTAGES[name].function(rewards, groups, *extra)
    assert advantages.dtype == torch.float32
    exactly(advantages[[0, 2, 3]], [0, 0, 0])
    torch.testing.assert_close(advantages[[1, 4]], rewards[[1, 4]], rtol=2e-6, atol=0)


def test_equal_rewards_of_a_batch_whiten_to_zero():
    rewards, groups, lengths = (
        torch.full((6,), 0.1),
        torch.tensor([1, 1, 1, 2, 2, 2]),
        torch.tensor([1, 2, 3, 4, 5, 6]),
    )
    exactly(reinforce_pp_baseline(rewards, groups, lengths), [0] * 6)
    exactly(gdpo({"only": rewards}, groups, lengths=lengths), [0] * 6)
    exactly(gdpo({"only": rewards}, groups, whiten_over="rows"), [0] * 6)
    # One token alone has no deviation.
    exactly(gdpo({"only": column(3)}, same_group(1), lengths=torch.tensor([1])), [0])
    exactly(normalize_rows(column(3)), [0])


@examples
@given(ragged(), st.floats(0.5, 1), st.floats(0.5, 1))
def test_gae_equals_the_recursion(b, gamma, lam):
    rewards = torch.where(b.mask, b.noise(), 0.0)
    values = b.noise(1)
    out = gae(
        rewards, values, b.mask, b.rows, b.num_rows, gamma=gamma, lam=lam, whiten_advantages=False
    )
    at, expected = 0, []
    for length in b.lengths:
        part = slice(at, at + length)
        expected += slow_gae(
            rewards[part].tolist(), values[part].tolist(), b.mask[part].tolist(), gamma, lam
        )
        at += length
    near(out.advantages, torch.tensor(expected, dtype=F64))
    near(out.returns, torch.where(b.mask, torch.tensor(expected, dtype=F64) + values, 0.0))
    white = gae(rewards, values, b.mask, b.rows, b.num_rows, gamma=gamma, lam=lam)
    near(
        white.advantages[b.mask],
        torch.tensor(slow_whiten(out.advantages[b.mask].tolist()), dtype=F64),
        1e-6,
    )
    near(white.returns, out.returns)


@examples
@given(ragged())
def test_masked_values_are_never_read(b):
    rewards = outcome_rewards(b.rewards, b.mask, b.rows, b.num_rows)
    poisoned = torch.where(b.mask, b.noise(1), torch.nan)
    out = gae(rewards, poisoned, b.mask, b.rows, b.num_rows)
    assert torch.isfinite(out.advantages).all() and torch.isfinite(out.returns).all()
    exactly(out.advantages[~b.mask], torch.zeros(int((~b.mask).sum())))


def slow_token_baseline(b: Ragged, rewards, logprobs, squares, tool_aware: bool) -> list[float]:
    """Row by row and token by token, from the definition."""
    facts = {}  # (group, time) -> list of (token, return, weight)
    at = 0
    for row, length in enumerate(b.lengths):
        spent, seen = 0.0, 0
        for t in range(length):
            token = at + t
            if b.mask[token]:
                spent += 1 - 2 * float(logprobs[token].exp()) + float(squares[token])
                to_go = sum(float(rewards[at + s]) for s in range(t, length) if b.mask[at + s])
                facts.setdefault((int(b.groups[row]), seen if tool_aware else t), []).append(
                    (token, to_go, spent)
                )
                seen += 1
        at += length
    out = [0.0] * len(b.mask)
    for entries in facts.values():
        total = sum(w for _, _, w in entries) + 1e-8
        baseline = sum(g * w for _, g, w in entries) / total if len(entries) > 1 else 0.0
        for token, to_go, _ in entries:
            out[token] = to_go - baseline
    return out


@examples
@given(ragged())
def test_optimal_token_baselines_equal_the_definition(b):
    rewards = torch.where(b.mask, b.noise(), 0.0)
    logprobs = b.logprobs(1)
    squares = (logprobs.exp().square() + 0.3).clamp(max=1)
    for function, tool_aware in (
        (optimal_token_baseline, False),
        (tir_optimal_token_baseline, True),
    ):
        out = function(rewards, logprobs, squares, b.mask, b.rows, b.num_rows, b.groups)
        near(
            out.advantages,
            torch.tensor(slow_token_baseline(b, rewards, logprobs, squares, tool_aware), dtype=F64),
            1e-8,
        )
        exactly(out.advantages[~b.mask], torch.zeros(int((~b.mask).sum())))


def test_long_rows_scan_exactly():
    """Rows of thousands of tokens, where a doubling scan could go wrong at its seams."""
    random.seed(0)
    lengths = [1, 3000, 2, 1025, 1024]
    rows, total = row_index(*lengths), sum(lengths)
    rewards, values = torch.randn(total, dtype=F64), torch.randn(total, dtype=F64)
    mask = torch.rand(total) > 0.3
    rewards = torch.where(mask, rewards, 0.0)
    out = gae(
        rewards, values, mask, rows, 5, gamma=0.999, lam=0.98, whiten_advantages=False
    ).advantages
    at = 0
    for length in lengths:
        part = slice(at, at + length)
        near(
            out[part],
            slow_gae(
                rewards[part].tolist(), values[part].tolist(), mask[part].tolist(), 0.999, 0.98
            ),
            1e-8,
        )
        at += length


def test_classmate_zero_and_answer_normalization():
    equal, groups, rows = torch.full((4,), 0.3), torch.tensor([0, 0, 1, 1]), row_index(2, 2, 2, 2)
    cot = torch.tensor([1, 0] * 4).bool()
    for f in (classmate.separated, classmate.non_neg, classmate.with_classmate, classmate.gdpo):
        exactly(
            f(equal, equal, groups, trues(8), cot, rows, normalize_by_std=True).advantages, [0] * 8
        )
    out = classmate.gdpo(
        column(1, 0, 7, 3), column(1, 2, 3, 4), groups, trues(8), cot, rows, normalize_answer=True
    ).advantages
    answer = out[~cot]
    near(answer.mean(), 0.0)
    near(answer.std(), 1.0, 1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantage_declares_its_columns_and_options(name):
    advantage = ADVANTAGES[name]
    parameters = inspect.signature(advantage.function).parameters
    required = {p.name for p in parameters.values() if p.default is inspect.Parameter.empty}
    assert required <= set(advantage.reads) <= set(parameters)
    assert set(advantage.options) <= set(parameters)
    assert (advantage.level == "token") == ("rows" in advantage.reads)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_estimator_runs_from_its_columns(name, dtype):
    """By name, as a driver calls it; on a batch with a masked row, and on an empty one."""
    for b in (
        Ragged(
            [2, 1, 3],
            torch.tensor([1, 1, 0, 1, 0, 1]).bool(),
            torch.tensor([4, 4, 1]),
            column(1, 0, 2),
            3,
        ),
        EMPTY,
    ):
        rewards = b.rewards.to(dtype)
        columns = {
            "rewards": {"a": rewards, "b": rewards + 1}
            if "named_rewards" in ADVANTAGES[name].needs
            else rewards,
            "groups": b.groups,
            "lengths": b.trainable,
            "on_policy": torch.ones(b.num_rows, dtype=torch.bool),
            "token_rewards": outcome_rewards(rewards, b.mask, b.rows, b.num_rows),
            "values": b.noise(1).to(dtype),
            "mask": b.mask,
            "rows": b.rows,
            "num_rows": b.num_rows,
            "greedy_rewards": rewards * 0,
            "old_logprobs": b.logprobs().to(dtype),
            "sum_probs_squared": b.logprobs().exp().to(dtype),
            "main_rewards": rewards,
            "classmate_rewards": rewards - 1,
            "cot_mask": b.mask,
        }
        estimator = ADVANTAGES[name]
        out = estimator.function(**{column: columns[column] for column in estimator.reads})
        for values, size in (
            [(out, b.num_rows)] if estimator.level == "row" else [(v, len(b.mask)) for v in out]
        ):
            assert (
                values.shape == (size,) and values.dtype == dtype and torch.isfinite(values).all()
            )


def test_integer_rewards_become_floats():
    assert torch.equal(
        grpo(torch.tensor([1, 0]), same_group(2)), grpo(torch.tensor([1.0, 0.0]), same_group(2))
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="the first at 1"):
        grpo(column(0, bad), same_group(2))
    with pytest.raises(ValueError, match="classmate_rewards"):
        classmate.separated(
            column(0, 1), column(0, bad), same_group(2), trues(2), trues(2), row_index(1, 1)
        )


def test_reward_on_a_masked_token_is_refused():
    rewards, mask, rows = column(0, 1), torch.tensor([True, False]), row_index(2)
    for call in (
        lambda: gae(rewards, rewards, mask, rows, 1),
        lambda: reinforce_pp(rewards, mask, rows, 1),
        lambda: remax(rewards, mask, rows, 1, column(0)),
    ):
        with pytest.raises(ValueError, match="masked token 1"):
            call()


def test_gdpo_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match="at least one"):
        gdpo({}, same_group(0))
    with pytest.raises(ValueError, match="names no reward"):
        gdpo({"a": column(1)}, same_group(1), {"b": 1.0}, whiten_over="rows")
    with pytest.raises(ValueError, match="lengths"):
        gdpo({"a": column(1, 2)}, same_group(2))
    with pytest.raises(ValueError, match="classmate_tokens"):
        classmate.separated(
            column(1),
            column(1),
            same_group(1),
            trues(1),
            trues(1),
            row_index(1),
            classmate_tokens="none",
        )  # type: ignore[arg-type]
