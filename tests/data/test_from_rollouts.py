"""Trajectories of a run become conversations for SFT."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tables import tabled

from postgrad.cli.main import main
from postgrad.data.from_rollouts import parse_where, select_rollouts
from postgrad.data.problems import load_problems
from postgrad.errors import ConfigError

SYSTEM = {"role": "system", "content": "Play."}


@pytest.fixture
def run(tmp_path):
    data = tmp_path / "train.jsonl"
    row = {"prompt": [SYSTEM, {"role": "user", "content": ""}], "ground_truth": "1", "uid": "p"}
    data.write_text(json.dumps(row) + "\n")
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"data: {{train: {data}}}\n")
    turns = [
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "7"},
    ]

    def row_of(uid, index, reward, messages="", source="policy", failure="", text="7"):
        return {
            "uid": uid, "index": index, "reward": reward, "messages": messages, "text": text,
            "source": source, "failure": failure, "finish": "stop", "question": "Guess.",
            "response": [1, 2, 3], "reward/right": reward,
        }  # fmt: skip

    rows = [
        row_of("p", 0, 1.0, json.dumps(turns)),
        row_of("p", 1, 0.1),
        row_of("q", 2, 0.95, text="8"),
        row_of("q", 3, 0.99, text="8"),
        row_of("q", 4, 1.0, source="demonstration"),
        row_of("q", 5, None, failure="timeout: late"),
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rollouts" / "step-000002.parquet")
    return folder


def test_the_best_trajectories_are_conversations(run):
    first, second = select_rollouts(run, parse_where("reward>0.9"))
    assert first["messages"] == [
        SYSTEM,
        {"role": "user", "content": "Guess."},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "7"},
    ]
    assert (first["uid"], first["reward"]) == ("p/2/0", 1.0)
    assert second["messages"] == [
        {"role": "user", "content": "Guess."},
        {"role": "assistant", "content": "8"},
    ], "equal responses to a problem are written once"


@tabled("where, uids")
def test_conditions_choose(where, uids, run):
    assert [row["uid"] for row in select_rollouts(run, parse_where(where))] == uids


def test_at_most_so_many_per_problem(run):
    assert [row["uid"] for row in select_rollouts(run, [], per_problem=1)] == ["p/2/0", "q/2/2"]


@pytest.mark.parametrize("where", ["reward", "reward > high and", "rewart>1"])
def test_conditions_that_mean_nothing_are_refused(where, run):
    with pytest.raises(ConfigError, match="where"):
        list(select_rollouts(run, parse_where(where)))


def test_the_command_writes_what_sft_reads(run, tmp_path, capsys):
    out = tmp_path / "sft.jsonl"
    assert main(["data", "from-rollouts", str(run), "where=reward>0.9", f"out={out}"]) == 0
    assert "2 conversations of 2 problems" in capsys.readouterr().out
    problems = load_problems(str(out))
    assert len(problems) == 2 and problems[0].conversation is not None
    assert main(["data", "from-rollouts", str(run), "where=reward>9", f"out={out}"]) == 2
    assert main(["data", "from-rollouts", str(tmp_path), f"out={out}"]) == 2


def test_pictures_that_an_agent_sent_are_refused(run, capsys):
    """Rollouts do not say to which of its messages they belong."""
    file = run / "rollouts" / "step-000002.parquet"
    rows = [row | {"images": ["00"]} for row in pq.read_table(file).to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), file)
    config = run / "config.yaml"
    config.write_text(config.read_text() + "agent: {command: python agent.py}\n")
    assert main(["data", "from-rollouts", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a program sent the pictures of row 0" in line


def test_a_run_whose_training_data_are_gone_gives_a_note(run, capsys):
    (run.parent / "train.jsonl").unlink()
    assert main(["data", "from-rollouts", str(run), "where=reward>0.9"]) == 0
    assert "train.jsonl" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"[1, 2]", b"3", b"\xff\xfe", b"[" * 5000])
def test_a_damaged_configuration_is_one_line(run, content, capsys):
    (run / "config.yaml").write_bytes(content)
    assert main(["data", "from-rollouts", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.yaml" in line


def test_a_damaged_file_of_rollouts_is_one_line(run, capsys):
    file = run / "rollouts" / "step-000003.parquet"
    file.write_bytes(b"PAR1 nothing")
    assert main(["data", "from-rollouts", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert file.name in line
    pq.write_table(pa.table({"uid": ["p"]}), file)
    assert main(["data", "from-rollouts", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert file.name in line and "column" in line
