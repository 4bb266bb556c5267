"""Uids: golden values, independence of row order, copies, the data's own column."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonl import write_jsonl
from refused import refused

from postgrad.data.problems import load_problems
from postgrad.data.uid import assign_uids, content_uid
from postgrad.problem import Problem

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda *rows, name="rows.jsonl": write_jsonl(tmp_path / name, *rows)


def question(text: str, uid: str = "") -> Problem:
    return Problem(uid, ({"role": "user", "content": text},), "1", "source")


def test_golden_values():
    """These must never change: replay pools, dumps and resumed runs hold them."""
    question = [{"role": "user", "content": "What is 37+58?"}]
    assert content_uid("openai/gsm8k", question, "95") == "3e9e95222c36181c"
    odd = [{"role": "system", "content": "é\n"}, {"role": "user", "content": "∞?"}]
    assert content_uid("", odd, "\\infty") == "492c823e02550630"


def test_every_field_changes_the_uid():
    user = [{"role": "user", "content": "q"}]
    uids = {
        content_uid("a", user, "1"),
        content_uid("b", user, "1"),
        content_uid("a", user, "2"),
        content_uid("a", [{"role": "system", "content": "q"}], "1"),
        content_uid("a", [{"role": "user", "content": "p"}], "1"),
    }
    assert len(uids) == 5
    assert content_uid("a", [{"content": "q", "role": "user"}], "1") in uids, "in any key order"


def test_copies_are_numbered_in_order():
    named = assign_uids([question(text) for text in "abaa"], ["1", "2", "3", "4"])
    base = content_uid("source", named[0].messages, "1")
    assert [p.uid for p in named] == [base, named[1].uid, f"{base}-2", f"{base}-3"]


def test_content_uid_avoids_the_uids_of_the_data():
    base = content_uid("source", question("a").messages, "1")
    taken = [question("z", uid=base), question("y", uid=f"{base}-2")]
    named = assign_uids([question("a"), *taken], ["1", "2", "3"])
    assert [p.uid for p in named] == [f"{base}-3", base, f"{base}-2"]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.text(min_size=1), unique=True, min_size=1, max_size=8).flatmap(
        lambda t: st.tuples(st.just(t), st.permutations(t))
    )
)
def test_row_order_does_not_change_uids(orders: tuple[list[str], list[str]]):
    first, second = (
        {p.messages[0]["content"]: p.uid for p in assign_uids([question(t) for t in o], o)}
        for o in orders
    )
    assert first == second


def test_uid_column_is_kept(write: Write):
    row = {"question": "q", "answer": "1"}
    problems = load_problems(str(write({**row, "uid": "x_1"}, {**row, "uid": 7})))
    assert [problem.uid for problem in problems] == ["x_1", "7"]


def test_duplicate_in_the_uid_column_names_both_rows(write: Write):
    rows = [{"question": "q", "answer": "1", "uid": uid} for uid in ("a", "b", "a")]
    with refused("conflict", "uid", shows=r"line 3: uid 'a'.*rows\.jsonl: line 1"):
        load_problems(str(write(*rows)))


def test_duplicate_uid_in_two_files_names_both_files(write: Write):
    row = {"question": "q", "answer": "1", "uid": "a"}
    one, two = write(row, name="one.jsonl"), write(row, name="two.jsonl")
    with refused("conflict", "uid", shows=r"two\.jsonl: line 1: uid 'a'.*one\.jsonl: line 1"):
        load_problems(f"{one},{two}")


@pytest.mark.parametrize(
    ("uid", "seen"), [(None, "null"), ("", "empty"), (1.5, "float"), (True, "bool")]
)
def test_bad_uid(write: Write, uid: Any, seen: str):
    path = write({"question": "q", "answer": "1", "uid": uid})
    with refused("damaged", path, shows=f"line 1: uid .* {seen};"):
        load_problems(str(path))
