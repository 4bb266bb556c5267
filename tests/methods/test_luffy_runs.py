"""LUFFY: rewards and advantages, invariances, complete runs and what they learn."""

import random
from dataclasses import replace

import pytest
import torch
from jsonl import write_jsonl
from luffy_settings import CLIP, MEAN
from method_runs import SMALL, bound, run
from spies import Spy
from test_gradient_property import (
    assert_one_gradient,
    batch_with_all_columns,
    gradient,
    policy_of,
)
from tiny_runs import config_of, metrics_of, overrides_of

from postgrad.cli.main import main
from postgrad.errors import RunError
from postgrad.methods import luffy
from postgrad.methods.method import Step
from postgrad.model.load.tiny import make_tiny
from postgrad.training.prepare import prepare
from postgrad.types import DEMONSTRATION, POLICY, Batch, Trajectory

# ---- rewards and advantages


def estimated(model, rewards, sources, *overrides: str, finish=None):
    """Token advantages of one group of rows of three tokens, by the method's own estimate."""
    b = bound("luffy", model, *overrides)
    rows = [
        Trajectory(
            "p",
            [1],
            [2, 3, 4],
            0,
            i,
            source=s[0] if len(set(s)) == 1 else POLICY,
            token_source=s,
            finish=(finish or {}).get(i, "stop"),
        )
        for i, s in enumerate(sources)
    ]
    batch = Batch.of(rows)
    batch.rows["reward"] = torch.tensor(rewards)
    return b.method.estimate(batch, Step(1)).tokens["advantages"].view(len(rows), 3)


D, P = [DEMONSTRATION] * 3, [POLICY] * 3


BEGUN = [DEMONSTRATION, POLICY, POLICY]


def test_a_row_that_somebody_began_is_not_in_the_split_baseline(tiny):
    """Rows 2 and 3 have no given tokens: mean .5.

    With the row that has a prefix it would be 2/3.
    """
    split = estimated(tiny, [1.0, 1.0, 1.0, 0.0], [D, BEGUN, P, P], "method.advantage=grpo_split")
    assert split[:, 0].tolist() == [0.5, 0.5, 0.5, -0.5]
    assert estimated(tiny, [1.0, 1.0, 1.0, 0.0], [D, BEGUN, P, P])[:, 0].tolist() == [
        0.25,
        0.25,
        0.25,
        -0.75,
    ]


@pytest.mark.slow
def test_what_may_be_done_to_advantages(tiny):
    rewards, sources = [1.0, 0.0, 0.0, 0.0], [BEGUN, P, P, P]
    scaled = estimated(
        tiny, rewards, sources, "method.off_advantage_scale=2", "method.on_advantage_scale=0.5"
    )
    assert scaled[0].tolist() == [1.5, 0.375, 0.375] and scaled[1].tolist() == [-0.125] * 3
    fixed = estimated(tiny, rewards, sources, "method.prefix_advantage=2")
    assert fixed[0].tolist() == [0.5, 0.75, 0.75]
    cut = estimated(
        tiny, rewards, sources, "method.truncated_advantage=false", finish={1: "length"}
    )
    assert cut[:, 1].tolist() == [0.75, 0.0, -0.25, -0.25]
    sft = estimated(tiny, [1.0] * 4, [BEGUN, D, P, P], "method.sft_coef=0.3")
    assert sft.flatten().tolist() == pytest.approx([0.3, 0, 0, 0.3, 0.3, 0.3] + [0] * 6)


@pytest.mark.slow
def test_a_wrong_demonstration_is_pushed_down_or_masked(tiny):
    """Kept, as in the original: -k/n. Masked: its tokens are in no loss and no denominator."""

    def judged(*overrides: str) -> Batch:
        b = bound("luffy", tiny, *overrides)
        demonstrations = {p.demonstrations[0] for p in b.problems}
        b.scorer.value = lambda response: 0.0 if response in demonstrations else 1.0
        return b.until("estimate")

    kept, masked = judged(), judged("method.wrong_demonstrations=mask")
    given = kept.tokens["token_source"] == DEMONSTRATION
    assert kept.tokens["advantages"][given].tolist() == [-0.75] * int(given.sum()) and bool(
        kept.tokens["loss_mask"].all()
    )
    assert (
        torch.equal(masked.tokens["loss_mask"], ~given)
        and float(masked.tokens["advantages"][given].abs().max()) == 0.0
    )
    assert torch.equal(masked.tokens["advantages"][~given], kept.tokens["advantages"][~given])


def test_reward_of_own_rows_is_logged_separately(tiny):
    b = bound("luffy", tiny, value=lambda response: 0.0)
    b.scorer.value = lambda response: (
        1.0 if response in {p.demonstrations[0] for p in b.problems} else 0.25
    )
    batch = b.until("score")
    assert (
        b.metrics["reward/demonstration"] == b.metrics["reward/with_demonstration_tokens"] == 1.0
        and b.metrics["reward/on_policy"] == 0.25
    )
    given = float((batch.tokens["token_source"] == DEMONSTRATION).sum())
    assert b.metrics["off_policy/token_share"] == pytest.approx(given / batch.num_tokens)


def test_reward_of_own_rows_counts_the_groups_that_are_left_out(tiny):
    b = bound("luffy", tiny, "method.max_refills=1", "training.updates_per_step=1")
    b.scorer.flat = {b.problems[0].uid, b.problems[1].uid}
    scored = []
    plain = b.method.ports.scorer.score

    def score(problems, responses, *more):
        verdicts = plain(problems, responses, *more)
        demonstrations = {problem.demonstrations[0] for problem in b.problems}
        pairs = zip(responses, verdicts, strict=True)
        scored.extend(one.value for text, one in pairs if text not in demonstrations)
        return verdicts

    b.method.ports.scorer.score = score
    batch = b.until("refill")
    own = batch.rows["source"] == POLICY
    assert b.metrics["refill/times"] == 1 and len(scored) > int(own.sum())
    assert b.metrics["reward/on_policy"] == pytest.approx(sum(scored) / len(scored))
    given = float((batch.tokens["token_source"] == DEMONSTRATION).sum())
    assert b.metrics["off_policy/token_share"] == pytest.approx(given / batch.num_tokens)


def test_demonstrations_need_no_forward_pass_before_the_update(tiny):
    overrides = ("training.updates_per_step=2",)
    b = bound("luffy", tiny, *overrides)
    b.method.ports.policy = spy = Spy(b.host.policy)
    batch = b.until("compute_old_logprobs")
    asked = [arguments[0] for name, arguments in spy.calls if name == "logprobs"]
    assert [len(rows) for rows in asked] == [12] and set(asked[0].rows["source"].tolist()) == {
        POLICY
    }
    own = batch.tokens["token_source"] == POLICY
    whole = b.host.policy.logprobs(batch)["logprobs"]
    assert torch.allclose(batch.tokens["old_logprobs"][own], whole[own], atol=1e-6)
    assert float(batch.tokens["old_logprobs"][~own].abs().max()) == 0.0


# ---- invariances


VARIANTS = {
    "luffy": (),
    "luffy entropy": ("method.entropy_coef=0.1",),
    "luffy token mean": (MEAN, "method.max_probability=0.055"),
    "luffy reshaped": ("method.on_shape=p_div_p", *CLIP),
    "luffy_rl_sft": ("method.entropy_coef=0.1",),
    "luffy_rl_sft coef": ("method.sft_coef=1.0", "method.aggregation=seq-mean-token-mean"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_any_split_and_any_order_give_one_gradient(name, tiny, loaded):
    """T14: with whole and partial demonstrations in every micro-batch or only in some."""
    policy, batch = (
        policy_of(name.split()[0], tiny, loaded, *VARIANTS[name]),
        batch_with_all_columns(),
    )
    draw = random.Random(3)
    lengths = batch.response.lengths.tolist()
    given = [draw.choice([0, 0, n, draw.randint(0, n)]) for n in lengths]
    batch.tokens["token_source"] = torch.tensor(
        [
            DEMONSTRATION if i < g else POLICY
            for g, n in zip(given, lengths, strict=True)
            for i in range(n)
        ],
        dtype=torch.int8,
    )
    batch.tokens["behavior_logprobs"][batch.tokens["token_source"] == DEMONSTRATION] = 0.0
    assert 0 < sum(given) < batch.num_tokens
    assert_one_gradient(lambda rows, budget: gradient(policy, rows, budget), batch)


# ---- whole runs


@pytest.mark.slow
def test_groups_without_signal_stop_a_run_that_cannot_learn_and_an_sft_loss_is_signal(
    tiny, tmp_path
):
    verifier = tmp_path / "same.py"
    verifier.write_text("def same(response, problem):\n    return 1.0\n")
    overrides = (
        f"reward.verifier={verifier}:same",
        "training.max_flat_steps=2",
        "training.steps=3",
    )
    with pytest.raises(RunError, match="no learning signal for 2 steps"):
        run("luffy", tiny, tmp_path / "flat", *overrides)
    lines = run("luffy_rl_sft", tiny, tmp_path / "sft", *overrides)
    assert len(lines) == 3 and all(
        line["off_policy/loss"] > 0 and line["on_policy/loss"] == 0 for line in lines
    )


@pytest.mark.parametrize(
    ("recipe", "words", "line"),
    [
        ("luffy", (), "demonstrations: {} of 91 problems have one that fits in 6 tokens"),
        ("luffy", ("method.num_demonstrations=0",), None),
        ("exgrpo", (), "replays: 2 of the 4 problems of a step"),
    ],
)
def test_the_start_says_how_much_there_is(recipe, words, line, tiny):
    config = config_of(recipe, tiny, *SMALL, *words)
    inputs = prepare(config)
    supply = inputs.method.supply(inputs.encoder, inputs.train)
    if line is None:
        assert supply is None
        return
    problems = inputs.train
    num = sum(
        any(len(ids) <= 6 for ids in inputs.encoder.demonstrations(problem)) for problem in problems
    )
    assert supply.line.startswith(line.format(num)) and supply.line in inputs.notes


def test_only_the_first_demonstrations_are_encoded(tiny, monkeypatch):
    config = config_of("luffy", tiny, *SMALL)
    inputs = prepare(config)
    method = inputs.method
    monkeypatch.setattr(luffy, "MAX_COUNTED", 10)
    assert "of the first 10 problems" in method.supply(inputs.encoder, inputs.train).line
    unfit = [replace(p, demonstrations=("1" * 50,)) for p in inputs.train[:20]]
    supply = method.supply(inputs.encoder, [*unfit, *inputs.train[:1]])
    assert supply.num == 1 and "1 of 21 problems" in supply.line


@pytest.fixture
def copying(tmp_path):
    """Task: write the first digit three times.

    1 in 100,000 responses of an untrained model does.
    """
    for name, numbers in (
        ("train", [i for i in range(100) if i % 7]),
        ("validation", range(0, 100, 7)),
    ):
        rows = [
            {
                "uid": f"{i:02}",
                "data_source": "copy",
                "prompt": [{"role": "user", "content": f"{i // 10}+{i % 10}="}],
                "reward_model": {"ground_truth": f"{i // 10}" * 3},
                "target": [{"role": "assistant", "content": f"{i // 10}" * 3}],
            }
            for i in numbers
        ]
        write_jsonl(tmp_path / f"{name}.jsonl", *rows)
    (tmp_path / "exact.py").write_text(
        "def exact(response, problem):\n    return float(response == problem.ground_truth)\n"
    )
    return (
        *(
            f"data.train={tmp_path}/train.jsonl",
            f"data.validation={tmp_path}/validation.jsonl",
            f"reward.verifier={tmp_path}/exact.py:exact",
        ),
        *(
            "training.steps=50",
            "training.problems_per_step=16",
            "rollout.samples=8",
            "optimizer.lr=5e-3",
        ),
        *("training.checkpoint_every=1000", "training.max_flat_steps=1000"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["luffy", pytest.param("grpo", marks=pytest.mark.nightly)])
def test_luffy_learns_what_grpo_never_sees_a_success_of(recipe, copying, tmp_path):
    """The same model, data, seeds, steps and rate. Validation problems were never shown."""
    fresh = make_tiny(tmp_path / "fresh", seed=0, layers=2, width=32)
    lines = run(recipe, fresh, tmp_path / recipe, *copying)
    steps = [line for line in lines if "reward/mean" in line]
    before, *_, after = [line for line in lines if "validation/accuracy" in line]
    assert len(steps) == 50 and before["validation/accuracy"] == 0.0
    if recipe == "grpo":
        assert all(line["reward/mean"] == 0.0 for line in steps)
        assert after["validation/accuracy"] == 0.0
        return
    alone = [line["reward/on_policy"] for line in steps]
    assert max(alone[:5]) < 0.02 and sum(alone[-5:]) / 5 > 0.3, alone
    assert after["validation/accuracy"] > 0.5
    assert steps[-1]["off_policy/ratio"] > steps[0]["off_policy/ratio"] + 0.3, (
        "the demonstrations became likely"
    )


@pytest.mark.slow
def test_sft_then_rl_is_one_command(tiny, tmp_path):
    overrides = overrides_of(
        tiny,
        *SMALL,
        f"runs={tmp_path}",
        "reward.max_failure_rate=1.0",
        'warmup.overrides=["training.steps=2","training.problems_per_step=4"]',
    )
    assert main(["train", "luffy_sft_rl", *overrides]) == 0
    first, second = metrics_of(tmp_path / "test-warmup"), metrics_of(tmp_path / "test")
    assert all("sft/loss" in line for line in first) and len(first) == len(second) == 2
    assert all(line["off_policy/token_share"] == 0 and "sft/loss" not in line for line in second)
    assert (
        str(tmp_path / "test-warmup" / "checkpoints" / "step-2" / "policy")
        in (tmp_path / "test" / "config.yaml").read_text()
    )
