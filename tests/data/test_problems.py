"""load_problems: sources, every file type, every error."""

import gzip
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from jsonl import write_jsonl
from refused import refused
from tables import tabled

from postgrad.data import problems
from postgrad.data.problems import load_problems, problems_of_rows
from postgrad.data.rows import files
from postgrad.data.sets import split_sets
from postgrad.errors import ConfigError
from postgrad.phases import shown_by
from postgrad.problem import Conversation, Problem, problem_label, sent_fields

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
    return str(write_jsonl(folder / name, *rows))


def first(folder: Path, *rows: Any) -> Problem:
    return load_problems(jsonl(folder, *rows))[0]


def refusal_of(source: str, code: str = "damaged") -> str:
    """The message of the ConfigError; asserts that it is one line and names the file."""
    with refused(code, source) as caught:
        load_problems(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Shapes: see also test_shapes.py


def parquet_of(folder: Path, *rows: Any) -> str:
    parquet.write_table(pa.Table.from_pylist(list(rows)), folder / "a.parquet")
    return str(folder / "a.parquet")


def test_verl_parquet(tmp_path: Path):
    other = {**VERL, "reward_model": {"style": "model", "ground_truth": "3"}}
    one, two = load_problems(parquet_of(tmp_path, VERL, other))
    assert one == first(tmp_path, VERL) and one.messages == (SYSTEM, USER)
    assert (one.ground_truth, two.ground_truth, one.data_source) == ("2", "3", "math")
    info = {"index": 3, "split": "train"}
    assert one.extra == {"ability": "math", "extra_info": info, "reward_model": {"style": "rule"}}


def test_luffy_target_becomes_demonstrations(tmp_path: Path):
    reply = {"role": "assistant", "content": "2"}
    targets = [[reply], None, [{"role": "assistant", "content": None}, reply]]
    problems = load_problems(parquet_of(tmp_path, *({**VERL, "target": t} for t in targets)))
    assert [p.demonstrations for p in problems] == [("2",), (), ("2",)]
    assert "target" not in problems[0].extra


@pytest.mark.parametrize(
    ("truth", "text"),
    [(72, "72"), (0.5, "0.5"), (["a", "b"], '["a", "b"]'), ({"b": 1, "a": 2}, '{"a": 2, "b": 1}')],
)
def test_ground_truths_that_are_not_strings(tmp_path: Path, truth: Any, text: str):
    assert first(tmp_path, {**VERL, "reward_model": {"ground_truth": truth}}).ground_truth == text


def test_verl_prompt_as_text_and_missing_extra_info(tmp_path: Path):
    problem = first(tmp_path, {**VERL, "prompt": "Hi", "extra_info": None, "data_source": None})
    assert problem.messages == ({"role": "user", "content": "Hi"},)
    assert (problem.extra["extra_info"], problem.data_source) == ({}, "")
    assert first(tmp_path, {k: v for k, v in VERL.items() if k != "data_source"}).data_source == ""


def test_messages_as_json_text(tmp_path: Path):
    """Parquet files of other tools hold nested columns as text, also with other roles."""
    turns = [USER, {"role": "critic", "content": "Sure?"}, {"role": "assistant", "content": "2"}]
    for column in ("messages", "conversations"):
        problem = first(tmp_path, {column: json.dumps(turns)})
        assert problem.messages == tuple(turns[:2]) and problem.demonstrations == ("2",)
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    assert first(tmp_path, {"conversations": json.dumps(sharegpt)}).demonstrations == ("Hello",)
    row = VERL | {name: json.dumps(VERL[name]) for name in ("prompt", "reward_model")}
    assert first(tmp_path, row).messages == (SYSTEM, USER)
    assert first(tmp_path, row).ground_truth == "2"
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    called = json.dumps([USER, call, {"role": "tool", "content": "2"}])  # a call has no content
    problem = first(tmp_path, {"prompt": called, "answer": "2"})
    assert [message["role"] for message in problem.messages] == ["user", "assistant", "tool"]


def test_a_prompt_in_brackets_stays_a_text(tmp_path: Path):
    flight = '[{"from": "Rome", "to": "Oslo"}]'
    cast = '[{"role": "king", "content": "a crown"}]'
    for text in ("[1, 2]", '[{"a": 1}]', "[]", "[not JSON", flight, cast):
        problem = first(tmp_path, {"prompt": text, "answer": "3"})
        assert problem.messages[0]["content"] == text
        assert first(tmp_path, {"prompt": "W.", "completion": text}).demonstrations == (text,)
        pair = first(tmp_path, {"prompt": "W.", "chosen": text, "rejected": "no"})
        assert pair.extra["chosen"] == text


def test_tools_of_sharegpt(tmp_path: Path):
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    turns = [
        {"from": "human", "value": "Weather in Rome?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "It is sunny."},
    ]
    problem = first(tmp_path, {"conversations": turns})
    roles = [message["role"] for message in problem.messages]
    assert roles == ["user", "assistant", "tool"]
    assert problem.messages[1]["tool_calls"][0]["function"] == call
    weighted = [turns[0], turns[1] | {"weight": 0}, *turns[2:]]
    conversation = first(tmp_path, {"conversations": weighted}).conversation
    assert conversation and conversation.messages[1]["weight"] == 0
    turns[1]["value"] = "weather(Rome)"
    assert "function_call" in refusal_of(jsonl(tmp_path, {"conversations": turns}))


def test_mmlu_csv(tmp_path: Path):
    path = tmp_path / "mmlu_high_school_statistics.csv"
    path.write_text('"Which one,\nplease?",1,"2, or so",3,4,B\nNext?,5,6,7,8,D\n')
    one, two = load_problems(str(path))
    assert (one.ground_truth, two.ground_truth, one.data_source) == ("B", "D", "mmlu")
    content = one.messages[0]["content"]
    assert "about high school statistics." in content
    assert content.endswith("Question: Which one,\nplease?\nA. 1\nB. 2, or so\nC. 3\nD. 4\nAnswer:")
    assert one.extra["subject"] == "high_school_statistics"
    assert one.extra["options"] == ["1", "2, or so", "3", "4"]


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
    with refused("damaged", path, shows="no column txt; did you mean text"):
        load_problems(f"{path}:txt=prompt")
    with refused("unreadable", f"{tmp_path}/missing.jsonl"):
        load_problems(f"{tmp_path}/missing.jsonl:a=b")


def test_a_renamed_column_replaces_one_of_its_new_name(tmp_path: Path):
    for row in ({"prompt": "a", "query": "b"}, {"query": "b", "prompt": "a"}):
        path = jsonl(tmp_path, row)
        assert load_problems(f"{path}:query=prompt")[0].messages[0]["content"] == "b"


def test_sft_rows_of_verl_with_nested_keys(tmp_path: Path):
    """data.prompt_key=extra_info, prompt_dict_keys=[question], and the same for the response."""
    info = {"question": "What is 1+1?", "answer": "1+1 is 2. #### 2"}
    path = parquet_of(tmp_path, VERL | {"extra_info": info})
    (problem,) = load_problems(f"{path}:extra_info.question=prompt:extra_info.answer=response")
    assert problem.messages == (USER,)
    assert problem.demonstrations == ("1+1 is 2. #### 2",)
    assert (problem.ground_truth, problem.extra["extra_info"]) == ("2", info)
    assert "response" not in problem.extra
    with refused("damaged", path, shows="no column reply in extra_info"):
        load_problems(f"{path}:extra_info.reply=response")
    with refused("damaged", path, shows=r"no column info\.answer"):
        load_problems(f"{path}:info.answer=response")


@pytest.mark.parametrize("more", [{}, {"label": 1}, {"url": "x"}])
def test_plain_texts_of_trl(tmp_path: Path, more: dict[str, Any]):
    path = jsonl(tmp_path, {"text": "one two"} | more, {"text": "three"} | more)
    one, two = load_problems(path)
    assert one.conversation == Conversation((), text="one two")
    assert (one.demonstrations, one.ground_truth, one.extra) == ((), "", more)
    assert one.uid != two.uid and len(one.uid) == 16


def test_a_set_with_renamed_columns_has_the_name_of_its_file():
    assert split_sets("a/math.jsonl:q=prompt,x=b.jsonl:q=prompt") == {
        "math": "a/math.jsonl:q=prompt",
        "x": "b.jsonl:q=prompt",
    }


@pytest.mark.parametrize("name", ["step:lr=1.jsonl", "a,b.jsonl"])
def test_a_path_with_odd_characters_is_a_path(tmp_path: Path, name: str):
    assert len(load_problems(jsonl(tmp_path, VERL, name=name))) == 1


@pytest.mark.slow
def test_levels_that_share_problems_mix():
    problems = load_problems("arithmetic:1:boxed,arithmetic:2:boxed")
    assert len({p.uid for p in problems}) == len(problems)
    assert sum(p.uid.endswith("-2") for p in problems) == len(load_problems("arithmetic:1:boxed"))


# Errors


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("trian.jsonl", "did you mean train.jsonl?"),
        ("tran.csv", "did you mean train.csv?"),
        ("missing.jsonl", "no such file"),  # extensions do not make names similar
        ("nowhere/train.jsonl", "no folder"),
        ("train.jsonl/train.jsonl", "no folder"),
    ],
)
def test_a_missing_file_suggests_the_closest_name(tmp_path: Path, name: str, says: str):
    for there in ("train.jsonl", "train.csv", "nogt.jsonl"):
        (tmp_path / there).write_text("")
    with refused("unreadable", tmp_path / name, shows=re.escape(says)) as caught:
        load_problems(str(tmp_path / name))
    assert ("did you mean" in says) == ("did you mean" in str(caught.value))


@pytest.mark.parametrize("source", ["", " ", "a.jsonl,", ",".join(["missing.jsonl"] * 1000)])
def test_invalid_sources(source: str):
    with pytest.raises(ConfigError, match=r"data source|missing\.jsonl"):
        load_problems(source)


NO_PARQUET = "not a readable parquet file"
NO_GZIP = "not a readable jsonl.gz file"
ARRAY = json.dumps({"question": "a", "answer": "1"}, indent=1).encode()
# name, bytes (None: no plain file), what the refusal says
BROKEN_FILES = [
    ("a.txt", b"x", "extension .txt"),
    ("b", b"x", "extension (none)"),
    ("a.parquet", b"PAR1 not really", NO_PARQUET),
    ("a.jsonl", b'{"question": "a", "answer": "1"}\n\xff\n', "line 2: not UTF-8"),
    ("a.jsonl.gz", b"plain", NO_GZIP),
    ("a.jsonl.gz", gzip.compress(b"x" * 1000, mtime=0)[:-10], NO_GZIP),
    ("a.csv", b"question,answer\na,1\nb,1,2\n", "row 2 (line 3) has 3 fields"),
    ("a.csv", b'question,answer\n"a,1\n', "not csv"),
    ("a.csv", b"q,1,2,3,4,A\nq,1,2,3,4,E\n", "row 2: answer"),
    ("a.csv", b'prompt\nHi\n""\n', "row 2: prompt is empty"),
    ("a.json", ARRAY, "array of objects"),
    ("pipe.jsonl", None, "not a file"),
]


@pytest.mark.parametrize(("name", "content", "says"), BROKEN_FILES)
def test_a_broken_file_is_refused(tmp_path: Path, name: str, content: bytes | None, says: str):
    if content is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        load_problems(str(tmp_path / name))
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_parquet_without_rows_or_with_damaged_ones_and_folders_without_one_meaning(tmp_path: Path):
    assert "no data files" in refusal_of(str(tmp_path), "missing")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([VERL] * 100), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    assert NO_PARQUET in refusal_of(str(path), "unreadable")
    parquet.write_table(pa.Table.from_pylist([VERL]).slice(0, 0), path)
    assert "no rows" in refusal_of(str(path), "missing")
    (tmp_path / "a.csv").write_text("prompt\na\n")
    assert "several files are called a" in refusal_of(str(tmp_path), "conflict")


def test_the_name_of_a_problem_says_where_it_was_read(tmp_path: Path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    one, two = load_problems(jsonl(tmp_path, *rows, name="sums.jsonl"))
    assert re.match(f"problem {two.uid} .*sums.jsonl: line 2", problem_label(two))
    assert "row 1" in problem_label(problems_of_rows(rows, "data")[0])
    assert "read_from" not in sent_fields(two)
    assert one == replace(one, read_from="elsewhere")


def test_a_small_file_with_a_line_without_end_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE", 1 << 10)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": "a", "answer": "1"}\n' + b"x" * (1 << 20)))
    assert "line 2 is longer than" in refusal_of(str(path), "too_large")


def test_long_files_show_how_far_they_are(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(problems, "ROWS_PER_COUNT", 2)
    path = jsonl(tmp_path, *({"question": f"a{i}", "answer": "1"} for i in range(5)))
    shown = []
    with shown_by(lambda phase, done, total: shown.append((phase, done, total))):
        load_problems(path)
    assert shown == [(f"reading {path}", done, 0) for done in (0, 2, 4)]


def test_content_of_text_parts_is_joined(tmp_path: Path):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?"}]
    rows = [{"prompt": [{"role": "user", "content": parts}], "answer": "2"}]
    assert first(tmp_path, *rows).messages == (USER,)


# Column layouts on the hub


def test_arc(tmp_path: Path):
    letters = {"text": ["u", "v", "w"], "label": ["A", "B", "C"]}
    digits = {"text": ["u", "v", "w"], "label": ["1", "2", "3"]}
    rows = [
        {"id": "a", "question": "Q?", "choices": letters, "answerKey": "B"},
        {"id": "b", "question": "Q?", "choices": digits, "answerKey": "3"},
    ]
    one, two = load_problems(jsonl(tmp_path, *rows))
    assert (one.ground_truth, two.ground_truth, one.data_source) == ("B", "C", "arc_c")
    assert one.messages == ({"role": "user", "content": "Q?\n\nA) u\nB) v\nC) w\n"},)
    assert "answerKey is '4'" in refusal_of(jsonl(tmp_path, {**rows[1], "answerKey": "4"}))
    assert "line 1: choices" in refusal_of(jsonl(tmp_path, {**rows[1], "choices": ["u"]}))


@pytest.mark.parametrize(
    "reward",
    [{"style": "model", "ground_truth": None}, {"style": "rule", "raw_question_for_monitor": "Q?"}],
)
def test_a_judge_needs_no_ground_truth(tmp_path: Path, reward: dict[str, Any]):
    assert first(tmp_path, {**VERL, "reward_model": reward}).ground_truth == ""


def test_large_parquet_files_are_read_in_batches(tmp_path: Path):
    rows = [{**VERL, "extra_info": {"index": i, "split": "train"}} for i in range(2345)]
    problems = load_problems(parquet_of(tmp_path, *rows))
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
    source = write_jsonl(tmp_path / "a.jsonl", *rows)
    export(source, tmp_path / "a.csv")
    assert load_problems(str(tmp_path / "a.csv")) == load_problems(str(source))
    for row in rows:
        del row["uid"]
    write_jsonl(source, *rows)
    export(source, tmp_path / "b.csv")
    assert add_uids(tmp_path / "b.csv", tmp_path / "c.csv") == 2
    assert load_problems(str(tmp_path / "c.csv")) == load_problems(str(source))
    plain = tmp_path / "plain.csv"
    plain.write_text('question,answer\n"[1]?","[1,2]"\n')
    assert load_problems(str(plain))[0].ground_truth == "[1,2]", "only nested columns are JSON"


@tabled("row")
def test_a_system_column_is_read_in_every_shape(tmp_path: Path, row: dict[str, Any]):
    """SFT, DPO and RL on the same columns must have the same prompt."""
    problem = first(tmp_path, row | {"system": "Think."})
    assert problem.messages == (SYSTEM, USER) and "system" not in problem.extra
    if problem.conversation is not None:
        assert problem.conversation.messages[:2] == (SYSTEM, USER)
        assert problem.conversation.num_prompt in (0, 2)
    own = {"prompt": [{"role": "system", "content": "Own."}, USER], "ground_truth": "2"}
    assert first(tmp_path, own | {"system": "Think."}).messages[0]["content"] == "Own."


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
