"""The stages of GRPO's family and of PPO, one by one, on models in this process."""

import copy
import math

import pytest
import torch
from method_runs import LIMIT, SMALL, Bound, bound, flat_weights, spread_out
from tiny_runs import config_of, random_batch

from postgrad.algorithms.losses import LOSSES
from postgrad.cluster.backends import open_models
from postgrad.data.feed import Feed
from postgrad.errors import RunError
from postgrad.methods.grpo import Grpo
from postgrad.methods.support.grpo_settings import kl_estimator
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.policy import LocalPolicy, split_updates
from postgrad.model.views import FULL
from postgrad.training.log import is_timing
from postgrad.types import Batch, Failure


class Spy:
    """A port that notes how it is called."""

    def __init__(self, port, **own) -> None:
        self.port, self.calls = port, []
        self.__dict__.update(own)

    def __getattr__(self, name: str):
        found = getattr(self.port, name)
        if not callable(found):
            return found

        def call(*arguments):
            self.calls.append((name, arguments))
            return found(*arguments)

        return call

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)


def gradient(policy: LocalPolicy, batch: Batch) -> torch.Tensor:
    """The gradient of one optimizer step, flat; cleared."""
    policy.accumulate(
        policy.objective.prepare(batch.select(range(len(batch)))), FULL, MetricAccumulator()
    )
    masters = policy.optimizer.masters.values()
    flat = torch.cat(
        [(torch.zeros_like(m) if m.grad is None else m.grad).flatten() for m in masters]
    ).double()
    policy.optimizer.adam.zero_grad(set_to_none=True)
    return flat


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
        b.host.policy.accumulate(b.method.prepare(part), FULL, accumulators[-1])
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
    b.method.settings.kl_coef = 0.0
    without = gradient(b.host.policy, batch)
    scale = float(without.abs().max())
    assert scale > 0 and float((with_kl - without).abs().max()) < 1e-4 * scale
    shake(b.host.policy)
    away = gradient(b.host.policy, batch)
    b.method.settings.kl_coef = 10.0
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
    for uid, baseline in zip(batch.rows["uid"], batch.rows["greedy_reward"].tolist(), strict=True):
        prompt = b.prompts.encode(b.feed.find(uid))
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
        lambda problems, texts: [
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
    b.scorer.score = lambda problems, texts: [
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
    assert numbers_of(b, batch) == [2, 3, 5, 6] and b.feed.cursor._position == 7
    assert b.metrics["refill/times"] == 2 and b.metrics["refill/groups"] == 4
    groups = dict(zip(batch.rows["group"].tolist(), batch.rows["uid"], strict=True))
    assert len(groups) == 4 and len(set(groups.values())) == 4, "a number for each group"
    assert all(batch.rows["group"].tolist().count(number) == 4 for number in groups)
    assert set(batch.rows["uid"]) <= b.feed.index.keys()
    b.feed = Feed(b.problems, shuffle=False)
    done = b.until("publish")
    assert b.metrics["grad_norm"] > 0 and len(done) == 16


def test_refills_are_bounded(tiny):
    b = refilling(tiny, {0, 1, 4, 6}, "method.max_refills=1")
    assert numbers_of(b, b.until("refill")) == [2, 3, 5]
    assert b.metrics["refill/times"] == 1 and b.metrics["refill/groups"] == 3


def test_nothing_is_refilled_when_every_group_teaches(tiny):
    b = refilling(tiny, set())
    assert (
        numbers_of(b, b.until("refill")) == [0, 1, 2, 3]
        and round(b.feed.epoch * len(b.problems)) == 4
        and b.metrics["refill/times"] == 0
    )


def test_step_without_signal_keeps_all_rows_and_changes_no_weight(tiny):
    b = refilling(tiny, set(range(90)), "method.max_refills=2")
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

    def score(problems, responses):
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


# ---- rollout correction


def apart(recipe: str, tiny, *overrides: str) -> Bound:
    """An engine that says it has weights of its own."""
    b = bound(recipe, tiny, *overrides)
    b.method.ports.engine = Spy(b.host.engine, shares_weights=False)
    return b


def test_correction_is_absent_when_the_engine_is_the_trainer(tiny):
    b = bound("grpo", tiny)
    batch = b.until()
    assert "correct" not in b.stages() and "rollout_weights" not in batch.tokens
    assert not any(name.startswith("correction/") for name in b.metrics)
    assert "correct" not in apart("grpo", tiny, "method.correction=none").stages()


def test_correction_is_on_when_the_engine_is_apart(tiny):
    b = apart("grpo", tiny)
    stages = b.stages()
    assert stages.index("compute_old_logprobs") < stages.index("correct") < stages.index("estimate")
    batch = b.until()
    assert {
        "correction/kl",
        "correction/k3_kl",
        "correction/effective_sample_size",
        "correction/mean",
    } <= b.metrics.keys()
    assert all(math.isfinite(value) for value in b.metrics.values())
    torch.testing.assert_close(
        batch.tokens["rollout_weights"], torch.ones(batch.num_tokens), rtol=1e-4, atol=1e-4
    )
    assert b.metrics["correction/effective_sample_size"] == pytest.approx(1, abs=1e-4)


def mismatched(tiny, *overrides: str) -> tuple[Bound, Batch]:
    """Runs up to `compute_old_logprobs`.

    The engine's first tokens then get a third of the probability.
    """
    b = apart("grpo", tiny, *overrides)
    batch = b.until("compute_old_logprobs")
    behavior = batch.tokens["old_logprobs"].clone()
    behavior[batch.response.offsets[:-1]] -= math.log(3)
    batch.tokens["behavior_logprobs"] = behavior
    return b, batch


def test_token_weights_are_truncated_and_multiply_the_loss(tiny):
    b, batch = mismatched(tiny)
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[batch.response.offsets[:-1]] = True
    batch = b.method.estimate(b.method.correct(batch, b.step_done), b.step_done)
    torch.testing.assert_close(
        batch.tokens["rollout_weights"], torch.where(first, 2.0, 1.0)
    )  # 3, truncated at 2
    assert b.metrics["correction/max"] == pytest.approx(2.0) and b.metrics["correction/kl"] < 0
    batch.tokens["rollout_weights"] = torch.full((batch.num_tokens,), 2.0)
    doubled = gradient(b.host.policy, batch)
    del batch.tokens["rollout_weights"]
    torch.testing.assert_close(doubled, 2 * gradient(b.host.policy, batch), rtol=1e-5, atol=1e-8)


def test_sequence_weights_and_intervals(tiny):
    b, batch = mismatched(tiny, "method.correction=sequence", "method.correction_bound='0.5_5'")
    weights = b.method.correct(batch, b.step_done).tokens["rollout_weights"]
    torch.testing.assert_close(weights, torch.full((batch.num_tokens,), 3.0))
    b, batch = mismatched(tiny, "method.correction=sequence", "method.correction_bound='0.5_2'")
    assert float(b.method.correct(batch, b.step_done).tokens["rollout_weights"].abs().max()) == 0.0


def test_rejection_narrows_the_mask_and_the_denominator(tiny):
    b, batch = mismatched(tiny, "method.correction=token", "method.rejection.token_k1='0.5_2.0'")
    batch = b.method.estimate(b.method.correct(batch, b.step_done), b.step_done)
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[batch.response.offsets[:-1]] = True
    assert torch.equal(batch.tokens["loss_mask"], ~first)
    share = len(batch) / batch.num_tokens
    assert b.metrics["correction/token_k1_rejected_fraction"] == pytest.approx(share, rel=1e-5)
    prepared = b.method.prepare(batch.select(range(len(batch))))
    kept = prepared.tokens["loss_mask"]
    torch.testing.assert_close(
        prepared.tokens["loss_weight"][kept],
        torch.full((int(kept.sum()),), 1 / int((~first).sum())),
    )
    assert float(batch.tokens["advantages"][first].abs().max()) == 0.0


def test_rules_without_weights(tiny):
    b, batch = mismatched(
        tiny, "method.correction=rejection", "method.rejection.token_k1='0.5_2.0'"
    )
    batch = b.method.estimate(b.method.correct(batch, b.step_done), b.step_done)
    assert (
        "rollout_weights" not in batch.tokens
        and "correction/effective_sample_size" not in b.metrics
    )
    assert (
        int((~batch.tokens["loss_mask"]).sum()) == len(batch)
        and b.metrics["correction/token_k1_rejected_fraction"] > 0
    )
    assert b.metrics["correction/kl"] < 0


def test_rejected_row_counts_in_the_baseline_of_its_group(tiny):
    overrides = (
        "method.correction=token",
        "method.rejection.seq_mean_k1='0.5_2.0'",
        "method.normalize_by_std=false",
    )
    b = apart("grpo", tiny, *overrides)
    batch = b.until("compute_old_logprobs")
    whole = batch.select(range(len(batch)))
    row = int(batch.rows["reward"].argmax())
    others = batch.row_index != row
    engine_less_sure = batch.tokens["old_logprobs"] - math.log(5)
    batch.tokens["behavior_logprobs"] = torch.where(
        others, batch.tokens["old_logprobs"], engine_less_sure
    )
    batch = b.method.estimate(b.method.correct(batch, b.step_done), b.step_done)
    whole = b.method.estimate(whole, b.step_done)
    assert float(batch.rows["reward"][row]) > 0
    assert not bool(batch.tokens["loss_mask"][~others].any()) and bool(
        batch.tokens["loss_mask"][others].all()
    )
    torch.testing.assert_close(
        batch.tokens["advantages"][others], whole.tokens["advantages"][others]
    )


# ---- what the loss adds, what it leaves out


def test_the_entropy_bonus_raises_the_entropy(tiny):
    b = bound(
        "grpo", tiny, "method.entropy_coef=1", "optimizer.lr=3e-3", value=lambda response: 0.0
    )
    batch = b.until("estimate")
    before = float(b.host.policy.logprobs(batch)["entropy"].mean())
    for number in (1, 2, 3):
        b.host.policy.update(batch, number)
    assert float(b.host.policy.logprobs(batch)["entropy"].mean()) > before + 0.01


def test_the_entropy_bonus_is_linear_and_of_the_policy_being_trained(tiny):
    b = bound("grpo", tiny)
    batch = b.until("estimate")
    gradients = []
    for coefficient in (0.0, 0.5, 1.0):
        b.method.settings.entropy_coef = coefficient
        gradients.append(gradient(b.host.policy, batch))
    bonus = gradients[2] - gradients[0]
    assert float(bonus.abs().max()) > 1e-3
    torch.testing.assert_close(gradients[1] - gradients[0], bonus / 2, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_without_an_advantage_are_left_out_only_where_they_move_nothing(loss, tiny):
    """The gradient equals that of computing all rows, which a vanishing entropy bonus forces."""
    own = ["method.loss_options.beta=0.5"] if loss == "dro" else []
    b = bound("grpo", tiny, f"method.loss={loss}", *own)
    batch = random_batch(12, groups=4, samples=4)
    batch.tokens["uniforms"] = torch.rand(
        batch.num_tokens, generator=torch.Generator().manual_seed(0)
    )
    silent = batch.sum_tokens(batch.tokens["advantages"].abs()) == 0
    assert bool(silent.any()) and bool((~silent).any())
    objective = b.host.policy.objective
    short = gradient(b.host.policy, batch)
    num_short = len(objective.prepare(batch.select(range(len(batch)))))
    objective.settings.entropy_coef = 1e-30
    assert len(objective.prepare(batch.select(range(len(batch))))) == len(batch)
    full = gradient(b.host.policy, batch)
    assert float((short - full).abs().max()) <= 1e-6 * float(full.abs().max())
    assert (num_short < len(batch)) == (loss not in ("dro", "kl_cov")), (
        "their penalties move rows without an advantage"
    )


def test_gdpo_names_a_part_that_the_verifier_does_not_report(tiny):
    b = bound("gdpo", tiny, "method.reward_weights.formt=1.0")
    with pytest.raises(
        RunError,
        match=r"method\.reward_weights\.formt.*did you mean format\?",
    ):
        b.until("estimate")


# ---- PPO's critic

PPO = ("optimizer.lr=1e-2", "method.critic_lr=1e-2", "training.steps=10")


@pytest.mark.slow
def test_warm_up_trains_the_critic_alone(tiny):
    b = bound("ppo", tiny, *PPO, "method.critic_warmup=2")
    before = flat_weights(b.host.policy)
    critic = b.host.models["critic"]
    for number in (1, 2):
        values = critic.values(batch := b.until(number=number))
        assert torch.equal(before, flat_weights(b.host.policy)), "bit for bit"
        assert not torch.equal(values, batch.tokens["values"])
        assert b.metrics["critic/grad_norm"] > 0 and "grad_norm" not in b.metrics
    b.until(number=3)
    assert not torch.equal(before, flat_weights(b.host.policy)) and b.metrics["grad_norm"] > 0


@pytest.mark.slow
def test_values_start_at_zero_and_are_learned(tiny):
    b = bound("ppo", tiny, *PPO, "method.critic_warmup=10", "method.critic_clip=10")
    batch = b.until("estimate")
    assert float(batch.tokens["values"].abs().max()) == 0.0
    assert b.metrics["critic/explained_variance"] == pytest.approx(0, abs=1e-3)
    # With gamma = lambda = 1 every token's return is its row's reward.
    torch.testing.assert_close(batch.tokens["returns"], batch.expand(batch.rows["reward"]))
    critic, losses = b.host.models["critic"], []
    for number in range(1, 9):
        batch.tokens["values"] = critic.values(batch)
        losses.append(critic.update(batch, number)["critic/loss"])
    assert losses[-1] < 0.5 * losses[0]


def test_explained_variance_is_logged_and_means_what_it_says(tiny):
    b = bound("ppo", tiny, *PPO)
    b.until(number=1)
    batch = b.until("estimate", number=2)
    values, returns = batch.tokens["values"].double(), batch.tokens["returns"].double()
    by_hand = 1 - float((returns - values).var()) / (float(returns.var()) + 1e-5)
    assert b.metrics["critic/explained_variance"] == pytest.approx(by_hand, abs=1e-5)


@pytest.mark.slow
def test_the_critic_comes_back_bit_for_bit(tiny, tmp_path):
    b = bound("ppo", tiny, *PPO)
    b.until(number=1)
    critic = b.host.models["critic"]
    batch = b.until("estimate", number=2)
    critic.save(str(tmp_path))
    at_save = critic.values(batch)
    critic.update(batch, 2)
    after = critic.values(batch)
    assert not torch.equal(at_save, after)
    for fresh in (critic, bound("ppo", tiny, *PPO).host.models["critic"]):
        fresh.load(str(tmp_path))
        assert torch.equal(fresh.values(batch), at_save)
        fresh.update(batch, 2)
        assert torch.equal(fresh.values(batch), after), "the optimizer continues too"


@pytest.mark.slow
def test_reference_and_critic_in_a_child_give_the_same_numbers(tiny):
    """cluster.backend=process: policy, engine, reference and critic run in a child process."""
    overrides = ("method.kl=loss", "method.kl_coef=0.1", "cluster.wait_s=300", *PPO)
    runs = []
    for where in ("local", "process"):
        config = config_of("ppo", tiny, *SMALL, *overrides, f"cluster.backend={where}")
        with open_models(config) as placed:
            b = Bound(config, placed=placed)
            results = []
            for number in (1, 2):
                batch = b.until(number=number)
                results.append(
                    {name: value for name, value in b.metrics.items() if not is_timing(name)}
                )
                results.append(
                    {
                        name: batch.tokens[name]
                        for name in ("values", "returns", "reference_logprobs", "advantages")
                    }
                )
            results.append(
                {"values": placed.models["critic"].values(batch), **placed.policy.weights()}
            )
            runs.append(results)
    local, process = runs
    for mine, there in zip(local, process, strict=True):
        assert mine.keys() == there.keys()
        for name in mine:
            same = (
                torch.equal(mine[name], there[name])
                if isinstance(mine[name], torch.Tensor)
                else mine[name] == there[name]
            )
            assert same, name
    assert float(local[3]["values"].abs().max()) > 0 and local[2]["kl/reference"] > 0, (
        "the second step saw the first"
    )
