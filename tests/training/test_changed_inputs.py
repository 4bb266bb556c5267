"""A run that is started again: finished already, or with edited files of the user."""

import json
import shutil
from pathlib import Path

import pytest
from jsonl import write_jsonl
from tiny_runs import config_of, overrides_of, toy_run

from postgrad.cli.main import main
from postgrad.errors import RunError
from postgrad.training import run


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def score(response, problem):\n    return len(response)\n")
    write_jsonl(
        tmp_path / "rows.jsonl", *({"prompt": f"{i}+1=", "ground_truth": "1"} for i in range(8))
    )
    (tmp_path / "own.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(model, *overrides: str) -> int:
    files = ("data.train=rows.jsonl", "reward.verifier=mine.py:score", "runs=runs")
    settings = (*files, "data.template=auto", *toy_run(steps=1), *overrides)
    return main(["train", "grpo", *overrides_of(model, *settings)])


@pytest.mark.slow
def test_a_command_with_fewer_steps_leaves_a_finished_run_as_it_is(home, tiny, capsys):
    assert train(tiny, "training.steps=2") == 0
    before = (home / "runs/test/config.yaml").read_bytes()
    capsys.readouterr()
    assert train(tiny, "training.steps=1", "training.checkpoint_every=7") == 0
    assert "for more steps set training.steps above 2" in capsys.readouterr().out
    assert (home / "runs/test/config.yaml").read_bytes() == before
    assert train(tiny, "training.steps=3") == 0
    assert "steps: 3" in (home / "runs/test/config.yaml").read_text()


@pytest.mark.slow
def test_a_repeated_command_says_that_nothing_was_trained_and_which_files_changed(
    home, tiny, capsys
):
    assert train(tiny) == 0
    out = capsys.readouterr().out
    assert "nothing was trained" not in out
    assert "no chat template, so prompts are plain text" in out
    assert train(tiny) == 0
    out = capsys.readouterr().out
    assert "already finished: runs/test" in out
    assert "done: 1 step in" in out
    assert "nothing was trained now; for a new run add name=NEW" in out
    (home / "mine.py").write_text("def score(response, problem):\n    return -len(response)\n")
    assert train(tiny) == 0
    assert "nothing was trained now (mine.py changed since then)" in capsys.readouterr().out
    assert train(tiny, "training.steps=2") == 0
    out = capsys.readouterr().out
    assert "mine.py has changed since the run began; steps from 2 on use the new content" in out
    assert "rows.jsonl has changed" not in out


def test_hashes_that_the_disk_refuses_are_a_run_error(home, tiny):
    config = config_of("grpo", tiny, "data.train=rows.jsonl")
    (home / ".inputs.json.partial").mkdir()
    with pytest.raises(RunError, match=r"inputs\.json could not be written"):
        run.record_inputs(home, config)


def test_files_are_found_in_sums_lists_commands_and_modules(home, tiny):
    (home / "agent.py").touch()
    (home / "held.csv").touch()
    config = config_of("grpo", tiny, "name=test")
    config.reward.verifier = "math + 0.1*mine.py:score(limit=3)"
    config.data.train = "rows.jsonl,missing.jsonl,arithmetic:1"
    config.data.validation = "easy=held.csv"
    config.agent.command = "python agent.py --fast"
    config.method.name = "own:NoReturn"
    run.record_inputs(home, config)
    names = ["mine.py", "rows.jsonl", "held.csv", "agent.py", "own.py"]
    recorded = json.loads((home / "inputs.json").read_text())
    assert sorted(recorded) == sorted([*names, str(tiny)])
    assert run.changed_inputs(home, config) == []
    for name in names:
        with (home / name).open("a") as file:
            file.write("\n")
    assert sorted(run.changed_inputs(home, config)) == sorted(names)


def test_files_of_folders_and_files_with_renamed_columns_are_recorded(home, tiny):
    (home / "shards").mkdir()
    (home / "shards" / "a.jsonl").write_text((home / "rows.jsonl").read_text())
    overrides = ["data.train=shards", "data.validation=easy=rows.jsonl:prompt=question"]
    config = config_of("grpo", tiny, *overrides)
    run.record_inputs(home, config)
    assert run.changed_inputs(home, config) == []
    for name in ("shards/a.jsonl", "rows.jsonl"):
        (home / name).write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    assert sorted(run.changed_inputs(home, config)) == ["rows.jsonl", "shards/a.jsonl"]


def test_a_changed_model_folder_is_found(home, tiny):
    shutil.copytree(tiny, home / "model")
    config = config_of("grpo", Path("model"), "data.train=arithmetic:1")
    run.record_inputs(home, config)
    assert run.changed_inputs(home, config) == []
    weights = bytearray((home / "model" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (home / "model" / "model.safetensors").write_bytes(weights)
    assert run.changed_inputs(home, config) == ["model"]
