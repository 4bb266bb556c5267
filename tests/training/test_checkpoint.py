"""Checkpoints as files: what is kept, what `latest` means, what a kill between two operations leaves."""

import pytest
import torch

from postgrad import files
from postgrad.config.schema import TrainingConfig
from postgrad.errors import RunError
from postgrad.training import checkpoint
from postgrad.training.checkpoint import State


class Policy:
    """Writes one file; the rest of a policy is not needed here."""

    def __init__(self, text: str = "weights") -> None:
        self.text, self.loaded = text, ""

    def save(self, folder: str) -> None:
        from pathlib import Path

        (Path(folder) / "weights").write_text(self.text)

    def load(self, folder: str) -> None:
        from pathlib import Path

        self.loaded = (Path(folder) / "weights").read_text()


def saved(step: int) -> State:
    return State(step, {"position": step}, step % 3, {"pool": torch.arange(step), "phase": "one"})


def names(folder) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_nothing_saved_is_nothing_to_go_on_from(tmp_path):
    assert checkpoint.latest(tmp_path) is None


def test_what_was_saved_comes_back(tmp_path):
    checkpoint.save(tmp_path, [Policy("the weights")], saved(5), keep=2)
    found = checkpoint.latest(tmp_path)
    policy = Policy()
    back = checkpoint.load(found, [policy])
    assert found.name == "step-5" and policy.loaded == "the weights"
    assert (back.step, back.cursor, back.flat_steps, back.method["phase"]) == (
        5,
        {"position": 5},
        2,
        "one",
    )
    assert torch.equal(back.method["pool"], torch.arange(5))


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(1, ["step-100"]), (2, ["step-20", "step-100"]), (9, ["step-3", "step-20", "step-100"])],
)
def test_the_newest_are_kept_by_number_not_by_name(tmp_path, keep, kept):
    for step in (3, 20, 100):
        checkpoint.save(tmp_path, [Policy()], saved(step), keep)
    assert (
        names(tmp_path) == sorted(["latest", *kept])
        and checkpoint.latest(tmp_path).name == "step-100"
    )


@pytest.mark.parametrize("keep", [1, 2])
def test_a_newer_one_that_latest_never_named_does_not_push_out_the_one_just_saved(tmp_path, keep):
    """Killed after step-4 was renamed and before `latest` moved; the run goes on from step 2 and saves step 3."""
    checkpoint.save(tmp_path, [Policy()], saved(2), keep=2)
    checkpoint.save(tmp_path, [Policy()], saved(4), keep=2)
    (tmp_path / "checkpoints" / "latest").write_text("step-2\n")
    checkpoint.save(tmp_path, [Policy("three")], saved(3), keep)
    assert (
        checkpoint.latest(tmp_path).name == "step-3"
        and checkpoint.load(checkpoint.latest(tmp_path), [Policy()]).step == 3
    )


def test_one_left_by_a_killed_run_is_replaced(tmp_path):
    checkpoint.save(tmp_path, [Policy("old")], saved(4), keep=2)
    (tmp_path / "checkpoints" / ".step-4.partial").mkdir()
    (tmp_path / "checkpoints" / ".step-4.partial" / "half").write_text("written")
    checkpoint.save(tmp_path, [Policy("new")], saved(4), keep=2)
    policy = Policy()
    checkpoint.load(checkpoint.latest(tmp_path), [policy])
    assert policy.loaded == "new" and names(tmp_path) == ["latest", "step-4"]
    assert not (tmp_path / "checkpoints" / "step-4" / "half").exists()


@pytest.mark.parametrize("broken", ["policy", "rename", "sync"])
def test_a_failure_at_any_point_leaves_the_one_before(tmp_path, monkeypatch, broken):
    from pathlib import Path

    checkpoint.save(tmp_path, [Policy("good")], saved(2), keep=1)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    policy = Policy("bad")
    if broken == "policy":
        policy.save = fail
    elif broken == "rename":
        monkeypatch.setattr(Path, "rename", fail)
    else:
        monkeypatch.setattr(files, "fsync_path", fail)
    with pytest.raises(
        RunError,
        match=r"step-4 could not be written: No space left on device; earlier checkpoints are intact",
    ):
        checkpoint.save(tmp_path, [policy], saved(4), keep=1)
    monkeypatch.undo()
    back = Policy()
    assert checkpoint.load(checkpoint.latest(tmp_path), [back]).step == 2 and back.loaded == "good"


@pytest.mark.parametrize(
    "overrides", ["No space left on device (os error 28)", "Disk quota exceeded (os error 122)"]
)
def test_a_full_disk_that_safetensors_reports_in_its_own_way(tmp_path, overrides):
    from safetensors import SafetensorError

    policy = Policy()

    def fail(folder: str) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: {overrides}")

    policy.save = fail
    with pytest.raises(
        RunError,
        match=f"step-4 could not be written: {overrides.partition(' (')[0]}; earlier checkpoints are intact",
    ):
        checkpoint.save(tmp_path, [policy], saved(4), keep=1)
    assert names(tmp_path) == []


def test_latest_that_names_what_is_not_there_says_what_to_do(tmp_path):
    checkpoint.save(tmp_path, [Policy()], saved(2), keep=1)
    (tmp_path / "checkpoints" / "latest").write_text("step-7\n")
    with pytest.raises(RunError, match="names step-7"):
        checkpoint.latest(tmp_path)


def test_the_best_one_is_kept_beside_the_newest(tmp_path):
    for step, best in ((3, 3), (6, 3), (9, 3), (12, 12), (15, 12)):
        checkpoint.save(tmp_path, [Policy()], saved(step), keep=1, best=best)
        assert names(tmp_path) == sorted({"best", "latest", f"step-{best}", f"step-{step}"})
        assert (
            checkpoint.best(tmp_path).name == f"step-{best}"
            and checkpoint.latest(tmp_path).name == f"step-{step}"
        )


def test_without_a_best_there_is_no_pointer(tmp_path):
    checkpoint.save(tmp_path, [Policy()], saved(3), keep=1, best=3)
    checkpoint.save(
        tmp_path, [Policy()], saved(2), keep=1
    )  # a run that went on from before its best
    assert names(tmp_path) == ["latest", "step-2"] and checkpoint.best(tmp_path) is None


def test_a_run_goes_on_from_the_newest_that_is_there_when_the_latest_was_removed(tmp_path):
    notes: list[str] = []
    assert checkpoint.find_resumable(tmp_path, notes.append) is None
    for step in (9, 10):
        checkpoint.save(tmp_path, [Policy()], saved(step), keep=3)
    assert checkpoint.find_resumable(tmp_path, notes.append).name == "step-10" and not notes
    (tmp_path / "checkpoints" / "step-mine").mkdir()
    (tmp_path / "checkpoints" / "step-10" / "state.json").unlink()
    assert checkpoint.find_resumable(tmp_path, notes.append).name == "step-9"
    assert (
        len(notes) == 1
        and "latest names step-10, which does not exist; continuing from step-9" in notes[0]
    )
    (tmp_path / "checkpoints" / "step-9" / "state.json").unlink()
    with pytest.raises(RunError, match=r"names step-10, .* no other checkpoint"):
        checkpoint.find_resumable(tmp_path, notes.append)


@pytest.mark.parametrize("file", ["weights", "state.json", "method.bin"])
def test_a_damaged_one_is_named_with_what_to_do(tmp_path, file):
    place = checkpoint.save(tmp_path, [Policy()], saved(4), keep=1)
    if file == "weights":
        (place / file).unlink()
    else:
        (place / file).write_bytes((place / file).read_bytes()[:5])
    with pytest.raises(
        RunError,
        match=r"step-4 cannot be read \(.*remove that folder, and the same command continues",
    ) as caught:
        checkpoint.load(place, [Policy()])
    assert "\n" not in str(caught.value)


def test_what_kills_left_of_checkpoints_is_removed_when_a_run_goes_on(tmp_path):
    for step in (2, 4, 6):
        checkpoint.save(tmp_path, [Policy()], saved(step), keep=9)
    (tmp_path / "checkpoints" / ".step-5.partial").mkdir()
    (tmp_path / "checkpoints" / "step-mine").mkdir()
    training = TrainingConfig(keep_checkpoints=1, async_save=False)
    checkpoint.Writer(tmp_path, [Policy()], training, print).remove_leftovers(4, 2)
    assert names(tmp_path) == ["latest", "step-2", "step-4", "step-mine"]
