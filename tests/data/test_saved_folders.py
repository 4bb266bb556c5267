"""Folders of data: the files that datasets saved, and those of one split."""

import datasets
import pytest
from tiny_runs import config_of

from postgrad.data.problems import load_problems
from postgrad.errors import ConfigError
from postgrad.training.run import changed_inputs, record_inputs


@pytest.mark.parametrize("shards", [1, 2])
def test_cached_results_of_map_are_not_read(tmp_path, shards):
    rows = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(4)]
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(rows).save_to_disk(folder, num_shards=shards)
    saved = datasets.load_from_disk(folder)
    saved.map(lambda row: {"response": "other"})
    saved.filter(lambda row: row["prompt"] != "0+1=")
    assert len(list(folder.glob("cache-*.arrow"))) == 2
    problems = load_problems(str(folder))
    assert [problem.messages[0]["content"] for problem in problems] == [r["prompt"] for r in rows]


@pytest.mark.parametrize("names", [("train.jsonl", "test.jsonl"), ("train-0.jsonl", "dev_a.jsonl")])
def test_a_folder_with_several_splits_is_refused_and_one_can_be_named(names, tmp_path, tiny):
    folder = tmp_path / "data"
    folder.mkdir()
    for number, name in enumerate([*names, "train-1.jsonl"]):
        (folder / name).write_text(f'{{"prompt": "{number}+0=", "ground_truth": "{number}"}}\n')
    with pytest.raises(ConfigError, match=r"several splits \((dev|test), train\); give one"):
        load_problems(str(folder))
    assert sorted(p.ground_truth for p in load_problems(str(folder / "train"))) == ["0", "2"]
    config = config_of("grpo", tiny, f"data.train={folder / 'train'}")
    record_inputs(tmp_path, config)
    assert changed_inputs(tmp_path, config) == []
    (folder / "train-1.jsonl").write_text('{"prompt": "9+0=", "ground_truth": "9"}\n')
    assert changed_inputs(tmp_path, config) == [str(folder / "train-1.jsonl")]
