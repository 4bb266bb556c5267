"""benchmarks/gpu/distill.py: which samples become pairs, and when samples are kept."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def data():
    folders = [str(BENCHMARKS / "gpu"), str(BENCHMARKS)]
    sys.path[:0] = folders
    yield importlib.import_module("distill_data")
    for folder in folders:
        sys.path.remove(folder)


def sample(uid: str, response: str, right: bool, finish: str = "stop") -> dict:
    return {
        "uid": uid,
        "sample": 0,
        "response": response,
        "right": right,
        "finish": finish,
        "failure": None,
        "messages": [],
        "data_source": "gsm8k",
    }


def test_pairs_have_a_finished_right_response_and_say_what_was_cut(data):
    samples = [
        sample("a", "right", True),
        sample("a", "cut and right", True, "length"),
        sample("a", "wrong", False),
        sample("a", "cut", False, "length"),
        sample("b", "right", True),
    ]
    found = [(row["chosen"], row["rejected"], row["cut"]) for row in data.pair_rows(samples)]
    assert found == [("right", "wrong", False), ("right", "cut", True)]
    assert [row["response"] for row in data.sft_rows(samples)] == ["right", "wrong", "right"]


def test_samples_of_the_same_problems_and_limit_are_kept(data, tmp_path):
    def write(file: Path, rows: list[dict]) -> Path:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    problems = write(tmp_path / "first.jsonl", [{"uid": "a"}, {"uid": "b"}])
    folder = tmp_path / "samples"
    folder.mkdir()
    write(folder / "first.jsonl", [{"uid": uid} for uid in "aabb"])
    (folder / "settings.json").write_text('{"rollout": {"max_response_tokens": 320}}')
    assert not data.is_sampled(problems, folder, 2, 320), "the evaluation is not complete"
    (folder / "summary.json").write_text("{}")
    assert data.is_sampled(problems, folder, 2, 320)
    assert not data.is_sampled(problems, folder, 4, 320)
    assert not data.is_sampled(problems, folder, 2, 256)
    write(problems, [{"uid": "a"}, {"uid": "c"}])
    assert not data.is_sampled(problems, folder, 2, 320)
