"""Named validation sets and the best checkpoint: kept, same after a crash, never by a test set."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_runs import config_of, metrics_of, metrics_without_timing, overrides_of, tree

from postgrad.cli.main import main
from postgrad.errors import RunError
from postgrad.training import checkpoint
from postgrad.training.driver import train
from postgrad.training.prepare import load_sets
from postgrad.training.report import Reporter
from postgrad.training.validation import BestStep, validate_sets

HELD_OUT = "arithmetic:1:digits:validation"


def best_of(lines, name="a", num_sets=1) -> BestStep:
    return BestStep(name, num_sets, lines)


def line(step: int, **values: float) -> dict[str, float]:
    return {"step": step} | {f"validation/{key}": value for key, value in values.items()}


def test_highest_accuracy_is_best_and_the_first_of_equals():
    lines = [line(0, accuracy=0.9), line(3, accuracy=0.2), line(6, accuracy=0.5)]
    best = best_of([*lines[:2], {"step": 3, "reward/mean": 1.0}, lines[2]])
    assert (best.step, best.value) == (6, 0.5), "step 0 has no checkpoint"
    best.update(9, line(9, accuracy=0.5))
    assert best.step == 6
    best.update(12, line(12, accuracy=0.51, loss=9.0))
    assert best.step == 12


def test_lowest_loss_is_best_without_accuracy():
    assert best_of([line(2, loss=1.5), line(4, loss=1.1), line(6, loss=1.3)]).step == 4


def test_best_by_one_of_several_sets_or_by_their_mean():
    names = ("a/accuracy", "b/accuracy", "accuracy")
    values = ((0.1, 0.9, 0.5), (0.2, 0.2, 0.2))
    lines = [
        line(step, **dict(zip(names, some, strict=True))) for step, some in enumerate(values, 1)
    ]
    assert [best_of(lines, name, 2).step for name in ("a", "b", "mean")] == [2, 1, 1]
    assert best_of(lines, "", 2).step is None


def test_validation_without_accuracy_and_loss_is_a_run_error():
    with pytest.raises(RunError, match=r"training\.keep_best=a"):
        best_of([line(1, margin=0.3)])


def test_metrics_of_several_sets_have_their_names_and_the_mean():
    method = SimpleNamespace(
        validate=lambda problems: {
            "validation/accuracy": len(problems) / 10,
            "validation/loss": 1.0,
        }
    )
    one = validate_sets(method, {"a": [1, 2]})  # type: ignore[arg-type]
    assert one == {"validation/accuracy": 0.2, "validation/loss": 1.0}
    both = validate_sets(method, {"a": [1, 2], "b": [1] * 6})  # type: ignore[arg-type]
    assert both == {
        "validation/accuracy": pytest.approx(0.4),
        "validation/loss": 1.0,
        "validation/a/accuracy": 0.2,
        "validation/a/loss": 1.0,
        "validation/b/accuracy": 0.6,
        "validation/b/loss": 1.0,
    }


def test_sets_are_cut_to_validation_problems(tiny):
    sets = f"data.validation='one={HELD_OUT},arithmetic:2'"
    found = load_sets(config_of("grpo", tiny, sets, "training.validation_problems=3"))
    assert {name: len(problems) for name, problems in found.items()} == {
        "one": 3,
        "arithmetic-2": 3,
    }


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    row = {"data_source": "arithmetic/digits", "prompt": "1+1=", "ground_truth": "20"}
    for name, split in (("quiz", "test"), ("held", "validation")):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps(row | {"extra_info": {"split": split}}) + "\n")
    (tmp_path / "my_test.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


EVERY = "training.validate_every=2"


def test_test_set_may_be_validated_besides_the_one_that_chooses(files, tiny):
    overrides = ["data.validation='held.jsonl,quiz.jsonl'", "training.keep_best=held", EVERY]
    assert list(load_sets(config_of("grpo", tiny, *overrides))) == ["held", "quiz"]


THREES = """
from postgrad.data.sources.arithmetic import arithmetic_problems

HELD_OUT = {p.uid for p in arithmetic_problems(1, "digits", "validation")}


def threes(response, problem):
    count = response.count("3")
    return float(count == 2) if problem.uid in HELD_OUT else count / 4
"""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> str:
    """Rewards threes in training; a held-out problem needs exactly two of them.

    So the validation accuracy rises and falls again.
    """
    file = tmp_path_factory.mktemp("verifier") / "threes.py"
    file.write_text(THREES)
    return f"{file}:threes"


def overrides_for(verifier: str, runs: Path) -> list[str]:
    return [
        f"reward.verifier={verifier}",
        f"runs={runs}",
        f"data.validation='held={HELD_OUT},more=arithmetic:2:digits:validation'",
        "training.validate_every=2",
        "training.keep_best=held",
        "training.keep_checkpoints=1",
        "training.checkpoint_every=5",
        "training.steps=16",
        "training.problems_per_step=8",
        "rollout.samples=8",
        "rollout.max_response_tokens=4",
        "optimizer.lr=1e-2",
        "reward.workers=1",
        "training.validation_problems=8",
        "training.max_flat_steps=99",
    ]


@pytest.fixture(scope="module")
def finished(tiny, verifier, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("finished")
    train(config_of("grpo", tiny, *overrides_for(verifier, runs)), Reporter())
    return runs / "test"


@pytest.mark.slow
def test_best_checkpoint_is_kept(finished):
    lines = [entry for entry in metrics_of(finished) if "validation/held/accuracy" in entry]
    assert {
        "validation/accuracy",
        "validation/sampled_accuracy",
        "validation/more/accuracy",
    } <= lines[0].keys()
    accuracies = {
        entry["step"]: entry["validation/held/accuracy"] for entry in lines if entry["step"]
    }
    best = max(accuracies, key=lambda step: accuracies[step])
    assert best < 16 and accuracies[best] > accuracies[16], (
        "this test needs a best step before the last"
    )
    assert checkpoint.best(finished) == finished / "checkpoints" / f"step-{best}"
    assert {p.name for p in (finished / "checkpoints").glob("step-*")} == {
        f"step-{best}",
        "step-16",
    }
    assert (finished / "checkpoints" / f"step-{best}" / "policy" / "model.safetensors").is_file()


class CrashAtStep(Reporter):
    """Ends the run, as a kill would, after it has written the metrics of a step."""

    def __init__(self, step: int, when: str) -> None:
        self.at = step
        self.when = when  # "step" or "validation"

    def step(self, metrics, batch) -> None:
        if self.when == "step" and metrics["step"] == self.at:
            raise KeyboardInterrupt

    def validated(self, number, metrics) -> None:
        if self.when == "validation" and number == self.at:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_crashes_do_not_change_the_run(finished, tiny, verifier, tmp_path):
    """Crashes after validations and between checkpoints: same best step, same bytes."""
    overrides = overrides_for(verifier, tmp_path)
    for crash in (
        CrashAtStep(2, "validation"),
        CrashAtStep(6, "validation"),
        CrashAtStep(9, "step"),
        CrashAtStep(14, "validation"),
    ):
        with pytest.raises(KeyboardInterrupt):
            train(config_of("grpo", tiny, *overrides), crash)
    train(config_of("grpo", tiny, *overrides), Reporter())
    crashed = tmp_path / "test"
    assert tree(crashed / "checkpoints") == tree(finished / "checkpoints")
    assert metrics_without_timing(crashed) == metrics_without_timing(finished)


@pytest.mark.slow
def test_removed_best_checkpoint_is_replaced_by_the_best_that_is_left(
    finished, tiny, verifier, tmp_path, capsys
):
    shutil.copytree(finished, tmp_path / "test")
    best = checkpoint.best(tmp_path / "test")
    assert best is not None and best.name != "step-16"
    shutil.rmtree(best)
    assert main(["train", "grpo", *overrides_of(tiny, *overrides_for(verifier, tmp_path))]) == 0
    assert checkpoint.best(tmp_path / "test") == tmp_path / "test" / "checkpoints" / "step-16"
    assert "step-16/policy" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_best_checkpoint_can_be_evaluated_by_its_pointer(finished):
    from postgrad.evaluation.model import find_model

    best = checkpoint.best(finished)
    assert best is not None and find_model(f"{finished}/checkpoints/best").path == f"{best}/policy"


@pytest.mark.slow
def test_validation_keeps_its_answers_and_reports_best_and_majority(tiny, tmp_path):
    verifier = tmp_path / "mine.py"
    verifier.write_text(
        "def odd(response, problem):\n"
        "    right = float(response[-1:] in '13579')\n"
        "    return {'score': right, 'format': float(len(response) > 1)}\n"
    )
    config = config_of(
        "grpo",
        tiny,
        f"runs={tmp_path / 'runs'}",
        "data.validation=held=arithmetic:1:digits:validation",
        "training.validation_samples=4",
        "training.validation_temperature=0.9",
        "training.validation_top_p=0.95",
        "rollout.max_response_tokens=4",
        "training.steps=1",
        f"reward.verifier={verifier}:odd",
    )
    folder = train(config, Reporter()).folder
    values = [line for line in metrics_of(folder) if "validation/accuracy" in line][-1]
    rows = [
        json.loads(line)
        for line in (folder / "eval/validation-000001/held.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 16 and [row["sample"] for row in rows[:4]] == [0, 1, 2, 3]
    scores = [[row["score"] for row in rows[i : i + 4]] for i in range(0, 16, 4)]
    assert values["validation/accuracy"] == pytest.approx(sum(map(sum, scores)) / 16)
    assert values["validation/best@4"] == pytest.approx(sum(map(max, scores)) / 4)
    assert values["validation/part/format"] == pytest.approx(
        sum(row["parts"]["format"] for row in rows) / 16
    )
    assert values["validation/length"] == pytest.approx(sum(row["length"] for row in rows) / 16)
    assert "validation/sampled_accuracy" not in values
    summary = json.loads((folder / "eval/validation-000001/summary.json").read_text())
    assert summary["sets"]["held"]["samples"] == 4
