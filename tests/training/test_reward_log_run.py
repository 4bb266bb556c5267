"""What reward functions of TRL log is in the metrics, the rollouts and the result files."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from killed import assert_a_killed_run_ends_the_same
from tiny_runs import config_of, metrics_of, overrides_of, toy_run

from postgrad.cli.main import main
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.view.rollout_files import find_token_columns, trajectory_of

pytestmark = pytest.mark.slow

REWARD = """
def reward(completion_ids, log_extra, log_metric, **kwargs):
    lengths = [len(ids) for ids in completion_ids]
    log_extra("length", lengths)
    log_extra("ends", [[ids[0], str(ids[-1])] for ids in completion_ids])
    log_metric("longest", max(lengths))
    log_metric("longest", 0)
    log_metric("count", len(lengths))
    # Some responses have no reward: they leave the batch, and keep what was logged.
    return [None if sum(ids) % 4 == 0 else sum(ids) / 17 / len(ids) for ids in completion_ids]
"""
VALIDATION = ("data.validation=arithmetic:1", "training.validate_every=1")


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(REWARD)
    return file


def settings_of(reward: Path, *overrides: str) -> list[str]:
    verifier = f"reward.verifier={reward}:reward"
    return [*toy_run(steps=2), verifier, "reward.max_failure_rate=1", *overrides]


def train_run(recipe: str, tiny: Path, reward: Path, *overrides: str) -> Path:
    settings = settings_of(reward, f"runs={reward.parent}", *overrides)
    return train(config_of(recipe, tiny, *settings), Reporter()).folder


def rows_of(folder: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet").to_pylist()


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("cluster.backend=process", "cluster.engines=1", "rollout.staleness=1"),
        ("cluster.backend=ray", "cluster.wait_s=300", "cluster.workers=2"),
    ],
    ids=["local", "prefetched", "ray"],
)
def test_metrics_are_of_the_step_and_columns_of_the_rollouts(overrides, tiny, reward):
    if "cluster.backend=ray" in overrides:
        pytest.importorskip("ray", reason="Ray is not installed")
    folder = train_run("grpo", tiny, reward, *VALIDATION, *overrides)
    lines = metrics_of(folder)
    steps = [line for line in lines if "reward/mean" in line]
    num_failed = 0
    for number, line in enumerate(steps, 1):
        rows = rows_of(folder, number)
        assert len(rows) == 16
        lengths = [len(row["response"]) for row in rows]
        assert (line["log/longest"], line["log/count"]) == (max(lengths) / 2, 16.0)
        for row in rows:
            assert row["log/length"] == len(row["response"])
            assert json.loads(row["log/ends"]) == [row["response"][0], str(row["response"][-1])]
            num_failed += bool(row["failure"])
    assert len(steps) == 2 and num_failed > 0
    validations = [line for line in lines if "validation/accuracy" in line]
    assert len(validations) == 3
    for line in validations:
        answers = lines_of(next(folder.glob(f"eval/*-{line['step']:06d}/*-sampled.jsonl")))
        lengths = [answer["length"] for answer in answers]
        assert line["validation/log/longest"] == max(lengths) / 2
        assert line["validation/log/count"] == len(answers)
        assert [answer["log"]["length"] for answer in answers] == lengths
        assert not any(name.startswith("log/") for name in line)


def test_the_page_shows_the_columns(tiny, reward):
    folder = train_run("grpo", tiny, reward, "training.steps=1")
    table = pq.read_table(folder / "rollouts" / "step-000001.parquet")
    shown = trajectory_of(table, 0, find_token_columns(table), None, full=True)
    assert {"log/length", "log/ends"} <= shown["others"].keys()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_killed_run_has_the_same_logs(staleness, tiny, reward, tmp_path):
    reward.write_text(REWARD.replace("None if", "0.0 if"))  # NaN does not equal itself
    ahead = ["cluster.backend=process", "cluster.engines=1", "rollout.staleness=1"]
    settings = settings_of(reward, "training.steps=3", *VALIDATION, *(ahead if staleness else []))
    settings += ["training.checkpoint_every=1"]
    assert_a_killed_run_ends_the_same("grpo", tiny, tmp_path, 2, settings)
    for run in ("complete", "killed"):
        lines = metrics_of(tmp_path / run / "test")
        assert sum("log/count" in line for line in lines) == 3


def test_refills_count_and_may_log_other_columns(tiny, reward):
    """DAPO's dynamic sampling scores several times per step; the mean is over all calls."""
    reward.write_text(
        "calls = []\n"
        "def reward(completions, log_extra, log_metric):\n"
        "    calls.append(1)\n"
        "    log_metric('calls', len(calls))\n"
        "    late = len(calls) > 1\n"
        "    log_extra('mixed', [str(i) if late else i for i in range(len(completions))])\n"
        "    if late:\n"
        "        log_extra('late', [1.5] * len(completions))\n"
        "    return [float(late and i % 2) for i in range(len(completions))]\n"
    )
    folder = train_run("dapo", tiny, reward, "training.steps=1", "method.overlong_buffer=0")
    (line,) = metrics_of(folder)
    assert (line["refill/times"], line["log/calls"]) == (1.0, 1.5)
    assert {row["log/late"] for row in rows_of(folder, 1)} == {1.5}


def test_a_method_with_thoughts_logs_for_the_outputs_alone(tiny, reward):
    """Responses without an output are not scored; what classmates write is not logged."""
    reward.write_text(
        "def reward(completions, log_extra, log_metric):\n"
        "    log_extra('place', list(range(len(completions))))\n"
        "    log_metric('count', len(completions))\n"
        "    return [1.0] * len(completions)\n"
    )
    for recipe in ("classmate_baseline", "classmate"):
        name = f"name={recipe}"
        folder = train_run(
            recipe, tiny, reward, *VALIDATION, "method.no_output_score=0", name, "training.steps=1"
        )
        lines = metrics_of(folder)
        (line,) = [line for line in lines if "reward/mean" in line]
        places = [row["log/place"] for row in rows_of(folder, 1)]
        assert line["log/count"] == sum(place is not None for place in places)
        assert all("validation/log/count" in one for one in lines if "validation/accuracy" in one)


def test_a_wrong_number_of_values_ends_the_run_in_one_line(tiny, reward, capsys):
    reward.write_text(
        "def reward(completions, log_extra):\n"
        "    log_extra('mine', [1])\n"
        "    return [0.0] * len(completions)\n"
    )
    command = overrides_of(tiny, *settings_of(reward, f"runs={reward.parent}"))
    assert main(["train", "grpo", *command]) != 0
    error = capsys.readouterr().err
    assert "1 values of column mine for 16 completions" in error and "Traceback" not in error


def test_an_evaluation_keeps_logs_over_its_batches(tiny, reward):
    model = [one for one in overrides_of(tiny) if one.startswith("model.d")]
    folder = reward.parent / "eval"
    command = ["eval", str(tiny), "data=one=arithmetic:1", "data.template=plain", *model]
    command += ["data.limit=3", "rollout.max_response_tokens=4", f"out={folder}"]
    command += [f"verifier={reward}:reward", "rollout.batch=2", "reward.max_failure_rate=1"]
    assert main(command) == 0
    rows = lines_of(folder / "one.jsonl")
    assert [row["log"]["length"] for row in rows] == [row["length"] for row in rows]
    assert [row["metrics"]["count"] for row in rows] == [2.0, 2.0, 1.0]
    summary = (folder / "summary.json").read_text()
    assert json.loads(summary)["sets"]["one"]["log"]["count"] == pytest.approx(5 / 3)
    assert "- count, logged by the reward functions: 1.667" in (folder / "report.md").read_text()
    # A kill after the first batch: the rest is generated again, and the summary is the same.
    (folder / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert main(command) == 0
    again = json.loads((folder / "summary.json").read_text())
    assert again["sets"] == json.loads(summary)["sets"]


def test_saved_responses_have_logs_in_their_rows(reward, tmp_path):
    reward.write_text(
        "def reward(completions, answer, log_extra, log_metric):\n"
        "    log_extra('length', [len(text) for text in completions])\n"
        "    log_metric('count', len(completions))\n"
        "    return [float(text == one) for text, one in zip(completions, answer)]\n"
    )
    file = tmp_path / "answers.jsonl"
    row = {"prompt": "2+2=", "answer": "4", "responses": ["4", "five"]}
    file.write_text(json.dumps(row) + "\n")
    out = tmp_path / "scored"
    assert main(["score", str(file), f"verifier={reward}:reward", f"out={out}"]) == 0
    assert [one["log"] for one in lines_of(out / "answers.jsonl")] == [{"length": 1}, {"length": 4}]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["sets"]["answers"]["log"] == {"count": 2.0}
