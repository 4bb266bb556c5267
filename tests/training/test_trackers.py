"""track=...: what each package stores offline; skipped if the package is not installed."""

import importlib.util
import time
from types import SimpleNamespace

import pytest
from refused import refused
from tiny_runs import config_of, metrics_of, toy_run

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


def train_with(kind, tiny, tmp_path):
    """Train with a tracker; return (folder, metrics of steps, metrics of validations)."""
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


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_tensorboard_shows_steps_once_after_a_kill_before_the_first_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value in (1.0, 2.0):  # the second start has no checkpoint
        tracker = trackers.TensorBoard(tmp_path, None, 0)  # type: ignore[arg-type]
        for step in (0, 1, 2):
            tracker.log(step, {"loss": value})
        tracker.finish()
        time.sleep(1.1)  # files of the same second are read in any order
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 2.0),
        (1, 2.0),
        (2, 2.0),
    ]


@pytest.mark.slow
def test_tensorboard_gets_every_number(tiny, tmp_path):
    folder, steps, validations = train_with("tensorboard", tiny, tmp_path)
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
    """Return the records of a .wandb file.

    It has blocks of 32 KiB; each piece follows a header of checksum (4 bytes), length (2) and
    kind (1). Kinds 1 and 4 end a record.
    """
    records = []
    record = b""
    at = 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(record)
            record = b""
    return records


@pytest.mark.slow
def test_wandb_offline_gets_every_number(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder, steps, validations = train_with("wandb", tiny, tmp_path)
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "wandb sync" in line]
    assert line.endswith(f"wandb sync {file.parent}"), "the command that sends it"
    from wandb.proto import wandb_internal_pb2

    limit = time.monotonic() + 120
    while True:  # another process writes the file
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


@pytest.mark.slow
def test_wandb_online_gets_the_same_id_after_a_resume(tiny, tmp_path, monkeypatch):
    """The arguments of wandb.init: folder, name, and an id that a resumed run keeps."""
    wandb = pytest.importorskip(
        "wandb", reason="wandb is not installed (pip install 'postgrad[track]')"
    )
    calls = []
    logged = []

    class Run:
        offline, dir, summary = False, "/nowhere/files", {}
        define_metric = staticmethod(lambda name, step_metric: calls.append((name, step_metric)))
        log = staticmethod(logged.append)
        finish = staticmethod(lambda: logged.append("finished"))

    monkeypatch.setattr(wandb, "init", lambda **given: calls.append(given) or Run())
    (tmp_path / "runs" / "test").mkdir(parents=True)
    # a new run, a resumed one, one without a checkpoint, a copy of the folder that is resumed
    for start, name in ((0, "test"), (2, "test"), (0, "test"), (2, "copy")):
        config = config_of("grpo", tiny, f"runs={tmp_path}/runs", "track=wandb", f"name={name}")
        tracker = trackers.Wandb(tmp_path / "runs" / "test", config, start)
        tracker.log(3, {"reward/mean": 0.5})
        tracker.finish()
    first = calls[0]
    second = calls[2]
    assert first["project"] == "postgrad" and first["name"] == "test" and first["resume"] == "allow"
    assert first["id"] == second["id"]
    assert len({calls[i]["id"] for i in (0, 4, 6)}) == 3
    assert first["dir"] == str(tmp_path / "runs" / "test")
    assert first["config"]["optimizer"]["lr"] == config.optimizer.lr and "mode" not in first, (
        "WANDB_MODE alone decides"
    )
    assert first["settings"].console == "off" and calls[1] == ("*", "step")
    assert logged == [{"step": 3, "reward/mean": 0.5}, "finished"] * 4


def test_no_step_is_sent_twice_after_a_kill(tiny, tmp_path, monkeypatch, capsys):
    """W&B keeps the steps that the killed run sent after its checkpoint, and gets the next ones.

    The run may have been killed in the validation of step 4, so that one is sent.
    """
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    logged = []
    run = SimpleNamespace(
        summary={"step": 4, "reward/mean": 0.1},
        define_metric=lambda name, step_metric: None,
        log=logged.append,
    )
    monkeypatch.setattr(wandb, "init", lambda **given: run)
    config = config_of("grpo", tiny, f"runs={tmp_path}", "track=wandb")
    reporter = trackers.TrackerReporter("wandb")
    reporter.started(tmp_path, config, 2)
    assert "has steps 3 to 4" in capsys.readouterr().out
    for step in (3, 4, 5):
        reporter.step({"step": step, "time": 0.0, "reward/mean": 0.5}, None)  # type: ignore[arg-type]
        reporter.validated(step, {"validation/accuracy": 0.5})
    assert logged == [
        {"step": 4, "validation/accuracy": 0.5},
        {"step": 5, "reward/mean": 0.5},
        {"step": 5, "validation/accuracy": 0.5},
    ]


OWN = """
class Lines:
    def __init__(self, folder, config, start):
        self.file = (folder / "lines.txt").open("a")
        self.file.write(f"{config.name} from {start}\\n")
        self.last_step = 1 if start else -1

    def log(self, step, metrics):
        assert all(type(value) is float for value in metrics.values())
        self.file.write(f"{step} {'step_s' in metrics}\\n")

    def finish(self):
        self.file.write("end\\n")
        self.file.close()

class NoTracker:
    def log(self, step, metrics): ...
"""


def test_a_class_of_the_user_is_a_tracker(tiny, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    given = (*SMALL, f"runs={tmp_path}/runs", f"track={tmp_path}/own.py:Lines")
    train(config_of("grpo", tiny, *given, "training.checkpoint_every=1"), Reporter())
    train(config_of("grpo", tiny, *given, "training.steps=3"), Reporter())
    lines = (tmp_path / "runs" / "test" / "lines.txt").read_text().splitlines()
    first = ["test from 0", "0 False", "1 True", "2 True", "2 False", "end"]
    assert lines == [*first, "test from 2", "3 True", "3 False", "end"]


@pytest.mark.parametrize("name", ["NoTracker", "Line"])
def test_a_class_that_is_no_tracker_is_refused(tiny, tmp_path, name):
    (tmp_path / "own.py").write_text(OWN)
    path = f"{tmp_path}/own.py:{name}"
    with refused("unknown_name", "track", shows=f"has no class with log and finish {name}.*Lines"):
        trackers.check_tracker(config_of("grpo", tiny, f"track={path}"))


def test_one_error_names_the_packages_of_all_trackers(tiny, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("not_installed", "track", shows="pip install tensorboard wandb"):
        trackers.check_tracker(config_of("grpo", tiny, "track=tensorboard,wandb"))


def fake_tracker(calls, fail=None):
    """A tracker that records what it gets, or raises in the call named `fail`."""

    def called(name):
        calls.append(name)
        if name == fail:
            raise OSError("the network is gone")

    def start(*_):
        called("start")
        return SimpleNamespace(
            log=lambda number, _: called(f"log {number}"), finish=lambda: called("finish")
        )

    return start


LOGS = ["log 0", "log 1", "log 2", "log 2"]  # two steps, validations before and after them


@pytest.mark.parametrize("fail", ["log 0", "log 1", "finish"])
def test_a_tracker_that_fails_does_not_hide_the_other(tiny, tmp_path, monkeypatch, capsys, fail):
    failed = []
    kept = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", fake_tracker(failed, fail))
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", fake_tracker(kept))
    monkeypatch.setattr("postgrad.training.trackers.check_tracker", lambda config: None)
    given = (*SMALL, f"runs={tmp_path}/runs", "track=wandb,tensorboard")
    result = train(config_of("grpo", tiny, *given), Reporter())
    assert result.step == 2 and kept == ["start", *LOGS, "finish"]
    assert failed == ["start", *LOGS, "finish"][: failed.index(fail) + 1]
    assert capsys.readouterr().out.count("track=wandb failed and gets no more metrics") == 1


def test_a_tracker_that_started_is_finished_if_the_next_cannot_start(tiny, tmp_path, monkeypatch):
    first = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", fake_tracker(first))
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", fake_tracker([], "start"))
    monkeypatch.setattr("postgrad.training.trackers.check_tracker", lambda config: None)
    given = (*SMALL, f"runs={tmp_path}/runs", "track=wandb,tensorboard")
    with pytest.raises(RunError, match="track=tensorboard could not start"):
        train(config_of("grpo", tiny, *given), Reporter())
    assert first == ["start", "finish"]


def test_a_run_of_a_version_with_one_tracker_continues_with_two(tiny, tmp_path, monkeypatch):
    """Its config.yaml has a text: track: wandb."""
    calls = {"wandb": [], "tensorboard": []}
    for name in calls:
        monkeypatch.setitem(trackers.TRACKERS, name, fake_tracker(calls[name]))
    monkeypatch.setattr("postgrad.training.trackers.check_tracker", lambda config: None)
    given = (*SMALL, f"runs={tmp_path}/runs", "training.checkpoint_every=1")
    train(config_of("grpo", tiny, *given, "track=wandb"), Reporter())
    file = tmp_path / "runs" / "test" / "config.yaml"
    stored = file.read_text()
    assert "track:\n- wandb\n" in stored
    file.write_text(stored.replace("track:\n- wandb\n", "track: wandb\n"))
    more = (*given, "training.steps=3", "track=[wandb,tensorboard]")
    assert train(config_of("grpo", tiny, *more), Reporter()).step == 3
    assert calls["tensorboard"] == ["start", "log 3", "log 3", "finish"]
    assert calls["wandb"][len(LOGS) + 2 :] == calls["tensorboard"]
