"""Several data sets in one setting: their names, and how a test set gives itself away."""

import pytest

from postgrad.data.sets import find_test_set_evidence, split_sets
from postgrad.errors import ConfigError
from postgrad.problem import Problem


def test_names_come_from_files_or_from_you(tmp_path, monkeypatch):
    (tmp_path / "gsm8k").mkdir()
    monkeypatch.chdir(tmp_path)
    assert split_sets(
        "gsm8k/test.jsonl, math500.parquet,maths=x/y.jsonl.gz,arithmetic:2:digits:test"
    ) == {
        "gsm8k-test": "gsm8k/test.jsonl",
        "math500": "math500.parquet",
        "maths": "x/y.jsonl.gz",
        "arithmetic-2-digits-test": "arithmetic:2:digits:test",
    }
    assert split_sets("gsm8k") == {"gsm8k": "gsm8k"}
    assert split_sets("valid.arc_c.parquet") == {"valid.arc_c": "valid.arc_c.parquet"}


def test_a_file_that_is_there_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a,b.jsonl", "x=1.jsonl"):
        (tmp_path / name).write_text("")
    assert split_sets("a,b.jsonl") == {"a-b": "a,b.jsonl"}
    assert split_sets("x=1.jsonl,q.csv") == {"x-1": "x=1.jsonl", "q": "q.csv"}


@pytest.mark.parametrize(
    ("source", "said"),
    [("a/x.jsonl,b/x.jsonl", "two data sets are called x"), ("a.jsonl,,b", "empty part")],
)
def test_unclear_sets_are_refused(source, said):
    with pytest.raises(ConfigError, match=said):
        split_sets(source)


def problem(**extra) -> Problem:
    return Problem("p1", ({"role": "user", "content": "?"},), "1", extra=extra)


@pytest.mark.parametrize(
    ("source", "extra", "sign"),
    [
        ("gsm8k/test.jsonl", {}, "the name test.jsonl says test"),
        ("mmlu_algebra_test.csv", {}, "says test"),
        ("arithmetic:1:digits:test", {}, "is the split test"),
        ("held_out.parquet", {"extra_info": {"split": "Test"}}, "the split of problem p1 is test"),
        ("held_out.jsonl", {"split": "test"}, "the split of problem p1 is test"),
        ("held_out.parquet", {"extra_info": {"split": "validation"}}, ""),
        ("arithmetic:1:digits:validation", {}, ""),
        ("contest.jsonl", {}, ""),
        ("latest.jsonl", {"extra_info": None}, ""),
    ],
)
def test_how_a_test_set_is_known(source, extra, sign):
    found = find_test_set_evidence(source, [problem(), problem(**extra)])
    assert (sign in found) if sign else found == ""
