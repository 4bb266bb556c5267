"""Math-Shepherd's own columns are rows of stepwise supervision."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from test_public_layouts import load, turns

from postgrad.cli.main import main
from postgrad.data.problems import load_problems
from postgrad.errors import ConfigError
from postgrad.methods.process_reward_model import steps_of

ROW = {
    "input": "How much? Step 1: 5+8 = 13. ки\nStep 2: 8 - 13 = 5. ки\nStep 3: It is 5. ки",
    "label": "How much? Step 1: 5+8 = 13. +\nStep 2: 8 - 13 = 5. -\nStep 3: It is 5. -",
    "task": "GSM8K",
}
STEPS = ["Step 1: 5+8 = 13.", "Step 2: 8 - 13 = 5.", "Step 3: It is 5."]


def test_steps_have_the_labels_at_their_tags(tmp_path: Path):
    (problem,) = load(tmp_path, ROW)
    assert turns(problem.messages) == [("user", "How much?")]
    assert steps_of(problem) == (STEPS, [True, False, False])
    assert (problem.ground_truth, problem.demonstrations) == ("", ())


def test_prepared_rows_keep_steps_and_labels(tmp_path: Path):
    load(tmp_path, ROW, {**ROW, "label": ROW["label"].replace("-\n", "+\n")})
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.parquet"
    assert main(["data", "prepare", "own", f"from={source}", f"out={out}"]) == 0
    assert len(parquet.read_table(out)) == 2  # the second row has other labels
    assert [steps_of(one) for one in load_problems(str(out))] == [
        (STEPS, [True, False, False]),
        (STEPS, [True, True, False]),
    ]


@pytest.mark.parametrize(
    ("columns", "key"),
    [
        ({"label": ROW["label"].replace("-", "?")}, "label must be the text of input"),
        ({"label": ROW["label"].replace("13", "14")}, "label must be the text of input"),
        ({"label": ROW["label"] + " More."}, "label must be the text of input"),
        ({"input": ROW["input"].replace("Step 1:", "First:")}, "'Step 1:'"),
        ({"input": "ки", "label": "+"}, "'Step 1:'"),
        ({"input": ROW["input"] + " More.", "label": ROW["label"] + " More."}, "goes on after"),
    ],
)
def test_broken_tags(tmp_path: Path, columns: dict[str, Any], key: str):
    row = ROW | columns
    if "First" in row["input"]:
        row["label"] = row["label"].replace("Step 1:", "First:")
    with pytest.raises(ConfigError, match=key):
        load(tmp_path, row)


def test_an_input_with_a_label_stays_a_prompt_with_its_truth(tmp_path: Path):
    (problem,) = load(tmp_path, {"input": "2+2?", "label": "4"})
    assert problem.ground_truth == "4"
