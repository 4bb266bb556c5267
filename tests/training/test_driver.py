"""The driver end to end on a tiny model: it learns, writes its files, and stops if it cannot."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from jsonl import write_jsonl
from refused import refused
from tiny_runs import config_of, metrics_of, overrides_of, stock_model, toy_run

from postgrad.cli.main import main
from postgrad.config.compose import compose
from postgrad.errors import RunError
from postgrad.methods import find_method
from postgrad.model.load.tiny import make_tiny
from postgrad.training.driver import train
from postgrad.training.report import Reporter

STAGES = ("compose", "sample", "enrich", "score", "estimate", "update", "publish")
SMALL = (
    *toy_run(steps=100, response_tokens=3),
    "optimizer.lr=1e-2",
)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A new model: nearly uniform, so the rewards of every group differ."""
    return make_tiny(tmp_path_factory.mktemp("models") / "fresh", seed=0, layers=2, width=32)


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory):
    file = tmp_path_factory.mktemp("verifiers") / "mine.py"
    file.write_text(
        "def threes(response, problem):\n"
        "    return {'score': response.count('3') / 3, 'length': len(response)}\n"
        "def zero(response, problem):\n"
        "    return 0.0\n"
        "def picky(response, problem):\n"
        "    if response[:1] in '01234567':\n"
        "        raise ValueError('cannot read this')\n"
        "    return float(len(response))\n"
    )
    return file


def rows_of_step(folder, step: int) -> list[dict]:
    return pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet").to_pylist()


@pytest.fixture(scope="module")
def learned(fresh, verifiers, tmp_path_factory):
    """Train GRPO to write threes; return (folder, metrics of steps, metrics of validations)."""
    runs = tmp_path_factory.mktemp("runs")
    overrides = (
        "training.steps=25",
        "optimizer.lr=3e-3",
        "training.problems_per_step=8",
        "rollout.samples=8",
        "training.checkpoint_every=10",
        f"runs={runs}",
    )
    more = (
        "data.validation=arithmetic:1:digits:test",
        "training.validate_every=10",
        "training.updates_per_step=2",
    )
    config = config_of(
        "grpo", fresh, *SMALL, *overrides, *more, f"reward.verifier={verifiers}:threes"
    )
    result = train(config, Reporter())
    assert result.step == 25 and not result.interrupted and result.folder == runs / "test"
    lines = metrics_of(result.folder)
    return (
        result.folder,
        [line for line in lines if "reward/mean" in line],
        [line for line in lines if "validation/accuracy" in line],
    )


@pytest.mark.slow
def test_grpo_learns(learned):
    _, steps, validations = learned
    rewards = [line["reward/mean"] for line in steps]
    assert sum(rewards[:3]) / 3 < 0.2, rewards
    assert sum(rewards[-3:]) / 3 > 0.6, rewards
    assert validations[-1]["validation/accuracy"] > validations[0]["validation/accuracy"] + 0.4
    assert (
        validations[-1]["validation/sampled_accuracy"]
        > validations[0]["validation/sampled_accuracy"] + 0.4
    )
    assert steps[-1]["entropy"] < steps[0]["entropy"]


@pytest.mark.slow
def test_run_folder_has_the_documented_files(learned):
    folder, _, _ = learned
    assert {p.name for p in folder.iterdir() if not p.name.startswith(".")} == {
        "config.yaml",
        "metrics.jsonl",
        "rollouts",
        "checkpoints",
        "eval",
        "events.jsonl",
        "inputs.json",
        "tokenizer.json",
    }
    assert sorted(p.name for p in (folder / "rollouts").iterdir()) == [
        f"step-{n:06d}.parquet" for n in range(1, 26)
    ]
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {
        "step-20",
        "step-25",
        "latest",
    }  # the newest two
    assert (folder / "checkpoints" / "latest").read_text().strip() == "step-25"
    last = folder / "checkpoints" / "step-25"
    assert {p.name for p in last.iterdir()} == {
        "policy",
        "optimizer.safetensors",
        "method.bin",
        "state.json",
    }
    assert json.loads((last / "state.json").read_text())["step"] == 25
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in (last / "policy").iterdir()
    }
    assert torch.isfinite(
        stock_model(last / "policy")(input_ids=torch.tensor([[1, 2]])).logits
    ).all()


@pytest.mark.slow
def test_metrics_have_the_names_that_the_page_reads(learned):
    _, steps, validations = learned
    assert [line["step"] for line in steps] == list(range(1, 26))
    assert [line["step"] for line in validations] == [0, 10, 20, 25]
    expected = {
        "step",
        "time",
        "reward/mean",
        "reward/std",
        "reward/length",
        "reward/failures",
        "response/length",
        "response/truncated",
        "entropy",
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_second",
        "epoch",
        "advantages/rows_with_signal",
        "step_s",
        "memory_gib",
        *(f"stage/{name}_s" for name in (*STAGES[:5], "old_logprobs", *STAGES[5:])),
    }
    for line in steps:
        assert expected <= line.keys(), expected - line.keys()
        assert all(isinstance(value, int | float) for value in line.values())
    assert steps[-1]["epoch"] == pytest.approx(25 * 8 / 90, abs=0.05)


def test_rollouts_have_tokens_rewards_and_advantages(learned):
    folder, steps, _ = learned
    rows = rows_of_step(folder, 25)
    assert len(rows) == 64
    for row in rows:
        n = len(row["response"])
        assert (
            1 <= n <= 3
            and len(row["behavior_logprobs"])
            == len(row["advantages"])
            == len(row["loss_mask"])
            == n
        )
        assert (
            row["source"] == "policy"
            and row["finish"] in ("stop", "length")
            and row["failure"] == ""
        )
        assert row["reward"] == pytest.approx(row["text"].count("3") / 3) and row[
            "reward/length"
        ] == len(row["text"])
    assert steps[-1]["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 64)
    groups = {row["group"]: row["uid"] for row in rows}
    assert len(groups) == 8 and all(row["uid"] == groups[row["group"]] for row in rows)
    one = [row["advantages"][0] for row in rows if row["group"] == 0]
    assert sum(one) == pytest.approx(0, abs=1e-4)


def test_stored_configuration_is_resolved_and_composes_to_itself(learned):
    folder, _, _ = learned
    text = (folder / "config.yaml").read_text()
    assert "auto" not in [
        line.split(": ")[-1]
        for line in text.splitlines()
        if line.strip().startswith(("device", "dtype"))
    ]
    config = compose(str(folder / "config.yaml"), [], lambda name: find_method(name).Settings)
    assert config.name == "test" and config.optimizer.lr == 3e-3 and config.method.name == "grpo"


@pytest.mark.slow
def test_run_of_an_older_version_resumes_with_the_default_of_new_settings(
    fresh, verifiers, tmp_path
):
    overrides = (*SMALL, f"runs={tmp_path}", f"reward.verifier={verifiers}:threes")
    file = (
        train(config_of("grpo", fresh, *overrides, "training.steps=1"), Reporter()).folder
        / "config.yaml"
    )
    older = [
        line
        for line in file.read_text().splitlines()
        if line.strip() not in ("max_grad_norm: 1.0", "clip_low: 0.2")
    ]
    file.write_text("\n".join(older) + "\n")
    with refused("changed", "optimizer.max_grad_norm", shows=r"max_grad_norm was 1.0, now 3.0\)"):
        train(
            config_of("grpo", fresh, *overrides, "training.steps=2", "optimizer.max_grad_norm=3"),
            Reporter(),
        )
    assert train(config_of("grpo", fresh, *overrides, "training.steps=2"), Reporter()).step == 2


@pytest.mark.slow
def test_sft_lowers_its_loss_and_reports_validation(fresh, tmp_path):
    overrides = (
        "training.steps=25",
        "training.problems_per_step=16",
        "data.validation=arithmetic:1:digits:test",
        f"runs={tmp_path}",
    )
    more = (
        "optimizer.lr=1e-2",
        "rollout.max_response_tokens=4",
        "method.validate_accuracy=true",
        "optimizer.warmup_steps=2",
    )
    lines = metrics_of(train(config_of("sft", fresh, *overrides, *more), Reporter()).folder)
    losses = [line["sft/loss"] for line in lines if "sft/loss" in line]
    assert len(losses) == 25 and losses[0] > 2.7 and losses[-1] < 0.6 * losses[0]
    before, after = (line for line in lines if "validation/loss" in line)
    assert (before["step"], after["step"]) == (0, 25)
    assert after["validation/loss"] < 0.7 * before["validation/loss"]
    assert {"validation/accuracy", "validation/sampled_accuracy"} <= after.keys()
    assert {"stage/compose_s", "stage/sample_s", "stage/update_s", "stage/publish_s"} <= lines[
        1
    ].keys() and "stage/score_s" not in lines[1]
    rows = rows_of_step(tmp_path / "test", 1)
    assert all(row["source"] == "demonstration" and row["response"][-1] == 17 for row in rows)


def test_sft_without_accuracy_needs_no_verifier(fresh, tmp_path):
    data = tmp_path / "data.jsonl"
    write_jsonl(data, *({"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)))
    overrides = (
        f"data.train={data}",
        "training.steps=1",
        "training.problems_per_step=4",
        f"runs={tmp_path}",
        "rollout.max_response_tokens=4",
    )
    assert train(config_of("sft", fresh, *overrides), Reporter()).step == 1


@pytest.mark.slow
def test_run_without_learning_signal_stops(fresh, verifiers, tmp_path, capsys):
    overrides = overrides_of(
        fresh,
        *SMALL,
        "training.max_flat_steps=3",
        "training.checkpoint_every=1",
        f"runs={tmp_path}",
        f"reward.verifier={verifiers}:zero",
    )
    assert main(["train", "grpo", *overrides]) == 1
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and "no learning signal for 3 steps" in error
        and "training.max_flat_steps" in error
    )
    lines = metrics_of(tmp_path / "test")
    assert (
        [line["step"] for line in lines] == [1, 2, 3]
        and lines[-1]["advantages/rows_with_signal"] == 0.0
        and "grad_norm" not in lines[-1]
    )
    assert main(["train", "grpo", *overrides]) == 1, "the count of flat steps is in the checkpoint"
    assert [line["step"] for line in metrics_of(tmp_path / "test")] == [1, 2, 3]


def test_step_with_signal_resets_the_count_of_flat_steps(fresh):
    from postgrad.methods.method import Step
    from postgrad.training.guard import Guard
    from postgrad.types import Batch, Trajectory

    guard = Guard(config_of("grpo", fresh, "training.max_flat_steps=2"), print)
    batch = Batch.of([Trajectory("a", [1], [2], tokens={"advantages": [0.0]})])
    for signal in (0.0, 1.0, 0.0):
        guard.check(Step(1, metrics={"advantages/rows_with_signal": signal}), batch)
    with pytest.raises(RunError, match="no learning signal for 2 steps"):
        guard.check(
            Step(1, metrics={"advantages/rows_with_signal": 0.0, "reward/mean": 0.5}), batch
        )


def test_engine_with_wrong_logprobs_stops_the_run(fresh, verifiers, tmp_path, monkeypatch):
    from postgrad.rollout.native import store_slots as native

    real = native.sample_mixed_tokens

    def wrong_logprobs(logits, uniforms, samplings):
        tokens, logprobs = real(logits, uniforms, samplings)
        return tokens, logprobs + 0.5

    monkeypatch.setattr(native, "sample_mixed_tokens", wrong_logprobs)
    config = config_of(
        "grpo",
        fresh,
        *SMALL,
        "training.steps=3",
        f"runs={tmp_path}",
        f"reward.verifier={verifiers}:threes",
    )
    with pytest.raises(
        RunError, match=r"step 1: the engine's log-probs are 0\.5 nats from the trainer's"
    ):
        train(config, Reporter())


def test_failed_verdicts_are_counted_and_kept_out_of_the_metrics(fresh, verifiers, tmp_path):
    overrides = (
        "training.steps=2",
        "reward.max_failure_rate=0.9",
        "rollout.samples=8",
        f"runs={tmp_path}",
        f"reward.verifier={verifiers}:picky",
    )
    folder = train(config_of("grpo", fresh, *SMALL, *overrides), Reporter()).folder
    for line in metrics_of(folder):
        rows = rows_of_step(folder, line["step"])
        failed = [row for row in rows if row["failure"]]
        judged = [row for row in rows if not row["failure"]]
        assert len(rows) == 32 and failed and judged and line["reward/failures"] == len(failed)
        assert all(
            "ValueError: cannot read this" in row["failure"] and row["text"][:1] in "01234567"
            for row in failed
        )
        assert all(row["advantages"] is None for row in failed), (
            "what was not judged has no advantage"
        )
        assert line["reward/mean"] == pytest.approx(
            sum(row["reward"] for row in judged) / len(judged)
        )
        assert line["response/length"] == pytest.approx(
            sum(len(row["response"]) for row in rows) / len(rows)
        )
        truncated = [row for row in rows if row["finish"] == "length"]
        assert line["response/truncated"] == pytest.approx(len(truncated) / len(rows))


@pytest.mark.slow
def test_failed_verdicts_do_not_change_the_weights(fresh, verifiers, tmp_path):
    """An update on the rows with a verdict alone gives the same weights."""
    from postgrad.cluster.host import build_host
    from postgrad.types import Batch, Trajectory

    overrides = (
        *SMALL,
        "training.steps=1",
        "reward.max_failure_rate=0.9",
        "rollout.samples=8",
        f"runs={tmp_path}",
        f"reward.verifier={verifiers}:picky",
    )
    config = config_of("grpo", fresh, *overrides)
    folder = train(config, Reporter()).folder
    judged = [row for row in rows_of_step(folder, 1) if not row["failure"]]
    names = ("behavior_logprobs", "loss_mask")
    batch = Batch.of(
        [
            Trajectory(
                r["uid"],
                r["prompt"],
                r["response"],
                r["group"],
                r["index"],
                tokens={"advantages": r["advantages"]},
                **{n: r[n] for n in names},
            )
            for r in judged
        ]
    )
    policy = build_host(config_of("grpo", fresh, *overrides)).policy
    policy.update(batch, 1)
    saved = stock_model(folder / "checkpoints" / "step-1" / "policy", torch.float32)
    weights = policy.weights()
    assert all(torch.equal(p, weights[name]) for name, p in saved.named_parameters())


def test_error_in_a_stage_names_the_stage(fresh, tmp_path, verifiers, monkeypatch):
    from postgrad.methods.grpo import Grpo

    def estimate(self, batch, step):
        raise RunError("the judge is gone")

    monkeypatch.setattr(Grpo, "estimate", estimate)
    config = config_of(
        "grpo",
        fresh,
        *SMALL,
        "training.steps=2",
        f"runs={tmp_path}",
        f"reward.verifier={verifiers}:threes",
    )
    with pytest.raises(RunError, match=r"^step 1, stage estimate: the judge is gone$"):
        train(config, Reporter())
