"""The number of CPU cores that a process may use."""

import os

import pytest

from postgrad import machine


@pytest.mark.parametrize(
    ("text", "expected"),
    [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("6400000 100000", 8), ("", 8)],
)
def test_a_container_may_have_a_share_of_the_cores(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "CPU_QUOTA", tmp_path / "cpu.max")
    assert machine.available_cores() == 8, "another system has no such file"
    (tmp_path / "cpu.max").write_text(text)
    assert machine.available_cores() == expected
