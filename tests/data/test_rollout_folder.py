"""A user's own file among a run's rollouts is left out by everything that reads them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refused import refused

import postgrad
from postgrad.analysis.data import _rollout_file
from postgrad.data.from_rollouts import select_rollouts
from postgrad.data.rollout_folder import rollout_files
from postgrad.training.log import RunLog
from postgrad.view.folder import Folder
from postgrad.view.picture import read_sample_answers
from postgrad.view.rollouts import Rollouts
from postgrad.view.runs import Run

ROW = {
    "uid": "p", "index": 0, "group": 0, "reward": 1.0, "source": "policy", "failure": "",
    "question": "1+1=", "text": "2", "prompt": [1], "response": [2],
}  # fmt: skip
OTHER_NAMES = ("step-mine.parquet", "step-.parquet", "step-².parquet", "step-000002 copy.parquet")


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("data: {train: arithmetic}\n")
    for step in (2, 10, 1000000):  # names of seven digits sort before those of six
        pq.write_table(
            pa.Table.from_pylist([ROW]), folder / "rollouts" / f"step-{step:06d}.parquet"
        )
    for name in OTHER_NAMES:
        (folder / "rollouts" / name).write_bytes(b"not ours")
    return folder


def test_files_are_found_by_their_step(run):
    assert list(rollout_files(run / "rollouts")) == [2, 10, 1000000]
    assert rollout_files(run / "missing") == {}


def test_every_reader_leaves_other_files_out(run):
    assert list(postgrad.Run(run).rollouts()["text"]) == ["2"]
    with refused("unknown_name", "step", shows="steps 2 to 1000000"):
        postgrad.Run(run).rollouts(step=3)
    assert _rollout_file(run, 0).name == "step-1000000.parquet"
    assert _rollout_file(run, 10).name == "step-000010.parquet"
    with refused("unknown_name", "step", shows="steps 2 to 1000000"):
        _rollout_file(run, 3)
    headings = [heading for heading, _ in read_sample_answers(run)]
    assert headings == ["sampled at step 2", "sampled at step 1000000"]
    assert [row["uid"] for row in select_rollouts(run, [])] == ["p/2/0"]
    assert Rollouts().steps(Run(Folder(run.parent), "run")) == [2, 10, 1000000]


def test_a_resumed_run_removes_only_its_own_files(run):
    RunLog(run, 2).close()
    assert {path.name for path in (run / "rollouts").iterdir()} == {
        "step-000002.parquet",
        *OTHER_NAMES,
    }
