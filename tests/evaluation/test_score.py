"""`postgrad generate` and `postgrad score`: their files, and that both together equal eval."""

import csv
import json
from pathlib import Path

import pytest
from jsonl import read_jsonl, write_jsonl

from postgrad.cli.main import main
from postgrad.errors import ConfigError
from postgrad.evaluation.responses import read_responses

SMALL = ("n=2", "limit=5", "max_response_tokens=5", "threads=1", "device=cpu", "batch=2")
SET = "data=one=arithmetic:1:digits:train"


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("verifier") / "odd.py"
    file.write_text("def odd(response, problem):\n    return float(response[-1:] in '13579+-')\n")
    return f"verifier={file}:odd"


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_generate_and_score_equal_eval(tiny, verifier, tmp_path, ending, capsys):
    out = tmp_path / f"out.{ending}"
    assert main(["generate", str(tiny), SET, *SMALL, f"out={out}"]) == 0
    assert not list(tmp_path.glob("*.partial"))
    assert main(["score", f"one={out}", verifier, f"out={tmp_path / 'scored'}"]) == 0
    assert main(["eval", str(tiny), SET, *SMALL, verifier, f"out={tmp_path / 'eval'}"]) == 0
    scored = read_jsonl(tmp_path / "scored/one.jsonl")
    evaluated = read_jsonl(tmp_path / "eval/one.jsonl")
    assert len(scored) == 10
    for one, other in zip(scored, evaluated, strict=True):
        for key in ("uid", "sample", "response", "score", "right", "finish", "length"):
            assert one[key] == other[key], key
    results = [
        json.loads((tmp_path / name / "summary.json").read_text())["sets"]["one"]
        for name in ("scored", "eval")
    ]
    for key in ("avg", "pass", "length", "truncated"):
        assert results[0][key] == results[1][key]
    assert 0 < results[0]["avg"]["value"] < 1
    # A result file of eval can be scored again.
    again = tmp_path / "again"
    file = tmp_path / "eval/one.jsonl"
    assert main(["score", str(file), verifier, f"out={again}"]) == 0
    assert [row["right"] for row in read_jsonl(again / "one.jsonl")] == [r["right"] for r in scored]


@pytest.mark.slow
def test_generate_continues_after_it_was_stopped(tiny, tmp_path, monkeypatch):
    from postgrad.evaluation import run as module

    arguments = ["generate", str(tiny), SET, *SMALL]
    assert main([*arguments, f"out={tmp_path / 'whole.jsonl'}"]) == 0
    original = module.generate
    calls: list[int] = []

    def stops_once(engine, prompts, problems, *rest):
        calls.append(len(problems))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(engine, prompts, problems, *rest)

    monkeypatch.setattr(module, "generate", stops_once)
    out = tmp_path / "stopped.jsonl"
    assert main([*arguments, f"out={out}"]) == 130
    assert not out.exists()
    assert main([*arguments, "seed=1", f"out={out}"]) == 2, "responses of other settings"
    calls.clear()
    calls.extend([0, 0])
    assert main([*arguments, f"out={out}"]) == 0
    assert calls[2:] == [2, 1], "the first batch is not generated again"
    assert out.read_text() == (tmp_path / "whole.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_kill_after_the_file_is_written_leaves_a_folder_that_is_removed(
    tiny, tmp_path, monkeypatch, capsys, ending
):
    from postgrad.evaluation import generate as module

    out = tmp_path / f"out.{ending}"
    arguments = ["generate", str(tiny), SET, *SMALL, f"out={out}"]
    remove = module._remove

    def killed(partial: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_remove", killed)
    assert main(arguments) == 130
    monkeypatch.setattr(module, "_remove", remove)
    partial = tmp_path / f"out.{ending}.partial"
    written = out.read_bytes()
    assert partial.is_dir()
    assert main([*arguments, "seed=1"]) == 2, "responses of other settings"
    other = tmp_path / "other"
    out.rename(other)
    out.write_text('{"prompt": "not ours"}\n')
    assert main(arguments) == 2, "not the file of this command"
    assert partial.is_dir()
    other.rename(out)
    monkeypatch.setattr(module, "open_engine", None)  # no model is loaded
    capsys.readouterr()
    assert main(arguments) == 0
    assert "10 responses" in capsys.readouterr().out
    assert out.read_bytes() == written and not partial.exists()
    assert main(arguments) == 2, "the file exists"
    partial.mkdir()
    assert main(arguments) == 2 and not partial.exists()


def test_one_response_per_row_is_joined_by_problem(tmp_path):
    rows = [
        {"question": q, "answer": "2", "generation": text}
        for text in ("2", "3")
        for q in ("1+1", "4-2")
    ]
    entries = read_responses(write_jsonl(tmp_path / "x.jsonl", *rows))
    assert [entry.texts for entry in entries] == [["2", "3"], ["2", "3"]]
    assert not entries[0].lengths and len({entry.problem.uid for entry in entries}) == 2


def test_unequal_counts_become_a_set_per_source(tmp_path):
    rows = [
        {"prompt": "a", "ground_truth": "1", "data_source": "aime", "responses": ["1", "2"]},
        {"prompt": "b", "ground_truth": "1", "data_source": "math", "responses": ["1"]},
    ]
    file = write_jsonl(tmp_path / "x.jsonl", *rows)
    out = tmp_path / "out"
    assert main(["score", str(file), "verifier=exact", f"out={out}"]) == 0
    sets = json.loads((out / "summary.json").read_text())["sets"]
    assert {name: result["samples"] for name, result in sets.items()} == {"x-aime": 2, "x-math": 1}
    assert sets["x-aime"]["avg"]["value"] == 0.5 and sets["x-aime"]["truncated"] is None
    assert "characters per response" in (out / "report.md").read_text()
    rows.append({**rows[0], "prompt": "c", "responses": ["1"]})
    bad = write_jsonl(tmp_path / "y.jsonl", *rows)
    assert main(["score", str(bad), "verifier=exact", f"out={tmp_path / 'bad'}"]) == 2


def test_a_reward_function_of_trl_gets_the_columns_as_in_training(tmp_path):
    """Text prompts give text completions, and numbers stay numbers."""
    reward = tmp_path / "rewards.py"
    reward.write_text(
        "def right(prompts, completions, answer, **kwargs):\n"
        "    rows = zip(prompts, completions, answer)\n"
        "    return [float(p + c.strip() == f'2+2={a:d}') for p, c, a in rows]\n"
    )
    rows = [{"prompt": "2+2=", "answer": 4, "responses": [" 4", "5"]}]
    out = tmp_path / "out"
    file = write_jsonl(tmp_path / "x.jsonl", *rows)
    assert main(["score", str(file), f"verifier={reward}:right", f"out={out}"]) == 0
    assert [row["score"] for row in read_jsonl(out / "x.jsonl")] == [1.0, 0.0]


def test_lists_in_csv_are_read(tmp_path):
    file = tmp_path / "x.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerows([["prompt", "ground_truth", "responses"], ["q", "1", '["1", "[2]"]']])
    assert read_responses(file)[0].texts == ["1", "[2]"]


def test_a_response_that_is_a_json_list_stays_one_response(tmp_path):
    row = {"prompt": "q", "ground_truth": "1", "response": '["1", "2"]'}
    assert read_responses(write_jsonl(tmp_path / "x.jsonl", row))[0].texts == ['["1", "2"]']


def test_two_problems_of_one_uid_are_refused(tmp_path):
    rows = [
        {"uid": "a", "prompt": f"{i}+0=", "ground_truth": f"{i}", "response": f"{i}"}
        for i in range(2)
    ]
    with pytest.raises(ConfigError, match="line 2: uid 'a'"):
        read_responses(write_jsonl(tmp_path / "x.jsonl", *rows))
    assert len(read_responses(write_jsonl(tmp_path / "y.jsonl", *rows[:1] * 2))[0].texts) == 2


def test_judge_scores_a_file(tmp_path):
    from openai_server import serve

    rows = [{"prompt": "q", "responses": ["good", "bad"]}]
    file = write_jsonl(tmp_path / "x.jsonl", *rows)
    with serve(chat=lambda text: "RATING: 9" if "good" in text else "RATING: 2") as served:
        arguments = [
            "score",
            str(file),
            "verifier=llm_judge",
            "pass_score=5",
            f"reward.judge.model='{served.address}'",
            "reward.judge.template=quality",
            f"out={tmp_path / 'out'}",
        ]
        assert main(arguments) == 0
    assert [row["score"] for row in read_jsonl(tmp_path / "out/x.jsonl")] == [9.0, 2.0]
