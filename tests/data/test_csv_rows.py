"""Tables with commas, semicolons and tabs, as spreadsheets write them."""

import gzip
from pathlib import Path

import pytest

from postgrad.data.csv_rows import find_delimiter
from postgrad.data.problems import load_problems
from postgrad.errors import ConfigError


def read(folder: Path, name: str, text: str) -> list[tuple[str, str]]:
    (folder / name).write_text(text, newline="")
    problems = load_problems(str(folder / name))
    return [(p.messages[0]["content"], p.ground_truth) for p in problems]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'question,answer\n"1; 1, or so?","2"\nB\tand?,3\n'),
        ("a.csv", 'question;answer\n"1; 1, or so?";2\nB\tand?;3\n'),
        ("a.csv", '\ufeffsep=;\r\nquestion;answer\r\n"1; 1, or so?";2\r\nB\tand?;3\r\n'),
        ("a.csv", 'question;answer;;\r\n"1; 1, or so?";2;;\r\nB\tand?;3;;\r\n;;;\r\n'),  # Excel
        ("a.csv", 'question\tanswer\n1; 1, or so?\t2\n"B\tand?"\t3\n'),
        ("a.tsv", 'question\tanswer\n1; 1, or so?\t2\n"B\tand?"\t3\n'),
        ("a.tsv", '"question";"answer"\n"1; 1, or so?";"2"\n"B\tand?";"3"\n'),
    ],
)
def test_the_header_says_the_delimiter(tmp_path: Path, name: str, text: str):
    assert read(tmp_path, name, text) == [("1; 1, or so?", "2"), ("B\tand?", "3")]


def test_compressed_tab_separated_files(tmp_path: Path):
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b"question\tanswer\na\t1\n"))
    assert [p.ground_truth for p in load_problems(str(tmp_path / "a.tsv.gz"))] == ["1"]


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("prompt\nwhat; then, now\n", ","),  # one column
        ('"prompt; long",answer\na,b\n', ","),
        ("prompt, if any;answer\na;b\nc, d, e;f\n", ";"),
        ("prompt; if any,answer\na,b\nc;d;e,f\n", ","),
        ("question;answer;price, EUR\nHow much?;1;3,50\n", ";"),
        ("Which; or both?,1,2,3,4,A\nWhy?,1,2,3,4,B\n", ","),  # MMLU has no header
        ("", ","),
    ],
)
def test_rows_decide_between_two_delimiters_of_a_header(text: str, delimiter: str):
    assert find_delimiter(text, ",") == delimiter


def test_quotes_of_a_tab_separated_file_may_be_part_of_the_text(tmp_path: Path):
    """They join no rows: each line is as wide as the header."""
    lines = ["question\tanswer", '"Stop, he said.\t2', "b\t3", 'Then he said no."\t4']
    expected = [('"Stop, he said.', "2"), ("b", "3"), ('Then he said no."', "4")]
    assert read(tmp_path, "a.tsv", "\n".join(lines)) == expected
    quoted = 'question\tanswer\n"x = 1\n\ty = 2"\t3\n"a"\t4\n'
    assert read(tmp_path, "b.tsv", quoted) == [("x = 1\n\ty = 2", "3"), ("a", "4")]


def test_a_folder_with_the_same_data_twice_is_refused(tmp_path: Path):
    read(tmp_path, "a.csv", "question,answer\na,1\n")
    read(tmp_path, "a.tsv", "question\tanswer\na\t1\n")
    with pytest.raises(ConfigError, match="several files are called a"):
        load_problems(str(tmp_path))


def test_one_column_of_a_tab_separated_file(tmp_path: Path):
    assert read(tmp_path, "a.tsv", "prompt\nHi; you, there\n") == [("Hi; you, there", "")]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("question;answer\na;b;1\n", r"row 1 \(line 2\) has 3 fields, not 2.*semicolons"),
        ('question;answer\n"a;1\n', "not csv"),
        ("question;answer;;\na;1;x;\n", "has 4 fields, not 2"),
    ],
)
def test_refused_tables(tmp_path: Path, text: str, key: str):
    with pytest.raises(ConfigError, match=key):
        read(tmp_path, "a.csv", text)
