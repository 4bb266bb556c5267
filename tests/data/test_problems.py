"""load_problems: sources, every file type, every error."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from postgrad.data import problems
from postgrad.data.problems import load_problems, problems_of_rows
from postgrad.data.rows import files
from postgrad.data.sets import split_sets
from postgrad.errors import ConfigError
from postgrad.phases import shown_by
from postgrad.problem import Conversation, problem_label, sent_fields

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


def refusal_of(source: str) -> str:
    """The message of the ConfigError; asserts that it is one line and names the file."""
    with pytest.raises(ConfigError) as caught:
        load_problems(source)
    message = str(caught.value)
    assert "\n" not in message
    assert Path(source).name in message
    return message


# Shapes: see also test_shapes.py


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


@pytest.mark.parametrize("number", [0, 5])
def test_an_input_of_an_instruction_that_is_a_number_is_refused(number: int, tmp_path: Path):
    row = {"instruction": "Double it.", "input": number, "output": "x"}
    assert "input" in refusal_of(jsonl(tmp_path, row))


def test_messages_as_json_text(tmp_path: Path):
    """Parquet files of other tools hold nested columns as text."""
    turns = [USER, {"role": "assistant", "content": "2"}]
    problem = load_problems(jsonl(tmp_path, {"messages": json.dumps(turns)}))[0]
    assert problem.messages == (USER,) and problem.demonstrations == ("2",)
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    problem = load_problems(jsonl(tmp_path, {"conversations": json.dumps(sharegpt)}))[0]
    assert problem.demonstrations == ("Hello",)
    row = VERL | {name: json.dumps(VERL[name]) for name in ("prompt", "reward_model")}
    problem = load_problems(jsonl(tmp_path, row))[0]
    assert problem.messages == (SYSTEM, USER) and problem.ground_truth == "2"


def test_a_prompt_in_brackets_stays_a_text(tmp_path: Path):
    flight = '[{"from": "Rome", "to": "Oslo"}]'
    cast = '[{"role": "king", "content": "a crown"}]'
    for text in ("[1, 2]", '[{"a": 1}]', "[]", "[not JSON", flight, cast):
        problem = load_problems(jsonl(tmp_path, {"prompt": text, "answer": "3"}))[0]
        assert problem.messages[0]["content"] == text
        problem = load_problems(jsonl(tmp_path, {"prompt": "Write.", "completion": text}))[0]
        assert problem.demonstrations == (text,)
        row = {"prompt": "Write.", "chosen": text, "rejected": "no"}
        assert load_problems(jsonl(tmp_path, row))[0].extra["chosen"] == text


def test_a_call_in_json_text_needs_no_content(tmp_path: Path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    turns = [USER, call, {"role": "tool", "content": "2"}]
    row = {"prompt": json.dumps(turns), "answer": "2"}
    (problem,) = load_problems(jsonl(tmp_path, row))
    assert [message["role"] for message in problem.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_json_text_of_messages_may_have_other_roles(column: str, tmp_path: Path):
    turns = [USER, {"role": "critic", "content": "Sure?"}, {"role": "assistant", "content": "2"}]
    (problem,) = load_problems(jsonl(tmp_path, {column: json.dumps(turns)}))
    assert [message["role"] for message in problem.messages] == ["user", "critic"]


def test_tools_of_sharegpt(tmp_path: Path):
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    turns = [
        {"from": "human", "value": "Weather in Rome?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "It is sunny."},
    ]
    problem = load_problems(jsonl(tmp_path, {"conversations": turns}))[0]
    roles = [message["role"] for message in problem.messages]
    assert roles == ["user", "assistant", "tool"]
    assert problem.messages[1]["tool_calls"][0]["function"] == call
    weighted = [turns[0], turns[1] | {"weight": 0}, *turns[2:]]
    conversation = load_problems(jsonl(tmp_path, {"conversations": weighted}))[0].conversation
    assert conversation and conversation.messages[1]["weight"] == 0
    turns[1]["value"] = "weather(Rome)"
    assert "function_call" in refusal_of(jsonl(tmp_path, {"conversations": turns}))


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


def test_json_array_json_lines_gzip_and_byte_order_mark(tmp_path: Path):
    rows = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]
    (tmp_path / "x.json").write_text(json.dumps(rows, indent=1))
    expected = load_problems(str(tmp_path / "x.json"))
    assert load_problems(jsonl(tmp_path, *rows, name="x.json")) == expected
    assert load_problems(jsonl(tmp_path, rows[0], "", rows[1], name="x.jsonl")) == expected
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    assert load_problems(str(tmp_path / "x.jsonl.gz")) == expected
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "x.jsonl").read_bytes())
    assert load_problems(str(tmp_path / "x.jsonl")) == expected


def test_folder_and_list(tmp_path: Path):
    for name in ("b", "a"):
        jsonl(tmp_path, {"question": name, "answer": "1"}, name=f"{name}.jsonl")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "._a.jsonl").write_text("not data")
    assert [p.messages[0]["content"] for p in load_problems(str(tmp_path))] == ["a", "b"]
    listed = load_problems(f"{tmp_path}/b.jsonl, {tmp_path}/a.jsonl,arithmetic:1:boxed:test")
    assert [p.data_source for p in listed[:3]] == ["b", "a", "arithmetic/boxed"]


def test_columns_of_a_file_are_renamed(tmp_path: Path):
    path = jsonl(tmp_path, {"text": "What is 1+1?", "final": 2, "level": 1})
    problem = load_problems(f"{path}:text=prompt:final=ground_truth")[0]
    assert (problem.messages, problem.ground_truth) == ((USER,), "2")
    assert problem.extra == {"level": 1}
    folder = load_problems(f"{tmp_path}:text=prompt:final=ground_truth")
    assert folder == [problem]
    with pytest.raises(ConfigError, match="no column txt; did you mean text"):
        load_problems(f"{path}:txt=prompt")
    assert "missing.jsonl" in refusal_of_source(f"{tmp_path}/missing.jsonl:a=b")


def test_a_renamed_column_replaces_one_of_its_new_name(tmp_path: Path):
    for row in ({"prompt": "a", "query": "b"}, {"query": "b", "prompt": "a"}):
        path = jsonl(tmp_path, row)
        assert load_problems(f"{path}:query=prompt")[0].messages[0]["content"] == "b"


def test_sft_rows_of_verl_with_nested_keys(tmp_path: Path):
    """data.prompt_key=extra_info, prompt_dict_keys=[question], and the same for the response."""
    info = {"question": "What is 1+1?", "answer": "1+1 is 2. #### 2"}
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([VERL | {"extra_info": info}]), path)
    (problem,) = load_problems(f"{path}:extra_info.question=prompt:extra_info.answer=response")
    assert problem.messages == (USER,)
    assert problem.demonstrations == ("1+1 is 2. #### 2",)
    assert (problem.ground_truth, problem.extra["extra_info"]) == ("2", info)
    assert "response" not in problem.extra
    with pytest.raises(ConfigError, match="no column reply in extra_info"):
        load_problems(f"{path}:extra_info.reply=response")
    with pytest.raises(ConfigError, match=r"no column info\.answer"):
        load_problems(f"{path}:info.answer=response")


@pytest.mark.parametrize("more", [{}, {"label": 1}, {"url": "x"}])
def test_plain_texts_of_trl(tmp_path: Path, more: dict[str, Any]):
    path = jsonl(tmp_path, {"text": "one two"} | more, {"text": "three"} | more)
    first, second = load_problems(path)
    assert first.conversation == Conversation((), text="one two")
    assert (first.demonstrations, first.ground_truth, first.extra) == ((), "", more)
    assert first.uid != second.uid and len(first.uid) == 16


def test_a_set_with_renamed_columns_has_the_name_of_its_file():
    assert split_sets("a/math.jsonl:q=prompt,x=b.jsonl:q=prompt") == {
        "math": "a/math.jsonl:q=prompt",
        "x": "b.jsonl:q=prompt",
    }


def test_a_path_with_a_colon_and_an_equals_sign_is_a_path(tmp_path: Path):
    path = jsonl(tmp_path, VERL, name="step:lr=1.jsonl")
    assert len(load_problems(path)) == 1


def refusal_of_source(source: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_problems(source)
    return str(caught.value)


def test_a_comma_in_a_path(tmp_path: Path):
    assert (
        len(load_problems(jsonl(tmp_path, {"question": "a", "answer": "1"}, name="a,b.jsonl"))) == 1
    )


@pytest.mark.slow
def test_levels_that_share_problems_mix():
    problems = load_problems("arithmetic:1:boxed,arithmetic:2:boxed")
    assert len({p.uid for p in problems}) == len(problems)
    assert sum(p.uid.endswith("-2") for p in problems) == len(load_problems("arithmetic:1:boxed"))


# Errors


def test_extensions_do_not_make_names_of_files_similar(tmp_path):
    for name in ("train.jsonl", "train.csv", "nogt.jsonl"):
        (tmp_path / name).write_text("")
    assert "did you mean train.jsonl?" in refusal_of(str(tmp_path / "trian.jsonl"))
    assert "did you mean train.csv?" in refusal_of(str(tmp_path / "tran.csv"))
    assert "did you mean" not in refusal_of(str(tmp_path / "missing.jsonl"))


def test_missing_file_suggests_the_closest_name(tmp_path: Path):
    jsonl(tmp_path, {"question": "a", "answer": "1"}, name="train.jsonl")
    assert "train.jsonl" in refusal_of(str(tmp_path / "trian.jsonl"))
    assert "no such file" in refusal_of(str(tmp_path / "zzz.csv"))
    assert "no folder" in refusal_of(str(tmp_path / "nowhere" / "train.jsonl"))
    assert "no folder" in refusal_of(str(tmp_path / "train.jsonl" / "train.jsonl"))


@pytest.mark.parametrize("source", ["", " ", "a.jsonl,", ",".join(["missing.jsonl"] * 1000)])
def test_invalid_sources(source: str):
    with pytest.raises(ConfigError, match=r"data source|missing\.jsonl"):
        load_problems(source)


def test_unknown_extension(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x")
    assert "extension .txt" in refusal_of(str(tmp_path / "a.txt"))
    (tmp_path / "b").write_text("x")
    assert "extension (none)" in refusal_of(str(tmp_path / "b"))


def test_folder_without_data(tmp_path: Path):
    assert "no data files" in refusal_of(str(tmp_path))


def test_text_named_parquet(tmp_path: Path):
    (tmp_path / "a.parquet").write_text("PAR1 not really")
    assert "not a readable parquet file" in refusal_of(str(tmp_path / "a.parquet"))


def test_damaged_parquet(tmp_path: Path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([VERL] * 100), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    assert "not a readable parquet file" in refusal_of(str(path))


def test_the_name_of_a_problem_says_where_it_was_read(tmp_path: Path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    first, second = load_problems(jsonl(tmp_path, *rows, name="sums.jsonl"))
    assert problem_label(second).startswith(
        f"problem {second.uid} "
    ) and "sums.jsonl: line 2" in problem_label(second)
    assert "row 1" in problem_label(problems_of_rows(rows, "data")[0])
    assert "read_from" not in sent_fields(second)
    assert first == replace(first, read_from="elsewhere")


def test_invalid_utf8_and_invalid_gzip(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "a", "answer": "1"}\n\xff\n')
    assert "line 2: not UTF-8" in refusal_of(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl.gz").write_bytes(b"plain")
    assert "not a readable jsonl.gz file" in refusal_of(str(tmp_path / "a.jsonl.gz"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-10])
    assert "not a readable jsonl.gz file" in refusal_of(str(tmp_path / "a.jsonl.gz"))


def test_a_small_file_with_a_line_without_end_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE", 1 << 10)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": "a", "answer": "1"}\n' + b"x" * (1 << 20)))
    assert "line 2 is longer than" in refusal_of(str(path))


def test_long_files_show_how_far_they_are(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(problems, "ROWS_PER_COUNT", 2)
    path = jsonl(tmp_path, *({"question": f"a{i}", "answer": "1"} for i in range(5)))
    shown = []
    with shown_by(lambda phase, done, total: shown.append((phase, done, total))):
        load_problems(path)
    assert shown == [(f"reading {path}", done, 0) for done in (0, 2, 4)]


def test_bad_csv(tmp_path: Path):
    (tmp_path / "a.csv").write_text("question,answer\na,1\nb,1,2\n")
    assert "row 2 (line 3) has 3 fields" in refusal_of(str(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text('question,answer\n"a,1\n')
    assert "not csv" in refusal_of(str(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text("q,1,2,3,4,A\nq,1,2,3,4,E\n")
    assert "row 2: answer" in refusal_of(str(tmp_path / "a.csv"))


def test_content_of_text_parts_is_joined(tmp_path: Path):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?"}]
    rows = [{"prompt": [{"role": "user", "content": parts}], "answer": "2"}]
    assert load_problems(jsonl(tmp_path, *rows))[0].messages == (USER,)
    rows[0]["prompt"][0]["content"] = [{"type": "image"}, *parts]
    assert "pictures: 1 places" in refusal_of(jsonl(tmp_path, *rows))


def test_verl_without_data_source(tmp_path: Path):
    row = {key: value for key, value in VERL.items() if key != "data_source"}
    problem = load_problems(jsonl(tmp_path, row))[0]
    assert (problem.data_source, problem.ground_truth) == ("", "2")


@pytest.mark.parametrize("truth", [None, "", float("nan")])
def test_row_without_ground_truth(tmp_path: Path, truth: Any):
    bad = {**VERL, "reward_model": {"ground_truth": truth}}
    message = refusal_of(jsonl(tmp_path, VERL, bad))
    assert "line 2: no ground truth: reward_model.ground_truth" in message


@pytest.mark.parametrize(
    ("row", "column", "seen"),
    [
        ({"question": 5, "answer": "1"}, "question", "int"),
        ({"question": "  ", "answer": "1"}, "question", "empty"),
        ({"question": "\ud800", "answer": "1"}, "question", "surrogate"),
        ({"instruction": "a", "output": None}, "output", "null"),
        ({**VERL, "prompt": []}, "prompt", "an empty list"),
        ({**VERL, "prompt": 3}, "prompt", "int"),
        ({**VERL, "prompt": ["hi"]}, "prompt[0]", "str"),
        ({**VERL, "prompt": [USER, {"content": "a"}]}, "prompt[1]", "without a role"),
        ({**VERL, "prompt": [{"role": "user"}]}, "prompt[0]", "no content"),
        ({**VERL, "prompt": [{"role": "user", "content": [1]}]}, "prompt[0].content[0]", "int"),
        ({**VERL, "reward_model": "rule"}, "reward_model", "str"),
        ({**VERL, "target": "text"}, "target", "str"),
        ({**VERL, "target": [3]}, "target[0].content", "int"),
        ({**VERL, "data_source": 3}, "data_source", "int"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", "assistant"),
        ({"prompt": "a", "chosen": [USER], "rejected": "b"}, "chosen", "user"),
        ({"prompt": "a", "response": 3}, "response", "int"),
    ],
)
def test_wrong_types(tmp_path: Path, row: dict[str, Any], column: str, seen: str):
    message = refusal_of(jsonl(tmp_path, row))
    assert "line 1: " in message and column in message and seen in message


@pytest.mark.parametrize(
    ("rows", "key"),
    [
        (({"question": "a", "answer": "1"}, {"answer": "1"}), "no column prompt or question"),
        ((VERL, {"prompt": "a"}), "no column reward_model"),
        (({"prompt": "a", "response": "b"}, {"response": "b"}), "no column prompt"),
    ],
)
def test_column_missing_in_a_later_row(tmp_path: Path, rows: tuple[dict[str, Any], ...], key: str):
    assert f"line 2: {key}" in refusal_of(jsonl(tmp_path, *rows))


# Column layouts on the hub


@pytest.mark.parametrize("answer", [4, -1, True, "E", None, 1.5])
def test_hub_mmlu_answer_that_names_no_option(tmp_path: Path, answer: Any):
    row = {"question": "Q?", "choices": ["w", "x", "y", "z"], "answer": answer}
    message = refusal_of(jsonl(tmp_path, row))
    assert "line 1: answer" in message and "4 options" in message


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
    assert "answerKey is '4'" in refusal_of(jsonl(tmp_path, {**rows[1], "answerKey": "4"}))
    assert "line 1: choices" in refusal_of(jsonl(tmp_path, {**rows[1], "choices": ["u"]}))


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


def test_exported_csv_is_read_back(tmp_path):
    from postgrad.data.tables import add_uids, export

    rows = [
        {
            "uid": f"u{i}",
            "data_source": "math",
            "prompt": [{"role": "user", "content": f"[{i}] is a list?"}],
            "target": [{"role": "assistant", "content": "yes"}] if i else None,
            "reward_model": {"style": "rule", "ground_truth": "[1, 2]"},
            "extra_info": {"index": i},
        }
        for i in range(2)
    ]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    export(source, tmp_path / "a.csv")
    assert load_problems(str(tmp_path / "a.csv")) == load_problems(str(source))
    for row in rows:
        del row["uid"]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    export(source, tmp_path / "b.csv")
    assert add_uids(tmp_path / "b.csv", tmp_path / "c.csv") == 2
    assert load_problems(str(tmp_path / "c.csv")) == load_problems(str(source))
    plain = tmp_path / "plain.csv"
    plain.write_text('question,answer\n"[1]?","[1,2]"\n')
    assert load_problems(str(plain))[0].ground_truth == "[1,2]", "only nested columns are JSON"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What is 1+1?", "ground_truth": "2"},
        {"question": "What is 1+1?", "answer": "2"},
        {"prompt": "What is 1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": "What is 1+1?", "completion": [{"role": "assistant", "content": "2"}]},
        {
            "conversations": [
                {"from": "human", "value": "What is 1+1?"},
                {"from": "gpt", "value": "2"},
            ]
        },
    ],
)
def test_a_system_column_is_read_in_every_shape(tmp_path: Path, row: dict[str, Any]):
    """SFT, DPO and RL on the same columns must have the same prompt."""
    problem = load_problems(jsonl(tmp_path, row | {"system": "Think."}))[0]
    assert problem.messages == (SYSTEM, USER) and "system" not in problem.extra
    if problem.conversation is not None:
        assert problem.conversation.messages[:2] == (SYSTEM, USER)
        assert problem.conversation.num_prompt in (0, 2)
    own = {"prompt": [{"role": "system", "content": "Own."}, USER], "ground_truth": "2"}
    kept = load_problems(jsonl(tmp_path, own | {"system": "Think."}))[0]
    assert kept.messages[0]["content"] == "Own."


def test_a_target_beside_a_prompt_is_a_demonstration(tmp_path: Path):
    first = {"prompt": "1+1?", "ground_truth": "2", "target": None}
    second = {
        "prompt": "1+2?",
        "ground_truth": "3",
        "target": [{"role": "assistant", "content": "3"}],
    }
    problems = load_problems(jsonl(tmp_path, first, second))
    assert [problem.demonstrations for problem in problems] == [(), ("3",)]
    assert "target must be a list" in refusal_of(jsonl(tmp_path, {"prompt": "1+1?", "target": "2"}))


def test_a_file_that_is_no_plain_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "not a file" in refusal_of(str(tmp_path / "pipe.jsonl"))
    (tmp_path / "a.json").write_text(json.dumps(VERL, indent=1))
    assert "array of objects" in refusal_of(str(tmp_path / "a.json"))
    parquet.write_table(pa.Table.from_pylist([VERL]).slice(0, 0), tmp_path / "a.parquet")
    assert "no rows" in refusal_of(str(tmp_path / "a.parquet"))


# Tables: name, text
TABLES = [
    ("a.csv", 'question,answer\n"1; 1, or so?","2"\nB\tand?,3\n'),
    ("a.csv", '\ufeffquestion;answer\r\n"1; 1, or so?";2\r\n;\r\nB\tand?;3\r\n'),
    ("a.csv", 'question\tanswer\n1; 1, or so?\t2\n"B\tand?"\t3\n'),
    ("a.tsv", 'question\tanswer\n1; 1, or so?\t2\n"B\tand?"\t3\n'),
    ("a.tsv", '"question";"answer"\n"1; 1, or so?";"2"\n"B\tand?";"3"\n'),
]


def table_rows(path: Path, text: str) -> list[tuple[str, str]]:
    path.write_text(text, newline="")
    return [(p.messages[0]["content"], p.ground_truth) for p in load_problems(str(path))]


@pytest.mark.parametrize(("name", "text"), TABLES)
def test_the_header_says_the_delimiter(tmp_path: Path, name: str, text: str):
    assert table_rows(tmp_path / name, text) == [("1; 1, or so?", "2"), ("B\tand?", "3")]


def test_quotes_of_a_tab_separated_file_may_be_part_of_the_text(tmp_path: Path):
    """They join no rows: each line is as wide as the header."""
    lines = ["question\tanswer", '"Stop, he said.\t2', "b\t3", 'Then he said no."\t4']
    expected = [('"Stop, he said.', "2"), ("b", "3"), ('Then he said no."', "4")]
    assert table_rows(tmp_path / "a.tsv", "\n".join(lines)) == expected
    quoted = 'question\tanswer\n"x = 1\n\ty = 2"\t3\n"a"\t4\n'
    assert table_rows(tmp_path / "b.tsv", quoted) == [("x = 1\n\ty = 2", "3"), ("a", "4")]


def test_a_table_of_one_column_loses_no_row(tmp_path: Path):
    rows = table_rows(tmp_path / "a.tsv", "prompt\nHi; you, there\n\nNo, you\n")
    assert rows == [("Hi; you, there", ""), ("No, you", "")]
    (tmp_path / "a.csv").write_text('prompt\nHi\n""\n')
    assert "row 2: prompt is empty" in refusal_of(str(tmp_path / "a.csv"))


def test_a_folder_with_the_same_data_twice_is_refused(tmp_path: Path):
    for name in ("a.csv", "a.tsv"):
        (tmp_path / name).write_text("prompt\na\n")
    assert "several files are called a" in refusal_of(str(tmp_path))
