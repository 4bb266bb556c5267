"""Folders that datasets saved: their own files, not cached results beside them."""

import datasets
import pytest

from postgrad.data.problems import load_problems


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
