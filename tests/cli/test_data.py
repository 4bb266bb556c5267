"""`postgrad data ...`: its output, its exit codes, and that bad input writes nothing."""

import csv
import json
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from fixture_types import Capture, Patch

from postgrad.cli.main import main
from postgrad.data.problems import load_problems

ROWS = [
    {"question": f"What is {i}+1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(5)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Returns the exit code, standard output and standard error of `postgrad data ...`."""
    code = main(["data", *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_prepare_then_check_accepts_every_gold_answer(folder: Path, capsys: Capture):
    code, out, _ = run(capsys, "prepare", "gsm8k", "from=train.jsonl")
    assert code == 0
    assert out.startswith(
        "gsm8k train: 5 problems of 5 rows from train.jsonl\nwritten: gsm8k-train.parquet ("
    )
    assert "unchanged" in run(capsys, "prepare", "gsm8k", "from=train.jsonl")[1]
    code, out, _ = run(capsys, "check", "gsm8k-train.parquet")
    assert code == 0
    assert out == (
        "5 problems, 5 gold answers scored\n"
        "gold answers that the verifier rejects: none\n"
        "wrong answers that the verifier accepts, of 5 near misses: none\n"
        "demonstrations that the verifier rejects: none\n"
        "duplicate questions: none\n"
    )


def test_check_fails_on_wrong_golds_and_lists_them(folder: Path, capsys: Capture):
    (folder / "bad.jsonl").write_text(
        json.dumps({"question": "How?", "answer": "well", "data_source": "gsm8k"}) + "\n"
    )
    code, out, _ = run(capsys, "check", "bad.jsonl", "train.jsonl", "against=train.jsonl")
    assert code == 1
    assert "gold answers that the verifier rejects: 1\n  bad.jsonl: line 1 (uid " in out
    assert "questions that are also in train.jsonl: 5\n" in out


def test_check_that_scored_nothing_is_no_success(folder: Path, capsys: Capture):
    row = {"question": "How?", "answer": "well", "data_source": "my_set"}
    (folder / "own.jsonl").write_text(json.dumps(row) + "\n")
    code, out, err = run(capsys, "check", "own.jsonl")
    assert code == 2 and "verifier=NAME" in err
    assert "rejects" not in out and "duplicate questions: none\n" in out
    assert run(capsys, "check", "own.jsonl", "verifier=exact")[0] == 0


def test_show_prints_problems_and_the_prompt_of_a_model(folder: Path, tiny: Path, capsys: Capture):
    run(capsys, "prepare", "gsm8k", "from=train.jsonl", "style=bare")
    code, out, _ = run(capsys, "show", "gsm8k-train.parquet", "n=1", "skip=1")
    assert code == 0
    first, columns, *_ = out.split("\n")
    assert first == "prepared: gsm8k train, style bare, 5 of 5 rows"
    assert columns.startswith("gsm8k-train.parquet: verl rows: reads uid, data_source, prompt")
    assert "\n\n── gsm8k-train.parquet: row 2 · uid " in out
    problem = "user:\n    What is 1+1?\nground truth: 2\n"
    demonstration = "demonstration 1 (15 characters):\n    It is 2.\n    #### 2\n"
    assert problem + demonstration in out
    assert out.endswith("5 problems in gsm8k-train.parquet\n") and "row 3" not in out
    uid = load_problems("gsm8k-train.parquet")[4].uid
    assert "row 5" in run(capsys, "show", "gsm8k-train.parquet", f"uid={uid}")[1]
    code, out, _ = run(
        capsys, "show", "gsm8k-train.parquet", "n=1", f"model={tiny}", "style=question_only"
    )
    assert code == 0 and "prompt, " in out and " tokens:\n    What is 0+1?\n" in out


def test_add_uid_writes_the_uids_of_a_run_and_never_replaces_them(folder: Path, capsys: Capture):
    uids = [problem.uid for problem in load_problems("train.jsonl")]
    code, out, _ = run(capsys, "add-uid", "train.jsonl")
    assert (code, out) == (0, "5 rows with uids: train.uid.jsonl\n")
    rows = [json.loads(line) for line in (folder / "train.uid.jsonl").read_text().splitlines()]
    assert [row["uid"] for row in rows] == uids and rows[0]["answer"] == ROWS[0]["answer"]
    before = (folder / "train.uid.jsonl").read_bytes()
    code, _, err = run(capsys, "add-uid", "train.uid.jsonl")
    assert code == 2
    assert "uid" in err
    assert (folder / "train.uid.jsonl").read_bytes() == before
    assert not (folder / "train.uid.uid.jsonl").exists()
    run(capsys, "export", "train.jsonl", "out=plain.parquet")
    run(capsys, "add-uid", "plain.parquet", "out=named.parquet")
    assert parquet.read_table("named.parquet").column_names == ["uid", "question", "answer"]
    assert [problem.uid for problem in load_problems("named.parquet")] == uids


def test_prepare_hashes_the_question_and_add_uid_the_messages(folder: Path, capsys: Capture):
    uids: dict[str, list[str]] = {}
    for style in ("bare", "boxed"):
        run(
            capsys, "prepare", "gsm8k", "from=train.jsonl", f"style={style}", f"out={style}.parquet"
        )
        table = parquet.read_table(f"{style}.parquet")
        uids[style] = table["uid"].to_pylist()
        parquet.write_table(table.drop_columns("uid"), f"{style}.verl.parquet")
        in_a_run = [problem.uid for problem in load_problems(f"{style}.verl.parquet")]
        run(capsys, "add-uid", f"{style}.verl.parquet", f"out={style}.uid.parquet")
        assert parquet.read_table(f"{style}.uid.parquet")["uid"].to_pylist() == in_a_run
        uids[f"{style} verl"] = in_a_run
    assert uids["bare"] == uids["boxed"] == uids["bare verl"] != uids["boxed verl"]


def test_export_converts_between_formats(folder: Path, capsys: Capture):
    run(capsys, "prepare", "gsm8k", "from=train.jsonl")
    code, out, _ = run(capsys, "export", "gsm8k-train.parquet", "out=rows.csv")
    assert (code, out) == (0, "5 rows: rows.csv\n")
    with (folder / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert json.loads(rows[0]["reward_model"]) == {"style": "rule", "ground_truth": "1"}
    assert json.loads(rows[0]["prompt"])[0]["role"] == "user"
    run(capsys, "export", "gsm8k-train.parquet", "out=rows.jsonl")
    assert load_problems("rows.jsonl") == load_problems("gsm8k-train.parquet")
    run(capsys, "export", "gsm8k-train.parquet", "out=two.csv", "columns=uid,data_source")
    assert (folder / "two.csv").read_text().splitlines()[0] == "uid,data_source"


def test_help_and_the_list_of_data_sets(folder: Path, capsys: Capture):
    assert "postgrad data COMMAND" in run(capsys)[1]
    assert "  gsm8k " in run(capsys, "prepare")[1]
    assert "duplicates=" in run(capsys, "prepare", "--help")[1]
    assert "postgrad data check FILE" in run(capsys, "check", "--help")[1]


def test_lists_as_truths_are_reported_and_their_first_text_is_read(folder: Path, capsys: Capture):
    row = {"prompt": "2+2?", "ground_truth": ["4"]}
    (folder / "lists.jsonl").write_text(json.dumps(row) + "\n")
    code, out, _ = run(capsys, "check", "lists.jsonl", "verifier=math")
    assert code == 0 and "1 of 1 ground truths are lists or objects" in out
    renamed = "lists.jsonl:ground_truth.0=ground_truth"
    code, out, _ = run(capsys, "check", renamed, "verifier=math")
    assert code == 0 and "ground truths are" not in out
    assert "ground truth: 4" in run(capsys, "show", renamed)[1]
    code, _, error = run(capsys, "show", "lists.jsonl:ground_truth.1=ground_truth")
    assert code == 2 and "no column 1 in ground_truth" in error


def test_prepare_renames_columns(folder: Path, capsys: Capture):
    for name in ("one", "two"):
        row = {"trajectory": [{"role": "user", "content": name}], "chosen": "a", "rejected": "b"}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    columns = ":trajectory=prompt"
    files = f"from=one.jsonl{columns},two.jsonl{columns}"
    code, _, _ = run(capsys, "prepare", "own", files, "out=pairs.parquet")
    assert code == 0
    asked = [problem.messages[-1]["content"] for problem in load_problems("pairs.parquet")]
    assert asked == ["one", "two"]
    assert b'"trajectory": "prompt"' in parquet.read_metadata("pairs.parquet").metadata[b"postgrad"]
    code, _, error = run(
        capsys, "prepare", "own", f"from=one.jsonl{columns},two.jsonl", "out=a.parquet"
    )
    assert code == 2 and "rename the same columns" in error
