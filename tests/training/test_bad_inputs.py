"""Bad inputs: one clear line, the right exit code, and nothing written or lost."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from jsonl import write_jsonl
from refused import refused
from tiny_runs import (
    NoteReporter,
    config_of,
    metrics_without_timing,
    overrides_of,
    toy_run,
    tree,
)

from postgrad.cli.main import main
from postgrad.errors import ConfigError, RunError
from postgrad.training import checkpoint, run
from postgrad.training import open as run_opening
from postgrad.training.driver import train
from postgrad.training.log import RunLog
from postgrad.training.prepare import Prepared, prepare
from postgrad.training.report import Reporter

SMALL = (
    *toy_run(steps=4, response_tokens=3),
    "optimizer.lr=1e-2",
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The working folder; test_slips.py has the files that people get wrong."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepared(recipe: str, model: Path, *overrides: str) -> Prepared:
    run = prepare(config_of(recipe, model, *SMALL, *overrides))
    run.scorer.close()
    return run


def test_rows_that_are_read_must_fit_their_limits(home, tiny):
    """Of a method that does not sample, rows count and not rollout.max_response_tokens."""
    file = home / "rows.jsonl"
    data = "data.train=rows.jsonl"
    limit = "rollout.max_response_tokens"
    write_jsonl(
        file, *[{"prompt": f"{n}=", "chosen": "1", "rejected": "1" * n} for n in range(1, 9)]
    )
    with refused("too_large", "rollout.max_response_tokens", shows="3 of 8 "):
        prepared("dpo", tiny, data, f"{limit}=6")
    write_jsonl(
        file, *[{"prompt": f"{n}=", "chosen": "1" * 520, "rejected": "2"} for n in range(4)]
    )
    with refused("too_large", "rollout.max_response_tokens", shows="context of 512"):
        prepared("dpo", tiny, data, f"{limit}=600")
    write_jsonl(
        file, *[{"prompt": f"{n}=", "chosen": "1" * 300, "rejected": "2"} for n in range(4)]
    )
    prepared("dpo", tiny, data, f"{limit}=600")
    prepared("cs336_sft", tiny, f"{limit}=600", "data.prompt_style=own", "training.epochs=0")
    # A long prompt with a short response, and the other way round: KTO reads each with each.
    rows = [("1" * 400, "2"), ("1", "2" * 400)] * 2
    write_jsonl(file, *[{"prompt": a, "completion": b, "label": True} for a, b in rows])
    more = (data, f"{limit}=500", "data.max_prompt_tokens=500")
    with refused("too_large", "rollout.max_response_tokens", shows="400 tokens .* 401 exceed"):
        prepared("kto", tiny, *more)
    prepared("sft", tiny, *more)


def test_pairs_with_equal_responses_are_reported(home, tiny):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "2"}
    other = {"prompt": "1+2=", "chosen": "3", "rejected": "2"}
    write_jsonl(home / "pairs.jsonl", *[row, other, other, other])
    notes = prepared("dpo", tiny, "data.train=pairs.jsonl").notes
    assert any("1 of 4 pairs of data.train have the same chosen" in text for text in notes)


# ---- a folder that has a run


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    """The folder of runs with a finished run of four steps."""
    runs = tmp_path_factory.mktemp("finished")
    train(
        config_of("grpo", tiny, *SMALL, f"runs={runs}", "training.checkpoint_every=2"), Reporter()
    )
    return runs


def again(model: Path, runs: Path, *more: str) -> int:
    """Repeat the command of the finished run in another folder of runs."""
    same = (*SMALL, f"runs={runs}", "training.checkpoint_every=2")
    return main(["train", "grpo", *overrides_of(model, *same, *more)])


@pytest.mark.slow
def test_a_run_that_cannot_be_continued_is_unchanged(home, capsys, tiny, finished):
    shutil.copytree(finished, home / "runs")
    before = tree(home / "runs")
    refused = {
        "optimizer.lr=2e-2": "optimizer.lr was 0.01, now 0.02",
        "seed=5": "seed was 0, now 5",
        "method.aggregation=token-sum": "method.aggregation was token-mean, now token-sum",
        "": "is in use by another process",
    }
    for word, part in refused.items():
        with (home / "runs" / "test" / ".lock").open("r+") as file:
            if not word:
                fcntl.flock(file, fcntl.LOCK_EX)
            assert again(tiny, home / "runs", *[word] * bool(word)) == 2
        err = capsys.readouterr().err
        assert part in err and "another name=" in err and err.count("\n") == 1
        assert tree(home / "runs") == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over", "part"),
    [(False, "is in use by another process"), (True, "another process has created")],
)
def test_run_that_another_process_started_during_loading_is_unchanged(
    home, capsys, tiny, monkeypatch, over, part, finished
):
    """Neither found a folder at first; the slower one must not write into the other's."""
    open_models = run_opening.open_models
    lock = []

    def slow_open_models(config):
        shutil.copytree(finished, home / "runs")
        if not over:
            lock.append((home / "runs" / "test" / ".lock").open("r+"))
            fcntl.flock(lock[0], fcntl.LOCK_EX)
        return open_models(config)

    monkeypatch.setattr(run_opening, "open_models", slow_open_models)
    assert again(tiny, home / "runs") == 2
    err = capsys.readouterr().err
    assert part in err and err.count("\n") == 1
    assert tree(home / "runs") == tree(finished)
    for file in lock:
        file.close()


@pytest.mark.slow
def test_run_may_be_renamed_moved_and_extended(home, tiny, finished):
    """The name, the folder and the number of steps do not change what it computes."""
    (home / "moved").mkdir()
    shutil.copytree(finished / "test", home / "moved" / "other")
    more = ("training.steps=5", "training.checkpoint_every=5")
    train(config_of("grpo", tiny, *SMALL, f"runs={home}/moved", "name=other", *more), Reporter())
    train(config_of("grpo", tiny, *SMALL, f"runs={home}/whole", *more), Reporter())
    moved = metrics_without_timing(home / "moved" / "other")
    assert moved == metrics_without_timing(home / "whole" / "test")


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",
    [
        "optimizer.schedule=linear",
        "optimizer.schedule=cosine",
        "optimizer.warmup_steps=0.5",
        "rollout.staleness=1",
    ],
)
def test_run_whose_steps_depend_on_their_number_cannot_be_extended(tmp_path, word):
    overrides = (word, "cluster.backend=process", "cluster.engines=1", f"runs={tmp_path}")
    run.create_folder(config_of("grpo", Path("tiny"), *SMALL, *overrides))
    with refused("changed", "training.steps", shows=r"training\.steps was 4, now 9"):
        run.resume_config(config_of("grpo", Path("tiny"), *SMALL, *overrides, "training.steps=9"))


def test_settings_that_do_not_change_the_computation_may_change(tmp_path):
    run.create_folder(config_of("grpo", Path("tiny"), *SMALL, f"runs={tmp_path}"))
    limits = ("training.max_flat_steps=99", "reward.max_failure_rate=0.9")
    passes = ("training.checkpoint_every=1", "training.token_budget=64")
    run.resume_config(config_of("grpo", Path("tiny"), *SMALL, f"runs={tmp_path}", *limits, *passes))


def test_a_run_of_an_earlier_version_continues_if_what_is_gone_changed_nothing(tmp_path):
    config = config_of("grpo", Path("tiny"), *SMALL, f"runs={tmp_path}")
    run.create_folder(config)
    (file,) = tmp_path.glob("*/config.yaml")
    stored = yaml.safe_load(file.read_text())
    stored["optimizer"]["warmup_ratio"] = 0.0
    stored["method"]["correction_normalize"] = False
    del stored["optimizer"]["warmup_steps"]  # and a setting that it did not have
    file.write_text(yaml.safe_dump(stored))
    run.resume_config(config)
    stored["optimizer"]["warmup_ratio"] = 0.1
    file.write_text(yaml.safe_dump(stored))
    with refused("changed", "optimizer.warmup_ratio"):
        run.resume_config(config)


def test_model_path_may_change_after_a_warmup_run_only(tmp_path):
    with_warmup = ("warmup.recipe=sft", f"runs={tmp_path}")
    run.create_folder(config_of("grpo", tmp_path / "here", *SMALL, *with_warmup))
    run.resume_config(config_of("grpo", tmp_path / "there", *SMALL, *with_warmup))
    run.create_folder(
        config_of("grpo", tmp_path / "here", *SMALL, "name=alone", f"runs={tmp_path}")
    )
    with refused("changed", "model.path"):
        run.resume_config(
            config_of("grpo", tmp_path / "there", *SMALL, "name=alone", f"runs={tmp_path}")
        )


@pytest.mark.parametrize("text", ["", "model: [", "a list", "model: 3\n", "\xff\xfe"])
def test_damaged_config_yaml_is_one_line(tmp_path, text):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "config.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"test/config\.yaml .*use another name=") as caught:
        run.resume_config(config_of("grpo", Path("tiny"), *SMALL, f"runs={tmp_path}"))
    assert "\n" not in str(caught.value)


# ---- a full disk


@pytest.mark.slow
def test_checkpoint_that_cannot_be_written_leaves_the_previous_one(
    home, tiny, monkeypatch, capsys, finished
):
    real = checkpoint.fsync_tree

    def full(folder):
        if folder.name == ".step-4.partial":
            raise OSError(28, "No space left on device")
        real(folder)

    monkeypatch.setattr(checkpoint, "fsync_tree", full)
    assert again(tiny, home / "runs") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "earlier checkpoints are intact" in err
    assert "step-4 could not be written: No space left on device" in err
    names = sorted(path.name for path in (home / "runs" / "test" / "checkpoints").iterdir())
    assert names == ["latest", "step-2"], "the half-written one is gone"
    monkeypatch.setattr(checkpoint, "fsync_tree", real)
    assert again(tiny, home / "runs") == 0
    same = metrics_without_timing(finished / "test")
    assert metrics_without_timing(home / "runs" / "test") == same


class DiskFiller(Reporter):
    """Fills the disk up to `free` bytes when step 2 is saved."""

    def __init__(self, folder, free: int) -> None:
        self.folder = folder
        self.free = free

    def saved(self, path, *_) -> None:
        if path.name == "step-2":
            space = os.statvfs(self.folder)
            with (self.folder / "ballast").open("wb") as file:
                file.write(b"\0" * max(0, space.f_bavail * space.f_frsize - self.free))


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True
        ).returncode
        != 0
    ):
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("free", "what"),
    [(0, "could not be written"), (64 * 1024, "checkpoints/step-4 could not be written")],
)
def test_full_disk_stops_the_run_and_the_same_command_continues_it(
    small_disk, tmp_path, tiny, free, what
):
    overrides = (*SMALL, "training.checkpoint_every=2", "training.steps=6")
    with pytest.raises(RunError, match=what) as caught:
        train(
            config_of("grpo", tiny, *overrides, f"runs={small_disk}"),
            DiskFiller(small_disk, free),
        )
    assert "No space left" in str(caught.value) and "\n" not in str(caught.value)
    checkpoints = small_disk / "test" / "checkpoints"
    assert (checkpoints / "latest").read_text().strip() == "step-2" and sorted(
        p.name for p in checkpoints.glob("*step*")
    ) == ["step-2"]
    (small_disk / "ballast").unlink()
    train(config_of("grpo", tiny, *overrides, f"runs={small_disk}"), Reporter())
    train(config_of("grpo", tiny, *overrides, f"runs={tmp_path}"), Reporter())
    assert metrics_without_timing(small_disk / "test") == metrics_without_timing(tmp_path / "test")
    final = "checkpoints/step-6/policy/model.safetensors"
    assert (small_disk / "test" / final).read_bytes() == (tmp_path / "test" / final).read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_metrics_that_cannot_be_written_are_a_run_error(tmp_path):
    log = RunLog(tmp_path, 0)
    log.file.close()
    log.file = open("/dev/full", "a")  # noqa: PTH123, SIM115
    with pytest.raises(RunError, match=r"metrics\.jsonl could not be written: No space left"):
        log.write(1, {"loss": 1.0})
    log.close()


def test_rollouts_that_the_disk_lost_are_a_run_error(tmp_path):
    log = RunLog(tmp_path, 0)
    log.unsynced = [tmp_path / "step-000001.parquet"]
    with pytest.raises(RunError, match=r"step-000001\.parquet could not be written: No such file"):
        log.sync()
    log.close()


@pytest.mark.parametrize("max_refills", [0, 2])
def test_the_first_responses_without_a_score_are_reported(tmp_path, tiny, max_refills):
    """Their share is that of all responses, also of those that refills replace."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def sometimes(response, problem):\n"
        f"    open({str(tmp_path / 'calls')!r}, 'a').write('.')\n"
        "    if sum(map(ord, response)) % 4 == 0:\n"
        "        raise ValueError('one in four')\n"
        "    return float(sum(map(ord, response)) % 5 == 0)\n"
    )
    settings = (
        f"reward.verifier={file}:sometimes",
        "reward.max_failure_rate=0.9",
        "training.steps=1",
        f"method.max_refills={max_refills}",
    )
    notes = NoteReporter()
    train(config_of("grpo", tiny, *SMALL, *settings, f"runs={tmp_path}"), notes)
    (warning,) = [text for text in notes.notes if "could not be scored" in text]
    assert warning.startswith("warning: step 1: ") and "one in four" in warning
    assert f" of {len((tmp_path / 'calls').read_text())} responses" in warning
