"""Fixtures for tests of the Python API: arguments of a run that takes a moment."""

import os
from pathlib import Path
from typing import Any

import pytest
from api_rows import ROWS, odd


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    assert not os.listdir(tmp_path)  # noqa: PTH208
    return tmp_path


@pytest.fixture
def small(tiny: Path, folder: Path) -> dict[str, Any]:
    """Arguments of a run of three steps."""
    return {
        "model": tiny,
        "data": ROWS,
        "reward": odd,
        "steps": 3,
        "batch_size": 4,
        "group_size": 4,
        "max_tokens": 4,
        "lr": 3e-3,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "template": "plain",
        "name": "test",
        "progress": False,
    }
