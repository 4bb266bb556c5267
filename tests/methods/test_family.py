"""The stages of GRPO's family, one by one: the old policy, KL to the reference, ReMax, DAPO."""

import copy

import pytest
import torch
from method_runs import LIMIT, SMALL, Bound, bound, flat_weights, spread_out
from spies import Spy, gradient
from tiny_runs import config_of

from postgrad.data.problem_queue import ProblemQueue
from postgrad.errors import RunError
from postgrad.methods.grpo import Grpo
from postgrad.methods.support.grpo_settings import kl_estimator
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.policy import LocalPolicy, split_updates
from postgrad.model.port import FULL
from postgrad.types import Batch, Failure


def shake(policy: LocalPolicy, size: float = 0.05) -> None:
    """Move the policy away from its reference."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator))


# ---- the old policy


def test_one_update_needs_no_old_policy(tiny):
    b = bound("grpo", tiny)
    b.method.ports.policy = spy = Spy(b.host.policy)
    batch = b.until()
    assert b.stages() == [
        "draw",
        "compose",
        "sample",
        "enrich",
        "score",
        "estimate",
        "update",
        "publish",
    ]
    assert (
        spy.count("logprobs") == 0
        and spy.count("update") == 1
        and "old_logprobs" not in batch.tokens
    )
    assert b.metrics["policy/clip_fraction"] == 0.0 and b.metrics["policy/policy_kl"] == 0.0


def test_two_updates_compute_old_logprobs_once_and_start_at_ratio_one(tiny):
    b = bound("grpo", tiny, "training.updates_per_step=2", "optimizer.lr=2e-2")
    b.method.ports.policy = spy = Spy(b.host.policy)
    assert "compute_old_logprobs" in b.stages()
    batch = b.until("estimate")
    assert spy.count("logprobs") == 1
    first, second = split_updates(batch, 2)
    accumulators = []
    for part in (first, second):
        accumulators.append(MetricAccumulator())
        b.host.policy.accumulate(b.method.objective.prepare(part), FULL, accumulators[-1])
        b.host.policy.optimizer.step(2e-2)
    results = [metrics.result() for metrics in accumulators]
    assert results[0]["policy/clip_fraction"] == 0.0 and abs(results[0]["policy/policy_kl"]) < 1e-5
    assert results[1]["policy/clip_fraction"] > 0 and abs(results[1]["policy/policy_kl"]) > 1e-3
    assert b.metrics["engine/gap_max"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "remembers"),
    [
        (["grpo"], False),
        (["grpo", "method.kl=loss"], False),
        (["grpo", "method.kl=reward", "method.kl_estimator=k1"], True),
        (["grpo", "method.correction=token"], True),
        (["optimal_token_baseline"], True),
        (["kl_cov", "training.updates_per_step=1"], True),
        (["ppo", "training.updates_per_step=1"], False),
    ],
    ids=str,
)
def test_the_old_policy_is_asked_exactly_when_somebody_reads_it(overrides, remembers, tiny):
    b = bound(overrides[0], tiny, *overrides[1:])
    b.method.ports.policy = spy = Spy(b.host.policy)
    batch = b.until()
    assert (
        "compute_old_logprobs" in b.stages(),
        "old_logprobs" in batch.tokens,
        spy.count("logprobs"),
    ) == (
        remembers,
        remembers,
        int(remembers),
    )


# ---- KL to the reference


@pytest.mark.parametrize(
    ("place", "set_to", "used"),
    [("loss", "auto", "k3"), ("reward", "auto", "k1"), ("reward", "k2", "k2")],
)
def test_the_default_estimator_of_the_kl_depends_on_its_place(place, set_to, used, tiny):
    config = config_of("grpo", tiny, f"method.kl={place}", f"method.kl_estimator={set_to}")
    assert kl_estimator(config.method) == used


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["k2", "k3", "k1+", "k3+"])
def test_kl_in_the_loss_adds_nothing_at_the_reference_and_something_away_from_it(estimator, tiny):
    b = bound(
        "grpo", tiny, "method.kl=loss", "method.kl_coef=10", f"method.kl_estimator={estimator}"
    )
    batch = b.until("estimate")
    with_kl = gradient(b.host.policy, batch)
    b.host.policy.objective.settings.kl_coef = 0.0
    without = gradient(b.host.policy, batch)
    scale = float(without.abs().max())
    assert scale > 0 and float((with_kl - without).abs().max()) < 1e-4 * scale
    shake(b.host.policy)
    away = gradient(b.host.policy, batch)
    b.host.policy.objective.settings.kl_coef = 10.0
    assert float((gradient(b.host.policy, batch) - away).abs().max()) > 0.1 * scale


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["k2", "k3", "abs", "k1+"])
def test_kl_in_the_loss_pulls_towards_the_reference(estimator, tiny):
    """Without any advantage the penalty alone moves the policy: back to where it came from."""
    overrides = (
        "method.kl=loss",
        "method.kl_coef=1",
        f"method.kl_estimator={estimator}",
        "optimizer.lr=1e-2",
        "training.steps=100",
    )
    b = bound("grpo", tiny, *overrides, value=lambda response: 0.0)
    shake(b.host.policy)
    batch = b.until("estimate")
    assert float(batch.tokens["advantages"].abs().max()) == 0.0
    mask, reference = batch.tokens["loss_mask"], batch.tokens["reference_logprobs"]

    def distance() -> float:
        return float((b.host.policy.logprobs(batch)["logprobs"] - reference)[mask].square().mean())

    before = distance()
    for number in range(1, 16):
        b.host.policy.update(batch, number)
    assert distance() < 0.5 * before


def test_adapted_kl_coefficient_is_in_the_checkpoint(tiny):
    overrides = ("method.kl_target=0.1", "method.kl_coef=0.001")
    config = config_of("reinforce_pp", tiny, *SMALL, *overrides)
    method = Grpo(config)
    assert method.kl_coef == 0.001
    method.kl_coef = 0.00102048
    resumed = Grpo(config)
    resumed.load(copy.deepcopy(method.state()))
    assert resumed.kl_coef == 0.00102048


@pytest.mark.slow
def test_adaptive_coefficient_changes_with_each_step(tiny):
    """With KL 0, below the target, the coefficient falls by 0.2 · 16 rows / 10000 per step."""
    b = bound(
        "reinforce_pp", tiny, "method.kl_target=0.1", "method.kl_coef=0.5", "optimizer.lr=1e-9"
    )
    b.until(number=1)
    assert b.metrics["kl/coef"] == 0.5 and b.metrics["kl/reference"] == pytest.approx(0, abs=1e-5)
    b.until(number=2)
    assert b.metrics["kl/coef"] == pytest.approx(0.5 * (1 - 0.2 * 16 / 10000), rel=1e-9)
    fixed = bound("reinforce_pp", tiny, "method.kl_coef=0.5")
    for number in (1, 2):
        fixed.until(number=number)
        assert fixed.metrics["kl/coef"] == 0.5


def test_kl_in_the_reward_lowers_the_rewards_of_the_estimator(tiny):
    b = bound("reinforce_pp", tiny, "method.kl_coef=0.5")
    shake(b.host.policy)
    batch = b.until("compute_reference_logprobs")
    columns = b.method.advantage_columns(batch, b.step_done)
    kl = (batch.tokens["old_logprobs"] - batch.tokens["reference_logprobs"]) * batch.tokens[
        "loss_mask"
    ]
    expected = batch.rows["reward"] - 0.5 * batch.sum_tokens(kl)
    torch.testing.assert_close(columns["rewards"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        batch.sum_tokens(columns["token_rewards"]), expected, rtol=1e-5, atol=1e-5
    )
    assert float(kl.abs().max()) > 0.01 and b.metrics["kl/coef"] == 0.5


# ---- ReMax


@pytest.mark.slow
def test_remax_takes_the_reward_of_one_greedy_response_a_problem(tiny):
    b = bound("remax", tiny)
    b.method.ports.engine = spy = Spy(b.host.engine)
    batch = b.until("estimate")
    (_, sampled), (_, greedy) = spy.calls
    assert sampled[1].temperature == 1.0 and greedy[1].temperature == 0.0
    assert [len(request.seeds) for request in greedy[0]] == [1] * 4
    texts = [b.prompts.decode(ids) for ids in b.scorer.token_ids]
    assert texts == b.scorer.asked and len(texts) == len(batch) + 4
    for uid, baseline in zip(batch.rows["uid"], batch.rows["greedy_reward"].tolist(), strict=True):
        prompt = b.prompts.prompt(b.problem_queue.find(uid))
        (request,) = [r for r in greedy[0] if r.prompt == prompt]
        answer = b.host.engine.generate([request], greedy[1])[0][0]
        assert baseline == pytest.approx(spread_out(b.prompts.decode(answer.tokens)))
    expected = batch.expand(batch.rows["reward"] - batch.rows["greedy_reward"])
    torch.testing.assert_close(batch.tokens["advantages"], expected)


def test_remax_leaves_out_problems_whose_greedy_response_cannot_be_judged(tiny):
    b = bound("remax", tiny)
    scorer, samples = b.scorer.score, b.config.rollout.samples
    b.scorer.score = (
        # The first call scores the samples, the second one greedy response per problem.
        lambda problems, texts, *_: [
            Failure("test", "refused") if len(texts) == 4 and i == 0 else verdict
            for i, verdict in enumerate(scorer(problems, texts))
        ]
    )
    assert samples > 1
    batch = b.until("estimate")
    assert (
        len(batch) == 3 * samples
        and b.metrics["reward/failures"] == samples
        and len(b.step_done.failed) == 1
    )
    assert b.step_done.failed[0].rows["failure"] == ["greedy response: test: refused"] * samples
    assert not set(b.step_done.failed[0].rows["uid"]) & set(batch.rows["uid"])
    assert bool(batch.rows["greedy_reward"].isfinite().all())


@pytest.mark.parametrize(("recipe", "is_left_out"), [("grpo", True), ("reinforce_pp", False)])
def test_a_row_whose_group_failed_has_nothing_to_be_compared_with(recipe, is_left_out, tiny):
    b = bound(recipe, tiny, "rollout.samples=3", "reward.max_failure_rate=0.9")
    scorer = b.scorer.score
    b.scorer.score = lambda problems, texts, *_: [
        Failure("test", "refused") if i in (0, 2) else verdict
        for i, verdict in enumerate(scorer(problems, texts))
    ]
    batch = b.until("update")
    groups = batch.rows["group"].tolist()
    alone = groups.index(next(group for group in groups if groups.count(group) == 1))
    advantages = batch.tokens["advantages"].abs()
    totals = batch.sum_tokens(advantages)
    assert bool(totals[alone] == 0) == is_left_out
    assert float(totals.sum()) > 0


def test_a_validation_counts_what_could_not_be_judged(tiny):
    b = bound("grpo", tiny)
    b.scorer.value = lambda _: None
    results = b.method.validate(b.problems[:3])
    assert results == {
        "validation/accuracy": 0.0,
        "validation/sampled_accuracy": 0.0,
        "validation/failures": 6.0,
    }


def test_remax_learns_from_one_sample_a_problem(tiny):
    b = bound("remax", tiny, "rollout.samples=1", "optimizer.lr=1e-3")
    before = flat_weights(b.host.policy)
    b.until()
    assert b.metrics["grad_norm"] > 0 and not torch.equal(before, flat_weights(b.host.policy))


# ---- DAPO


def refilling(tiny, flat: set[int], *overrides: str) -> Bound:
    """DAPO where the problems of these numbers give every response the same reward."""
    b = bound("dapo", tiny, "method.overlong_buffer=0", "training.updates_per_step=1", *overrides)
    b.scorer.flat = {b.problems[i].uid for i in flat}
    return b


def numbers_of(b: Bound, batch: Batch) -> list[int]:
    uids = [p.uid for p in b.problems]
    return sorted({uids.index(uid) for uid in batch.rows["uid"]})


def test_groups_without_signal_are_replaced_by_further_problems(tiny):
    b = refilling(tiny, {0, 1, 4})
    batch = b.until("refill")  # 0 1 2 3, then 4 5, then 6
    assert numbers_of(b, batch) == [2, 3, 5, 6] and b.problem_queue.cursor._position == 7
    assert b.metrics["refill/times"] == 2 and b.metrics["refill/groups"] == 4
    groups = dict(zip(batch.rows["group"].tolist(), batch.rows["uid"], strict=True))
    assert len(groups) == 4 and len(set(groups.values())) == 4, "a number for each group"
    assert all(batch.rows["group"].tolist().count(number) == 4 for number in groups)
    assert set(batch.rows["uid"]) <= b.problem_queue.index.keys()
    b.problem_queue = ProblemQueue(b.problems, shuffle=False)
    done = b.until("publish")
    assert b.metrics["grad_norm"] > 0 and len(done) == 16


def test_refills_are_bounded(tiny):
    b = refilling(tiny, {0, 1, 4, 6}, "method.max_refills=1")
    assert numbers_of(b, b.until("refill")) == [2, 3, 5]
    assert b.metrics["refill/times"] == 1 and b.metrics["refill/groups"] == 3


def test_the_reward_counts_the_groups_that_are_left_out(tiny):
    b = refilling(tiny, {0, 1, 4, 6}, "method.max_refills=1")
    scored = []
    plain = b.scorer.score

    def score(problems, responses, *_):
        verdicts = plain(problems, responses)
        scored.extend(verdict.value for verdict in verdicts)
        return verdicts

    b.scorer.score = score
    batch = b.until("refill")
    assert len(scored) == 2 * len(batch) == 6 * 4
    assert b.metrics["reward/mean"] == pytest.approx(sum(scored) / len(scored))
    kept = float(batch.rows["reward"].mean())
    assert b.metrics["refill/kept_reward"] == pytest.approx(kept) != b.metrics["reward/mean"]


def test_metrics_of_sampling_are_means_over_all_refills(tiny):
    b = refilling(tiny, {0, 1, 4})
    rounds = []

    def enrich(batch, step):
        rounds.append(len(batch))
        step.metrics["round"] = float(len(rounds))
        step.metrics["rows"] = float(sum(rounds))
        return batch

    b.method.enrich = enrich
    b.method.counts = (*b.method.counts, "rows")
    b.until("refill")
    assert rounds == [16, 8, 4]
    assert b.metrics["round"] == pytest.approx((16 * 1 + 8 * 2 + 4 * 3) / 28)
    assert b.metrics["rows"] == 28


def test_a_problem_that_is_drawn_again_in_a_refill_has_other_responses(tiny):
    b = refilling(tiny, {0, 1, 2, 3}, "method.max_refills=2")
    b.problem_queue = ProblemQueue(b.problems[:4], shuffle=False)
    batch = b.until("refill")
    assert b.metrics["refill/times"] == 2 and len(batch) == 3 * 16
    responses = [tuple(ids.tolist()) for ids in batch.response.split()]
    assert len(set(zip(batch.rows["uid"], responses, strict=True))) > 2 * 16
    assert len(set(batch.names)) == len(batch)


def test_a_method_may_set_rewards_of_refills_as_a_list(tiny):
    b = refilling(tiny, {0, 1})
    plain = b.method.score

    def score(batch, step):
        """As the driver, which makes tensors after a stage: not of the rows of a refill."""
        batch = plain(batch, step)
        if step.num_scored:
            batch.rows["reward"] = batch.rows["reward"].tolist()
            batch.rows["reward/answer"] = batch.rows["reward/answer"].tolist()
        return batch

    b.method.score = score
    batch = b.until("refill")
    assert numbers_of(b, batch) == [2, 3, 4, 5]
    assert batch.rows["reward"].dtype == batch.rows["reward/answer"].dtype == torch.float32


def test_a_refill_that_cannot_be_scored_does_not_end_the_run(tiny):
    """Problems 4 and 5 fail: all rows of the first refill, a small part of those of the step."""
    b = refilling(tiny, {0, 1}, "method.max_refills=2")
    bad = {problem.uid for problem in b.problems[4:6]}
    plain = b.scorer.score

    def score(problems, responses, *more):
        verdicts = plain(problems, responses, *more)
        pairs = zip(problems, verdicts, strict=True)
        return [Failure("test", "no answer") if p.uid in bad else v for p, v in pairs]

    b.scorer.score = score
    b.method.enrich = lambda batch, step: step.metrics.update(rows=float(len(batch))) or batch
    batch = b.until("refill")
    assert numbers_of(b, batch) == [2, 3, 6, 7]
    assert b.metrics["reward/failures"] == 8 and b.metrics["refill/times"] == 2
    assert b.metrics["rows"] == pytest.approx((16 * 16 + 8 * 8) / 24), "of the scored rows"
    bad |= {problem.uid for problem in b.problems}
    with pytest.raises(RunError, match="100%"):
        b.until("refill")
    bad -= {problem.uid for problem in b.problems[:4]}
    b.problem_queue = ProblemQueue(b.problems, shuffle=False)
    b.config.reward.max_failure_rate = 0.3
    with pytest.raises(RunError, match="33%"):  # 8 of 24
        b.until("refill")


def test_nothing_is_refilled_when_every_group_teaches(tiny):
    b = refilling(tiny, set())
    assert (
        numbers_of(b, b.until("refill")) == [0, 1, 2, 3]
        and round(b.problem_queue.epoch * len(b.problems)) == 4
        and b.metrics["refill/times"] == 0
    )


@pytest.mark.parametrize(
    "more",
    [
        ("method.overlong_buffer=0",),
        ("method.overlong_buffer=5", "method.refill_by=score"),  # rewards differ by the penalty
        ("method.overlong_buffer=5", "method.refill_by=score", "method.entropy_coef=0.1"),
    ],
)
def test_step_without_signal_keeps_all_rows_and_changes_no_weight(tiny, more):
    b = refilling(tiny, set(range(90)), "method.max_refills=2", *more)
    before = flat_weights(b.host.policy)
    batch = b.until()
    assert (
        b.metrics["refill/times"] == 2 and b.metrics["refill/groups"] == 0 and len(batch) == 3 * 16
    )
    assert float(batch.tokens["advantages"].abs().max()) == 0.0 and torch.equal(
        before, flat_weights(b.host.policy)
    )


def test_failures_of_all_refills_are_counted(tiny):
    b = refilling(tiny, {0, 1, 4}, "reward.max_failure_rate=1.0")
    b.scorer.value = lambda response: (
        None if sum(map(ord, response)) % 3 == 0 else spread_out(response)
    )
    batch = b.until("refill")
    left_out = sum(len(failed) for failed in b.step_done.failed)
    assert len(b.step_done.failed) > 1 and b.metrics["reward/failures"] == left_out > 0
    assert not any(batch.rows["failure"])


def test_parts_that_only_some_refills_report_do_not_stop_the_run(tiny):
    b = refilling(tiny, {0, 1})
    plain = b.scorer.score

    def score(problems, responses, *_):
        verdicts = plain(problems, responses)
        for verdict in verdicts if len(responses) == 8 else []:
            verdict.parts["late"] = 1.0
        return verdicts

    b.scorer.score = score
    batch = b.until("refill")
    late = batch.rows["reward/late"]
    assert int(late.isnan().sum()) == 8 and len(batch) == 16


def test_the_overlong_penalty_is_a_part_of_the_reward(tiny):
    b = bound(
        "dapo",
        tiny,
        "method.overlong_buffer=4",
        "training.problems_per_step=8",
        "rollout.samples=8",
    )
    batch = b.until("score")
    lengths = batch.response.lengths.tolist()
    assert len(set(lengths)) > 3
    expected = torch.tensor([-max(0, length - (LIMIT - 4)) / 4 for length in lengths])
    torch.testing.assert_close(batch.rows["reward/overlong"], expected)
    plain = torch.tensor([spread_out(text) for text in batch.rows["text"]])
    torch.testing.assert_close(batch.rows["reward"], plain + expected)
