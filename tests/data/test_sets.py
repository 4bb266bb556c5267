"""Several data sets in one setting: their names, and how a test set is detected."""

import pytest
from refused import refused
from tables import tabled

from postgrad.data.sets import find_test_set_evidence, split_sets
from postgrad.problem import Problem


def test_sets_are_named_after_their_files_unless_named(tmp_path, monkeypatch):
    (tmp_path / "gsm8k").mkdir()
    monkeypatch.chdir(tmp_path)
    assert split_sets(
        "gsm8k/test.jsonl, math500.parquet,science=x/y.jsonl.gz,arithmetic:2:digits:test"
    ) == {
        "gsm8k-test": "gsm8k/test.jsonl",
        "math500": "math500.parquet",
        "science": "x/y.jsonl.gz",
        "arithmetic-2-digits-test": "arithmetic:2:digits:test",
    }
    assert split_sets("gsm8k") == {"gsm8k": "gsm8k"}
    assert split_sets("valid.arc_c.parquet") == {"valid.arc_c": "valid.arc_c.parquet"}


def test_path_of_an_existing_file_is_not_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a,b.jsonl", "x=1.jsonl"):
        (tmp_path / name).write_text("")
    assert split_sets("a,b.jsonl") == {"a-b": "a,b.jsonl"}
    assert split_sets("x=1.jsonl,q.csv") == {"x-1": "x=1.jsonl", "q": "q.csv"}


@pytest.mark.parametrize(
    ("source", "code", "at"),
    [("a/x.jsonl,b/x.jsonl", "conflict", "x"), ("a.jsonl,,b", "wrong_value", "")],
)
def test_ambiguous_sets_are_refused(source, code, at):
    with refused(code, at):
        split_sets(source)


def problem(**extra) -> Problem:
    return Problem("p1", ({"role": "user", "content": "?"},), "1", extra=extra)


@tabled("source, extra, evidence")
def test_test_sets_are_detected(source, extra, evidence):
    detected = find_test_set_evidence(source, [problem(), problem(**extra)])
    if evidence:
        assert evidence in detected
    else:
        assert detected == ""
