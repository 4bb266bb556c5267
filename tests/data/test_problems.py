"""load_problems: every schema, every file type, every refusal."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from postgrad.data.problems import load_problems
from postgrad.errors import ConfigError

SYSTEM = {"role": "system", "content": "Think."}
USER = {"role": "user", "content": "What is 1+1?"}
VERL = {
    "data_source": "math",
    "prompt": [SYSTEM, USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 3, "split": "train"},
}


def jsonl(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def refused(source: str) -> str:
    """The message of the ConfigError that loading raises; always one line that names the file."""
    with pytest.raises(ConfigError) as caught:
        load_problems(source)
    message = str(caught.value)
    assert "\n" not in message
    assert Path(source).name in message
    return message


# Schemas


def test_verl_parquet(tmp_path: Path):
    path = tmp_path / "train.parquet"
    parquet.write_table(
        pa.Table.from_pylist(
            [VERL, {**VERL, "reward_model": {"style": "model", "ground_truth": "3"}}]
        ),
        path,
    )
    first, second = load_problems(str(path))
    assert first.messages == (SYSTEM, USER)
    assert (first.ground_truth, second.ground_truth, first.data_source, first.demonstrations) == (
        "2",
        "3",
        "math",
        (),
    )
    assert first.extra == {
        "ability": "math",
        "extra_info": {"index": 3, "split": "train"},
        "reward_model": {"style": "rule"},
    }


def test_verl_and_jsonl_give_the_same_problems(tmp_path: Path):
    parquet.write_table(pa.Table.from_pylist([VERL]), tmp_path / "a.parquet")
    assert load_problems(str(tmp_path / "a.parquet")) == load_problems(jsonl(tmp_path, VERL))


def test_luffy_target_becomes_demonstrations(tmp_path: Path):
    targets = [
        [{"role": "assistant", "content": "It is 2."}],
        None,
        [{"role": "assistant", "content": None}, {"role": "assistant", "content": "2"}],
    ]
    parquet.write_table(
        pa.Table.from_pylist([{**VERL, "target": t} for t in targets]), tmp_path / "a.parquet"
    )
    problems = load_problems(str(tmp_path / "a.parquet"))
    assert [p.demonstrations for p in problems] == [("It is 2.",), (), ("2",)]
    assert "target" not in problems[0].extra


@pytest.mark.parametrize(
    ("truth", "text"),
    [(72, "72"), (0.5, "0.5"), (["a", "b"], '["a", "b"]'), ({"b": 1, "a": 2}, '{"a": 2, "b": 1}')],
)
def test_ground_truths_that_are_not_strings(tmp_path: Path, truth: Any, text: str):
    assert (
        load_problems(jsonl(tmp_path, {**VERL, "reward_model": {"ground_truth": truth}}))[
            0
        ].ground_truth
        == text
    )


def test_verl_prompt_as_text_and_missing_extra_info(tmp_path: Path):
    problem = load_problems(
        jsonl(tmp_path, {**VERL, "prompt": "Hi", "extra_info": None, "data_source": None})
    )[0]
    assert problem.messages == ({"role": "user", "content": "Hi"},)
    assert (problem.extra["extra_info"], problem.data_source) == ({}, "")


def test_gsm8k(tmp_path: Path):
    answer = "He has #### of them: <<1000+234=1234>>1,234.\n#### 1,234"
    problem = load_problems(jsonl(tmp_path, {"question": "How many?", "answer": answer}))[0]
    assert problem.messages == ({"role": "user", "content": "How many?"},)
    assert (problem.ground_truth, problem.data_source, problem.demonstrations) == (
        "1234",
        "openai/gsm8k",
        (answer,),
    )


def test_question_and_answer(tmp_path: Path):
    row = {"question": "How many?", "answer": "\\frac12", "level": 5}
    problem = load_problems(jsonl(tmp_path, row, name="math500.jsonl"))[0]
    assert (problem.ground_truth, problem.data_source, problem.demonstrations) == (
        "\\frac12",
        "math500",
        (),
    )
    assert problem.extra == {"level": 5}


def test_instruction_and_output(tmp_path: Path):
    rows = [
        {"instruction": "Name it.", "output": "Bob", "dataset": "d"},
        {"instruction": "Sort.", "input": "b a", "output": "a b"},
    ]
    first, second = load_problems(jsonl(tmp_path, *rows, name="alpaca.v2.jsonl"))
    assert (first.ground_truth, first.demonstrations, first.data_source, first.extra) == (
        "Bob",
        ("Bob",),
        "alpaca.v2",
        {"dataset": "d"},
    )
    assert second.messages[0]["content"] == "Sort.\n\nb a"


def test_chat(tmp_path: Path):
    row = {"messages": [SYSTEM, USER, {"role": "assistant", "content": "2"}], "topic": "sums"}
    problem = load_problems(jsonl(tmp_path, row))[0]
    assert (problem.messages, problem.demonstrations, problem.ground_truth) == (
        (SYSTEM, USER),
        ("2",),
        "",
    )
    assert problem.extra == {"topic": "sums"}


def test_prompt_and_response(tmp_path: Path):
    rows = [
        {"prompt": "Hi", "response": "Ho"},
        {"prompt": [USER], "response": "2", "ground_truth": 2},
    ]
    first, second = load_problems(jsonl(tmp_path, *rows))
    assert (first.messages, first.demonstrations, first.ground_truth) == (
        ({"role": "user", "content": "Hi"},),
        ("Ho",),
        "",
    )
    assert (second.messages, second.ground_truth, second.extra) == ((USER,), "2", {})


def test_preference_pairs(tmp_path: Path):
    chat = [USER, {"role": "assistant", "content": "2"}]
    rows = [
        {"prompt": "Hi", "chosen": "Ho", "rejected": "No", "margin": 1},
        {"prompt": [USER], "chosen": chat, "rejected": "3", "messages": chat},
    ]
    first, second = load_problems(jsonl(tmp_path, *rows))
    assert (first.extra, first.demonstrations, first.ground_truth) == (
        {"chosen": "Ho", "rejected": "No", "margin": 1},
        (),
        "",
    )
    assert (second.extra["chosen"], second.extra["rejected"]) == ("2", "3")


def test_mmlu_csv(tmp_path: Path):
    path = tmp_path / "mmlu_high_school_statistics.csv"
    path.write_text('"Which one,\nplease?",1,"2, or so",3,4,B\nNext?,5,6,7,8,D\n')
    first, second = load_problems(str(path))
    assert (first.ground_truth, second.ground_truth, first.data_source) == ("B", "D", "mmlu")
    content = first.messages[0]["content"]
    assert "about high school statistics." in content
    assert content.endswith("Question: Which one,\nplease?\nA. 1\nB. 2, or so\nC. 3\nD. 4\nAnswer:")
    assert (first.extra["subject"], first.extra["options"]) == (
        "high_school_statistics",
        ["1", "2, or so", "3", "4"],
    )


def test_csv_with_a_header(tmp_path: Path):
    (tmp_path / "a.csv").write_text("question,answer\nHow many?,2\n\nHow few?,1\n")
    assert [p.ground_truth for p in load_problems(str(tmp_path / "a.csv"))] == ["2", "1"]


# Files and sources


def test_json_array_lines_gzip_and_mark(tmp_path: Path):
    rows = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]
    (tmp_path / "x.json").write_text(json.dumps(rows, indent=1))
    wanted = load_problems(str(tmp_path / "x.json"))
    assert load_problems(jsonl(tmp_path, *rows, name="x.json")) == wanted
    assert load_problems(jsonl(tmp_path, rows[0], "", rows[1], name="x.jsonl")) == wanted
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    assert load_problems(str(tmp_path / "x.jsonl.gz")) == wanted
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "x.jsonl").read_bytes())
    assert load_problems(str(tmp_path / "x.jsonl")) == wanted


def test_folder_and_list(tmp_path: Path):
    for name in ("b", "a"):
        jsonl(tmp_path, {"question": name, "answer": "1"}, name=f"{name}.jsonl")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "._a.jsonl").write_text("not data")
    assert [p.messages[0]["content"] for p in load_problems(str(tmp_path))] == ["a", "b"]
    listed = load_problems(f"{tmp_path}/b.jsonl, {tmp_path}/a.jsonl,arithmetic:1:boxed:test")
    assert [p.data_source for p in listed[:3]] == ["b", "a", "arithmetic/boxed"]


def test_a_comma_in_a_path(tmp_path: Path):
    assert (
        len(load_problems(jsonl(tmp_path, {"question": "a", "answer": "1"}, name="a,b.jsonl"))) == 1
    )


def test_levels_that_share_problems_mix():
    problems = load_problems("arithmetic:1:boxed,arithmetic:2:boxed")
    assert len({p.uid for p in problems}) == len(problems)
    assert sum(p.uid.endswith("-2") for p in problems) == len(load_problems("arithmetic:1:boxed"))


# Refusals


def test_missing_file_names_the_nearest(tmp_path: Path):
    jsonl(tmp_path, {"question": "a", "answer": "1"}, name="train.jsonl")
    assert "no such file; did you mean train.jsonl?" in refused(str(tmp_path / "trian.jsonl"))
    assert "has a name like it" in refused(str(tmp_path / "zzz.csv"))
    assert "no folder" in refused(str(tmp_path / "nowhere" / "train.jsonl"))
    assert "no folder" in refused(str(tmp_path / "train.jsonl" / "train.jsonl"))


@pytest.mark.parametrize("source", ["", " ", "a.jsonl,", ",".join(["missing.jsonl"] * 1000)])
def test_sources_that_are_no_sources(source: str):
    with pytest.raises(ConfigError, match=r"has an empty part|no such file"):
        load_problems(source)


def test_unknown_extension(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x")
    assert "unknown extension .txt; data files end in .parquet, .jsonl" in refused(
        str(tmp_path / "a.txt")
    )
    (tmp_path / "b").write_text("x")
    assert "unknown extension (none)" in refused(str(tmp_path / "b"))


def test_folder_without_data(tmp_path: Path):
    assert "a folder without data files" in refused(str(tmp_path))


def test_not_parquet(tmp_path: Path):
    (tmp_path / "a.parquet").write_text("PAR1 not really")
    assert "not a readable parquet file" in refused(str(tmp_path / "a.parquet"))


def test_damaged_parquet(tmp_path: Path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([VERL] * 100), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    assert "not a readable parquet file" in refused(str(path))


def test_bad_json_line_has_its_number(tmp_path: Path):
    good = {"question": "a", "answer": "1"}
    assert "line 3: not JSON (Expecting value at column 14)" in refused(
        jsonl(tmp_path, good, "", '{"question": }')
    )
    assert "line 2: not JSON" in refused(jsonl(tmp_path, good, "[" * 100_000))
    assert "line 2: list, not an object" in refused(jsonl(tmp_path, good, "[1]"))
    (tmp_path / "a.json").write_text('[{"question": "a"},\n')
    assert "not JSON" in refused(str(tmp_path / "a.json"))
    (tmp_path / "a.json").write_text("[1]")
    assert "row 1: int, not an object" in refused(str(tmp_path / "a.json"))


def test_not_text_and_not_gzip(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "a", "answer": "1"}\n\xff\n')
    assert "line 2: not UTF-8 text (byte 0xff)" in refused(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl.gz").write_bytes(b"plain")
    assert "not a readable gzip file" in refused(str(tmp_path / "a.jsonl.gz"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-10])
    assert "not a readable gzip file" in refused(str(tmp_path / "a.jsonl.gz"))


def test_bad_csv(tmp_path: Path):
    (tmp_path / "a.csv").write_text("question,answer\na,1\nb,1,2\n")
    assert "row 2 (line 3) has 3 fields, not 2; quote" in refused(str(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text('question,answer\n"a,1\n')
    assert "not csv" in refused(str(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text("q,1,2,3,4,A\nq,1,2,3,4,E\n")
    assert "row 2: answer must be A, B, C or D, not 'E'" in refused(str(tmp_path / "a.csv"))


def test_a_prompt_alone_and_with_its_truth(tmp_path: Path):
    rows = [
        {"prompt": "1+1", "ground_truth": 2, "level": 1},
        {"prompt": [{"role": "user", "content": "Sing."}]},
    ]
    first, second = load_problems(jsonl(tmp_path, *rows, name="mine.jsonl"))
    assert (first.ground_truth, first.data_source, first.demonstrations, first.extra) == (
        "2",
        "mine",
        (),
        {"level": 1},
    )
    assert (second.ground_truth, second.messages) == ("", ({"role": "user", "content": "Sing."},))


@pytest.mark.parametrize("column", ["answers", "label", "output", "reward_model"])
def test_an_answer_by_another_name_is_not_left_aside(tmp_path: Path, column: str):
    assert f"unknown schema with columns prompt, {column}; rename them" in refused(
        jsonl(tmp_path, {"prompt": "1+1", column: "2"})
    )


def test_a_csv_with_other_marks_between_its_columns(tmp_path: Path):
    (tmp_path / "a.csv").write_text("question;answer\n1+1;2\n")
    assert (
        "one column 'question;answer'; a csv file has commas between its columns, not ';'"
        in refused(str(tmp_path / "a.csv"))
    )


def test_unknown_schema_lists_columns(tmp_path: Path):
    message = refused(jsonl(tmp_path, {"query": "a", "reply": "b"}))
    assert (
        "unknown schema with columns query, reply; rename them to one of: prompt, reward_model, data_source (verl)"
        in message
    )
    assert "messages (chat)" in message


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", ""), ("a.json", "[]"), ("a.csv", "question,answer\n"), ("b.csv", "")],
)
def test_empty_file(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    assert "no rows" in refused(str(tmp_path / name))


def test_empty_parquet(tmp_path: Path):
    parquet.write_table(pa.Table.from_pylist([VERL]).slice(0, 0), tmp_path / "a.parquet")
    assert "no rows" in refused(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("truth", [None, "", float("nan")])
def test_row_without_ground_truth(tmp_path: Path, truth: Any):
    bad = {**VERL, "reward_model": {"ground_truth": truth}}
    assert "line 2: no ground truth: reward_model.ground_truth is empty; fill it" in refused(
        jsonl(tmp_path, VERL, bad)
    )


def test_gsm8k_and_plain_answers_do_not_mix(tmp_path: Path):
    marked, plain = {"question": "q", "answer": "So.\n#### 1"}, {"question": "q", "answer": "1"}
    assert "line 2: no ground truth: answer must end in `#### NUMBER`" in refused(
        jsonl(tmp_path, marked, plain)
    )
    assert "line 2: answer ends in `####`" in refused(jsonl(tmp_path, plain, marked))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": 5, "answer": "1"}, "question must be a string, not int"),
        ({"question": "  ", "answer": "1"}, "question is empty; fill it"),
        (
            {"question": "\ud800", "answer": "1"},
            "question holds half a surrogate pair at character 0",
        ),
        ({"instruction": "a", "output": None}, "output must be a string, not null"),
        (
            {**VERL, "prompt": []},
            "prompt must be a list of messages {role, content} or a string, not an empty list",
        ),
        (
            {**VERL, "prompt": 3},
            "prompt must be a list of messages {role, content} or a string, not int",
        ),
        ({**VERL, "prompt": ["hi"]}, "prompt[0] must be a message {role, content}, not str"),
        (
            {**VERL, "prompt": [USER, {"content": "a"}]},
            "prompt[1] must be a message {role, content}, not an object without a role",
        ),
        ({**VERL, "prompt": [{"role": "user"}]}, "prompt[0] has no content"),
        (
            {**VERL, "prompt": [{"role": "user", "content": [1]}]},
            "prompt[0].content must be a string, not list",
        ),
        (
            {**VERL, "reward_model": "rule"},
            "reward_model must be an object with ground_truth, not str",
        ),
        (
            {**VERL, "target": "text"},
            "target must be a list of messages {role, content} or null, not str",
        ),
        ({**VERL, "target": [3]}, "target[0].content must be a string, not int"),
        ({**VERL, "data_source": 3}, "data_source must be a string, not int"),
        ({"messages": [USER]}, "messages must end in an assistant message"),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "messages must end in an assistant message",
        ),
        (
            {"prompt": "a", "chosen": [USER], "rejected": "b"},
            "chosen must end in an assistant message, not user",
        ),
        ({"prompt": "a", "response": 3}, "response must be a string, not int"),
    ],
)
def test_wrong_types(tmp_path: Path, row: dict[str, Any], message: str):
    assert f"line 1: {message}" in refused(jsonl(tmp_path, row))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ({"question": "a", "answer": "1"}, {"answer": "1"}),
            "no column question, which the first row has",
        ),
        (({"question": "a", "answer": "1"}, {"question": "a"}), "no ground truth: answer is empty"),
        ((VERL, {"prompt": "a"}), "reward_model must be an object with ground_truth, not null"),
        (
            ({"prompt": "a", "response": "b"}, {"response": "b"}),
            "prompt must be a list of messages {role, content} or a string, not null",
        ),
    ],
)
def test_column_missing_in_a_later_row(
    tmp_path: Path, rows: tuple[dict[str, Any], ...], message: str
):
    assert f"line 2: {message}" in refused(jsonl(tmp_path, *rows))


# Layouts of the hub


def test_hub_mmlu(tmp_path: Path):
    row = {
        "question": "Q?",
        "subject": "world_religions",
        "choices": ["w", "x", "y", "z"],
        "answer": 3,
    }
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "test-00000.parquet")
    (problem,) = load_problems(str(tmp_path / "test-00000.parquet"))
    assert (problem.ground_truth, problem.data_source, problem.extra["options"]) == (
        "D",
        "mmlu",
        ["w", "x", "y", "z"],
    )
    assert "question about world religions." in problem.messages[0]["content"]
    assert problem.messages[0]["content"].endswith("Question: Q?\nA. w\nB. x\nC. y\nD. z\nAnswer:")


@pytest.mark.parametrize("answer", [4, -1, True, "E", None, 1.0])
def test_hub_mmlu_answer_that_names_no_option(tmp_path: Path, answer: Any):
    row = {"question": "Q?", "choices": ["w", "x", "y", "z"], "answer": answer}
    assert "answer must be an index from 0 or a letter of the 4 options" in refused(
        jsonl(tmp_path, row)
    )


def test_arc(tmp_path: Path):
    rows = [
        {
            "id": "a",
            "question": "Q?",
            "choices": {"text": ["u", "v", "w"], "label": ["A", "B", "C"]},
            "answerKey": "B",
        },
        {
            "id": "b",
            "question": "Q?",
            "choices": {"text": ["u", "v", "w"], "label": ["1", "2", "3"]},
            "answerKey": "3",
        },
    ]
    first, second = load_problems(jsonl(tmp_path, *rows))
    assert (first.ground_truth, second.ground_truth, first.data_source) == ("B", "C", "arc_c")
    assert first.messages == ({"role": "user", "content": "Q?\n\nA) u\nB) v\nC) w\n"},)
    assert "answerKey is '4', the options are 1, 2, 3" in refused(
        jsonl(tmp_path, {**rows[1], "answerKey": "4"})
    )
    assert "choices must be an object with text and label" in refused(
        jsonl(tmp_path, {**rows[1], "choices": ["u"]})
    )


def test_hh_transcripts(tmp_path: Path):
    """Speakers take turns: "Human:" in the human's own words opens no new turn."""
    start = "\n\nHuman: Say:\n\nHuman: hi\n\nAssistant: hi\n\nHuman: Again\n\nAssistant:"
    (problem,) = load_problems(
        jsonl(tmp_path, {"chosen": f"{start} hi hi", "rejected": f"{start} no"})
    )
    assert [(m["role"], m["content"]) for m in problem.messages] == [
        ("user", "Say:\n\nHuman: hi"),
        ("assistant", "hi"),
        ("user", "Again"),
    ]
    assert (problem.extra["chosen"], problem.extra["rejected"], problem.data_source) == (
        "hi hi",
        "no",
        "hh_rlhf",
    )


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        ("Human: a\n\nAssistant: b", "\n\nHuman: a\n\nAssistant: c", "chosen is no transcript"),
        (
            "\n\nHuman: a\n\nAssistant: b",
            "\n\nHuman: x\n\nAssistant: c",
            "chosen and rejected differ before the last reply",
        ),
        (
            "\n\nHuman: a\n\nAssistant: b",
            "\n\nHuman: a\n\nAssistant: ",
            "rejected has an empty turn (number 2, assistant)",
        ),
        (
            "\n\nHuman: a",
            "\n\nHuman: a\n\nAssistant: c",
            "chosen does not end in a reply of the assistant",
        ),
    ],
)
def test_hh_transcripts_that_are_none(tmp_path: Path, chosen: str, rejected: str, message: str):
    assert message in refused(jsonl(tmp_path, {"chosen": chosen, "rejected": rejected}))


@pytest.mark.parametrize(
    "reward",
    [{"style": "model", "ground_truth": None}, {"style": "rule", "raw_question_for_monitor": "Q?"}],
)
def test_a_judge_needs_no_ground_truth(tmp_path: Path, reward: dict[str, Any]):
    assert load_problems(jsonl(tmp_path, {**VERL, "reward_model": reward}))[0].ground_truth == ""


def test_large_parquet_files_are_read_in_batches(tmp_path: Path):
    rows = [{**VERL, "extra_info": {"index": i, "split": "train"}} for i in range(2345)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    problems = load_problems(str(tmp_path / "a.parquet"))
    assert [p.extra["extra_info"]["index"] for p in problems] == list(range(2345))


QUESTION = ({"role": "user", "content": "1+1?"},)
REPLY = [{"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("row", "truth", "shown", "extra"),
    [
        ({"prompt": "1+1?", "answer": 2}, "2", (), {}),
        ({"prompt": list(QUESTION), "ground_truth": "2", "level": 3}, "2", (), {"level": 3}),
        ({"prompt": list(QUESTION), "solution": "$2$"}, "$2$", (), {}),
        (
            {"prompt": "1+1?", "ground_truth": "2", "answer": "It is 2."},
            "2",
            (),
            {"answer": "It is 2."},
        ),
        ({"prompt": "1+1?", "answer": "one more\n#### 2"}, "2", ("one more\n#### 2",), {}),
        ({"prompt": "1+1?", "completion": "2"}, "", ("2",), {}),
        ({"prompt": list(QUESTION), "completion": REPLY}, "", ("2",), {}),
        ({"problem": "1+1?", "answer": "2", "solution": "Count: 2."}, "2", ("Count: 2.",), {}),
        ({"problem": "1+1?", "answer": "2", "solution": None}, "2", (), {"solution": None}),
        (
            {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
            "",
            ("2",),
            {},
        ),
        ({"conversations": [*QUESTION, *REPLY]}, "", ("2",), {}),
        (
            {
                "chosen": [*QUESTION, *REPLY],
                "rejected": [*QUESTION, {"role": "assistant", "content": "3"}],
            },
            "",
            (),
            {"chosen": "2", "rejected": "3"},
        ),
        ({"prompt": "1+1?", "tests": ["a", "b"]}, "", (), {"tests": ["a", "b"]}),
    ],
)
def test_columns_as_other_trainers_and_the_hub_name_them(
    tmp_path: Path, row: Any, truth: str, shown: Any, extra: Any
):
    problem = load_problems(jsonl(tmp_path, row))[0]
    assert (problem.messages, problem.ground_truth, problem.demonstrations, problem.extra) == (
        QUESTION,
        truth,
        shown,
        extra,
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"chosen": [*QUESTION, *REPLY], "rejected": REPLY},
            "the same messages up to the last reply; or give the question in a column prompt",
        ),
        ({"chosen": REPLY, "rejected": REPLY}, "the same messages up to the last reply"),
        (
            {"chosen": [*QUESTION, *QUESTION], "rejected": [*QUESTION, *QUESTION]},
            "chosen must end in an assistant message, not user",
        ),
        (
            {"conversations": [{"from": "human", "value": "1+1?"}]},
            "conversations must end in an assistant message",
        ),
        (
            {"conversations": [{"from": "human"}, {"from": "gpt", "value": "2"}]},
            "conversations[0].content must be a string, not null",
        ),
        ({"conversations": "1+1?"}, "conversations must be a list of turns {from, value}, not str"),
        ({"prompt": "1+1?", "answer": None}, "no ground truth: answer is empty"),
        ({"problem": "1+1?", "answer": "2", "solution": 3}, "solution must be a string, not int"),
    ],
)
def test_such_columns_are_checked_too(tmp_path: Path, row: Any, message: str):
    assert message in refused(jsonl(tmp_path, row))
