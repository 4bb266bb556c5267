"""Checkpoints written while the run goes on: same bytes, complete or absent, errors reported."""

import threading
from pathlib import Path

import pytest
from tiny_runs import config_of, toy_run

from postgrad.config.schema import TrainingConfig
from postgrad.errors import RunError
from postgrad.model.checkpoint_files import AsyncWriter
from postgrad.training import checkpoint
from postgrad.training.checkpoint import State, Writer
from postgrad.training.driver import train
from postgrad.training.report import Reporter

SMALL = toy_run(steps=3)


class SlowFile:
    """A file whose write waits for an event."""

    def __init__(self, path: Path, may: threading.Event, error: Exception | None = None) -> None:
        self.path, self.may, self.error = path, may, error

    def write(self) -> None:
        assert self.may.wait(60)
        if self.error is not None:
            raise self.error
        self.path.write_text("weights")


class Model:
    """A trained model whose disk is as slow as the test wants."""

    def __init__(self, error: Exception | None = None) -> None:
        self.behind, self.may, self.error = AsyncWriter(), threading.Event(), error

    def save(self, folder: str) -> None:
        Path(folder, "model").write_text("weights")

    def load(self, folder: str) -> None: ...

    def begin_save(self, folder: str) -> None:
        self.behind.start([SlowFile(Path(folder, "model"), self.may, self.error)])  # type: ignore[list-item]

    def saved(self, wait: bool) -> bool:
        return self.behind.done(wait)


def writer_of(folder: Path, model: Model, complete: list[Path] | None = None) -> Writer:
    """Return a writer that keeps two checkpoints; it appends each complete one to `complete`."""
    training = TrainingConfig(keep_checkpoints=2, async_save=True)
    return Writer(folder, [model], training, (complete if complete is not None else []).append)


def state(step: int) -> State:
    return State(step, {"epoch": 0}, 0, {})


def test_latest_is_updated_when_the_checkpoint_is_complete(tmp_path):
    model = Model()
    complete: list[Path] = []
    writer = writer_of(tmp_path, model, complete)
    writer.save(state(1), None)
    writer.finish(wait=False)
    assert checkpoint.latest(tmp_path) is None
    assert complete == []
    model.may.set()
    writer.finish(wait=True)
    written = tmp_path / "checkpoints" / "step-1"
    assert checkpoint.latest(tmp_path) == written
    assert complete == [written]
    assert (written / "model").read_text() == "weights"
    assert not list((tmp_path / "checkpoints").glob(".step*"))
    writer.finish(wait=True)
    assert len(complete) == 1


def test_next_save_waits_for_the_previous_one(tmp_path):
    model = Model()
    writer = writer_of(tmp_path, model)
    writer.save(state(1), None)
    threading.Timer(0.2, model.may.set).start()
    writer.save(state(2), None)
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints" / "step-1"
    writer.finish(wait=True)
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints" / "step-2"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("broken tensor"), "broken tensor"),
    ],
)
def test_error_of_the_writer_is_a_run_error_and_leaves_the_previous_checkpoint(
    tmp_path, error, reason
):
    model = Model()
    model.may.set()
    writer = writer_of(tmp_path, model)
    writer.save(state(1), None)
    writer.finish(wait=True)
    model.error = error
    writer.save(state(2), None)
    with pytest.raises(RunError, match=rf"checkpoint .*step-2.*{reason}"):
        writer.finish(wait=True)
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints" / "step-1"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-1"]


@pytest.mark.slow
def test_asynchronous_saves_write_the_same_bytes(tiny, tmp_path):
    for name, more in {
        "at-once": "training.async_save=false",
        "behind": "training.async_save=true",
    }.items():
        overrides = (
            *SMALL,
            "training.checkpoint_every=1",
            "training.keep_checkpoints=9",
            f"runs={tmp_path}",
            f"name={name}",
            more,
        )
        train(config_of("ppo", tiny, *overrides), Reporter())
    for step in (1, 2, 3):
        one, two = (
            tmp_path / name / "checkpoints" / f"step-{step}" for name in ("at-once", "behind")
        )
        files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
        assert (
            files == sorted(p.relative_to(two) for p in two.rglob("*") if p.is_file())
            and len(files) > 8
        )
        for file in files:
            assert (one / file).read_bytes() == (two / file).read_bytes(), file
    assert (tmp_path / "behind" / "checkpoints" / "latest").read_text() == "step-3\n"
