"""track=...: what arrives in each package's own offline store; skipped, visibly, where the package is not installed."""

import importlib.util
import json
import sqlite3
import time

import pytest
from world import config_of, metrics_of, toy_run

from postgrad.cli.main import main
from postgrad.errors import RunError
from postgrad.training import trackers
from postgrad.training.driver import train
from postgrad.training.report import Reporter

SMALL = (
    *toy_run(problems=2, samples=2),
    "data.validation=arithmetic:1",
    "training.validation_problems=4",
    "training.max_flat_steps=9",
)


def tracked(tiny, tmp_path, kind):
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed (pip install 'postgrad[track]')")
    config = config_of("grpo", tiny, *SMALL, f"runs={tmp_path}/runs", f"track={kind}")
    train(config, Reporter())
    lines = metrics_of(tmp_path / "runs" / "test")
    assert len(lines) == 4
    return (
        tmp_path / "runs" / "test",
        [line for line in lines if "step_s" in line],
        [line for line in lines if "validation/accuracy" in line],
    )


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_tensorboard_shows_steps_once_when_a_run_was_killed_before_its_first_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value in (1.0, 2.0):  # the second start has no checkpoint to go on from
        log, close = trackers.tensorboard(tmp_path, None, 0)  # type: ignore[arg-type]
        for step in (0, 1, 2):
            log(step, {"loss": value})
        close()
        time.sleep(1.1)  # the files of one second would be read in any order
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 2.0),
        (1, 2.0),
        (2, 2.0),
    ]


def test_tensorboard_gets_every_number(tiny, tmp_path):
    folder, steps, validations = tracked(tiny, tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for name in ("response/length", "reward/mean", "stage/sample_s"):
        assert [(e.step, e.value) for e in events.Scalars(name)] == [
            (s["step"], pytest.approx(s[name], rel=1e-6)) for s in steps
        ]
    assert (
        [e.step for e in events.Scalars("validation/accuracy")]
        == [s["step"] for s in validations]
        == [0, 2]
    )


def offline_records(data: bytes) -> list[bytes]:
    """The records of a .wandb file: blocks of 32 KiB with (checksum 4, length 2, kind 1) before each piece; kinds 1 and 4 end a record."""
    out, piece, at = [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            out.append(piece)
            piece = b""
    return out


@pytest.mark.slow
def test_wandb_offline_gets_every_number(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder, steps, validations = tracked(tiny, tmp_path, "wandb")
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "wandb sync" in line]
    assert line.endswith(f"wandb sync {file.parent}"), "the command that sends it"
    from wandb.proto import wandb_internal_pb2

    limit = time.monotonic() + 120
    while True:  # its own process writes the file, and may still be at it
        records = [
            wandb_internal_pb2.Record.FromString(data)
            for data in offline_records(file.read_bytes())
        ]
        if any(record.HasField("exit") for record in records):
            break
        assert time.monotonic() < limit, "wandb never finished its file"
        time.sleep(0.1)
    histories = [record.history.item for record in records if record.history.item]
    seen = [
        {item.key or "/".join(item.nested_key): item.value_json for item in items}
        for items in histories
    ]
    logged = [
        (int(line["step"]), float(line["response/length"]))
        for line in seen
        if "response/length" in line
    ]
    assert logged == [(s["step"], pytest.approx(s["response/length"])) for s in steps]
    assert [int(line["step"]) for line in seen if "validation/accuracy" in line] == [
        s["step"] for s in validations
    ]


def test_wandb_online_is_asked_for_one_run_that_goes_on(tiny, tmp_path, monkeypatch):
    """What is handed to wandb.init: where, under which name, and an identity by which a resumed run is the same run there."""
    wandb = pytest.importorskip(
        "wandb", reason="wandb is not installed (pip install 'postgrad[track]')"
    )
    asked, logged = [], []

    class Run:
        offline, dir = False, "/nowhere/files"
        define_metric = staticmethod(lambda name, step_metric: asked.append((name, step_metric)))
        log = staticmethod(logged.append)
        finish = staticmethod(lambda: logged.append("finished"))

    monkeypatch.setattr(wandb, "init", lambda **given: asked.append(given) or Run())
    for _ in range(2):  # the second time as a run that goes on
        config = config_of("grpo", tiny, f"runs={tmp_path}/runs", "track=wandb")
        tracker = trackers.wandb(tmp_path / "runs" / "test", config, 0)
        tracker[0](3, {"reward/mean": 0.5})
        tracker[1]()
    first, second = asked[0], asked[2]
    assert first["project"] == "postgrad" and first["name"] == "test" and first["resume"] == "allow"
    assert first["id"] == second["id"] and first["dir"] == str(tmp_path / "runs" / "test")
    assert first["config"]["optimizer"]["lr"] == config.optimizer.lr and "mode" not in first, (
        "WANDB_MODE alone decides"
    )
    assert first["settings"].console == "off" and asked[1] == ("*", "step")
    assert logged == [{"step": 3, "reward/mean": 0.5}, "finished"] * 2


@pytest.mark.slow
def test_trackio_gets_every_number(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    _, steps, validations = tracked(tiny, tmp_path, "trackio")

    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as base:
        rows = [
            (step, json.loads(text))
            for step, text in base.execute("select step, metrics from metrics order by id")
        ]
    assert [
        (step, line["response/length"]) for step, line in rows if "response/length" in line
    ] == [(s["step"], pytest.approx(s["response/length"])) for s in steps]
    assert [step for step, line in rows if "validation/accuracy" in line] == [
        s["step"] for s in validations
    ]


def test_a_mirror_whose_package_is_missing_is_refused_before_anything_is_written(
    tiny, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "train",
                "grpo",
                f"model.path={tiny}",
                "data.train=arithmetic:1",
                "data.template=plain",
                "track=wandb",
            ]
        )
        == 2
    )
    assert "pip install wandb" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_an_unknown_mirror_names_the_nearest(tiny, capsys):
    assert (
        main(["train", "grpo", f"model.path={tiny}", "data.train=arithmetic:1", "track=tensorbord"])
        == 2
    )
    assert "did you mean tensorboard?" in capsys.readouterr().err


def test_a_mirror_that_fails_later_does_not_stop_the_run(tiny, tmp_path, monkeypatch, capsys):
    def breaks(number, metrics):
        raise OSError("the network is gone")

    monkeypatch.setitem(
        trackers.TRACKERS, "tensorboard", lambda *_: trackers.Tracker(breaks, lambda: None)
    )
    monkeypatch.setattr("postgrad.training.prepare.check_tracker", lambda config: None)
    result = train(
        config_of("grpo", tiny, *SMALL, f"runs={tmp_path}/runs", "track=tensorboard"), Reporter()
    )
    assert result.step == 2 and capsys.readouterr().out.count("the network is gone") == 1


def test_a_mirror_that_cannot_start_stops_the_run_at_once(tiny, tmp_path, monkeypatch):
    def refuses(*_):
        raise ValueError("not logged in")

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", refuses)
    monkeypatch.setattr("postgrad.training.prepare.check_tracker", lambda config: None)
    with pytest.raises(RunError, match="track=tensorboard could not start: not logged in"):
        train(
            config_of("grpo", tiny, *SMALL, f"runs={tmp_path}/runs", "track=tensorboard"),
            Reporter(),
        )
