"""Checkpoints as files: which are kept, what `latest` names, what a kill leaves."""

import dataclasses
from pathlib import Path

import pytest
import torch

from postgrad import files
from postgrad.errors import RunError
from postgrad.training import checkpoint
from postgrad.training.checkpoint import State


class Policy:
    """Stands for a policy: writes and reads one file."""

    def __init__(self, text: str = "weights") -> None:
        self.text = text
        self.loaded = ""

    def save(self, folder: str) -> None:
        (Path(folder) / "weights").write_text(self.text)

    def load(self, folder: str) -> None:
        self.loaded = (Path(folder) / "weights").read_text()


def saved(step: int) -> State:
    return State(step, {"position": step}, step % 3, {"pool": torch.arange(step), "phase": "one"})


def save(folder: Path, models: list, state: State, keep: int, best: int | None = None) -> Path:
    """Write a checkpoint and return its folder."""
    return checkpoint.save(folder, models, state, keep, best)


def names(folder) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_run_without_checkpoints_has_no_latest(tmp_path):
    assert checkpoint.latest(tmp_path) is None


def test_load_returns_what_was_saved(tmp_path):
    save(tmp_path, [Policy("the weights")], saved(5), keep=2)
    found = checkpoint.latest(tmp_path)
    policy = Policy()
    state = checkpoint.load(found, [policy])
    assert found.name == "step-5" and policy.loaded == "the weights"
    assert (state.step, state.cursor, state.flat_steps) == (5, {"position": 5}, 2)
    assert state.method["phase"] == "one"
    assert torch.equal(state.method["pool"], torch.arange(5))


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(1, ["step-100"]), (2, ["step-20", "step-100"]), (9, ["step-3", "step-20", "step-100"])],
)
def test_newest_checkpoints_are_kept_by_step(tmp_path, keep, kept):
    for step in (3, 20, 100):
        save(tmp_path, [Policy()], saved(step), keep)
    assert (
        names(tmp_path) == sorted(["latest", *kept])
        and checkpoint.latest(tmp_path).name == "step-100"
    )


@pytest.mark.parametrize("keep", [1, 2])
def test_newer_checkpoint_that_was_never_latest_does_not_replace_the_saved_one(tmp_path, keep):
    """The run was killed before `latest` named step 4; it resumes from step 2 and saves step 3."""
    save(tmp_path, [Policy()], saved(2), keep=2)
    save(tmp_path, [Policy()], saved(4), keep=2)
    (tmp_path / "checkpoints" / "latest").write_text("step-2\n")
    save(tmp_path, [Policy("three")], saved(3), keep)
    assert (
        checkpoint.latest(tmp_path).name == "step-3"
        and checkpoint.load(checkpoint.latest(tmp_path), [Policy()]).step == 3
    )


def test_checkpoint_of_a_killed_run_is_replaced(tmp_path):
    save(tmp_path, [Policy("old")], saved(4), keep=2)
    (tmp_path / "checkpoints" / ".step-4.partial").mkdir()
    (tmp_path / "checkpoints" / ".step-4.partial" / "half").write_text("written")
    save(tmp_path, [Policy("new")], saved(4), keep=2)
    policy = Policy()
    checkpoint.load(checkpoint.latest(tmp_path), [policy])
    assert policy.loaded == "new" and names(tmp_path) == ["latest", "step-4"]
    assert not (tmp_path / "checkpoints" / "step-4" / "half").exists()


@pytest.mark.parametrize("broken", ["policy", "rename", "sync"])
def test_failure_at_any_point_leaves_the_previous_checkpoint(tmp_path, monkeypatch, broken):
    save(tmp_path, [Policy("good")], saved(2), keep=1)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    policy = Policy("bad")
    if broken == "policy":
        policy.save = fail
    elif broken == "rename":
        monkeypatch.setattr(Path, "rename", fail)
    else:
        monkeypatch.setattr(files, "fsync_path", fail)
    with pytest.raises(RunError, match=r"step-4 .*No space left on device"):
        save(tmp_path, [policy], saved(4), keep=1)
    monkeypatch.undo()
    loaded = Policy()
    assert checkpoint.load(checkpoint.latest(tmp_path), [loaded]).step == 2
    assert loaded.loaded == "good"


@pytest.mark.parametrize(
    "text", ["No space left on device (os error 28)", "Disk quota exceeded (os error 122)"]
)
def test_full_disk_reported_by_safetensors_is_a_run_error(tmp_path, text):
    from safetensors import SafetensorError

    policy = Policy()

    def fail(folder: str) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: {text}")

    policy.save = fail
    with pytest.raises(RunError, match=rf"step-4 .*{text.partition(' (')[0]}"):
        save(tmp_path, [policy], saved(4), keep=1)
    assert names(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"step-" * 1000])
def test_damaged_latest_is_a_note(tmp_path, content):
    save(tmp_path, [Policy()], saved(4), keep=1)
    (tmp_path / "checkpoints" / "latest").write_bytes(content)
    notes: list[str] = []
    assert checkpoint.latest(tmp_path, notes.append) == tmp_path / "checkpoints" / "step-4"
    assert len(notes) == 1 and "latest names" in notes[0]


@pytest.mark.parametrize("content", ["[1, 2]", "3", "null", "[" * 5000])
def test_state_that_is_no_object_is_a_run_error(tmp_path, content):
    save(tmp_path, [Policy()], saved(4), keep=1)
    (tmp_path / "checkpoints" / "step-4" / "state.json").write_text(content)
    with pytest.raises(RunError, match=r"step-4 cannot be read"):
        checkpoint.load(checkpoint.latest(tmp_path), [Policy()])


def test_best_checkpoint_is_kept_besides_the_newest(tmp_path):
    for step, best in ((3, 3), (6, 3), (9, 3), (12, 12), (15, 12)):
        save(tmp_path, [Policy()], saved(step), keep=1, best=best)
        assert names(tmp_path) == sorted({"best", "latest", f"step-{best}", f"step-{step}"})
        assert (
            checkpoint.best(tmp_path).name == f"step-{best}"
            and checkpoint.latest(tmp_path).name == f"step-{step}"
        )


def test_no_best_step_removes_the_pointer(tmp_path):
    save(tmp_path, [Policy()], saved(3), keep=1, best=3)
    save(tmp_path, [Policy()], saved(2), keep=1)  # a run that went on from before its best
    assert names(tmp_path) == ["latest", "step-2"] and checkpoint.best(tmp_path) is None


def test_run_resumes_from_the_newest_checkpoint_if_the_latest_was_removed(tmp_path):
    notes: list[str] = []
    assert checkpoint.latest(tmp_path, notes.append) is None
    for step in (9, 10):
        save(tmp_path, [Policy()], saved(step), keep=3)
    assert checkpoint.latest(tmp_path, notes.append).name == "step-10" and not notes
    (tmp_path / "checkpoints" / "step-mine").mkdir()
    (tmp_path / "checkpoints" / "step-10" / "state.json").unlink()
    assert checkpoint.latest(tmp_path, notes.append).name == "step-9"
    (note,) = notes
    assert "step-10" in note and "step-9" in note
    (tmp_path / "checkpoints" / "step-9" / "state.json").unlink()
    with pytest.raises(RunError, match=r"latest names step-10"):
        checkpoint.latest(tmp_path, notes.append)


@pytest.mark.parametrize("file", ["weights", "pending.bin", "state.json", "method.bin"])
def test_damaged_checkpoint_is_a_run_error_that_names_it(tmp_path, file):
    state = dataclasses.replace(saved(4), pending=[{"number": 5}])
    saved_folder = save(tmp_path, [Policy()], state, keep=1)
    assert checkpoint.load(saved_folder, [Policy()]).pending == [{"number": 5}]
    if file in ("weights", "pending.bin"):
        (saved_folder / file).unlink()
    else:
        (saved_folder / file).write_bytes((saved_folder / file).read_bytes()[:5])
    with pytest.raises(RunError, match=r"step-4 cannot be read") as caught:
        checkpoint.load(saved_folder, [Policy()])
    assert "\n" not in str(caught.value)


def test_error_of_a_model_says_how_to_continue(tmp_path):
    class Damaged(Policy):
        def load(self, folder: str) -> None:
            raise RunError("a part is missing")

    saved_folder = save(tmp_path, [Policy()], saved(4), keep=1)
    with pytest.raises(RunError, match=r"a part is missing.*remove that folder"):
        checkpoint.load(saved_folder, [Damaged()])


def test_leftovers_of_kills_are_removed(tmp_path):
    for step in (2, 4, 6):  # the kill came before `latest` was updated
        save(tmp_path, [Policy()], saved(step), keep=9, best=step)
    (tmp_path / "checkpoints" / ".step-5.partial").mkdir()
    (tmp_path / "checkpoints" / ".step-1.removed").mkdir()
    (tmp_path / "checkpoints" / "step-mine").mkdir()
    checkpoint.remove_leftovers(tmp_path, 4, 1, 2)
    assert names(tmp_path) == ["best", "latest", "step-2", "step-4", "step-mine"]
    assert checkpoint.best(tmp_path) == tmp_path / "checkpoints" / "step-2"


def test_a_kill_leaves_no_part_of_an_old_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, [Policy()], saved(2), keep=1)

    def kill(path: Path, **options: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", kill)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, [Policy()], saved(4), keep=1)
    assert [name for name in names(tmp_path) if name.startswith("step")] == ["step-4"]
