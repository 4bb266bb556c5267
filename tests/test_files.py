"""Atomic writes, samples and file locks of postgrad.files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad import files

HOLD_LOCK = """
import sys
from pathlib import Path
from postgrad.files import acquire_lock
lock = acquire_lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_atomic_write_replaces_the_file_and_leaves_no_temporary_file(tmp_path):
    target = tmp_path / "value.json"
    files.atomic_write_text(target, "old")
    files.atomic_write_text(target, "néw")
    assert target.read_bytes() == "néw".encode()
    assert list(tmp_path.iterdir()) == [target]


def test_atomic_write_syncs_before_it_renames(tmp_path, monkeypatch):
    calls = []
    rename = Path.rename
    monkeypatch.setattr(files.os, "fsync", lambda _: calls.append("fsync"))
    monkeypatch.setattr(
        Path, "rename", lambda self, target: calls.append("rename") or rename(self, target)
    )
    files.atomic_write_text(tmp_path / "synced", "text")
    with files.atomic_file(tmp_path / "later", fsync=False) as temporary:
        temporary.write_text("text")
    assert calls == ["fsync", "rename", "rename"]


def test_a_failed_atomic_write_keeps_the_old_file(tmp_path):
    target = tmp_path / "value.json"
    target.write_text("old")
    with pytest.raises(ValueError), files.atomic_file(target) as temporary:
        temporary.write_text("half")
        assert target.read_text() == "old", "nothing is replaced before the block ends"
        raise ValueError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_atomic_folder_replaces_an_empty_folder_and_drops_a_half_written_one(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "left").write_text("by a kill")
    with files.atomic_folder(target) as temporary:
        (temporary / "weights").write_text("new")
    assert [path.name for path in target.iterdir()] == ["weights"]
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(ValueError), files.atomic_folder(tmp_path / "other"):
        raise ValueError
    assert list(tmp_path.iterdir()) == [target]


def test_create_folder_once_keeps_the_folder_of_the_process_that_was_first(tmp_path):
    target = tmp_path / "cache" / "model"

    def fill_second(folder: Path) -> None:
        (folder / "second").touch()
        files.create_folder_once(target, lambda first: (first / "first").touch())

    assert files.create_folder_once(target, fill_second) == target
    assert [path.name for path in target.iterdir()] == ["first"]
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_append_bytes_adds_at_the_end(tmp_path):
    files.append_bytes(tmp_path / "log", b"one\n")
    files.append_bytes(tmp_path / "log", b"two\n")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_samples_are_at_equal_distances(tmp_path):
    (tmp_path / "large").write_bytes(b"abcdefgh")
    (tmp_path / "small").write_bytes(b"z")
    paths = [tmp_path / "large", tmp_path / "small"]
    assert list(files.sample_files(paths, 3, 2)) == [
        *(b"large 8 ", b"ab", b"de", b"gh"),
        *(b"small 1 ", b"z", b"z", b"z"),
    ]


def test_a_lock_is_exclusive_until_its_process_is_killed(tmp_path):
    path = tmp_path / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert files.is_locked(path)
        with pytest.raises(BlockingIOError):
            files.acquire_lock(path, timeout_s=0.05)
    finally:
        holder.kill()
        holder.wait()
    assert not files.is_locked(path)
    with files.acquire_lock(path):
        assert files.is_locked(path)
    assert not files.is_locked(path)
