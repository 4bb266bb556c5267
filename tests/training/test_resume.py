"""A run that is killed or interrupted resumes bit for bit: real processes, signals, files compared.

Processes are forked from a server that has torch loaded, so that a start takes a fraction of a
second. The reference runs as the plain command in a new interpreter.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from refused import refused
from tiny_runs import (
    config_of,
    ctrl_c_at,
    forkserver,
    hold_at_step,
    metrics_of,
    metrics_without_timing,
    overrides_of,
    postgrad,
    run_words,
    toy_run,
    tree,
)

from postgrad.cli.main import main
from postgrad.training.driver import Driver, train
from postgrad.training.log import RunLog
from postgrad.training.report import Reporter

STEPS = 12
SMALL = (
    *toy_run(steps=STEPS),
    "training.updates_per_step=2",
    "optimizer.lr=3e-3",
    "optimizer.schedule=linear",
    "data.validation=arithmetic:1:digits:test",
    "training.validate_every=3",
    "training.checkpoint_every=2",
)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("verifier") / "odd.py"
    # The pause gives the tests time to see a step before the next one is done.
    file.write_text(
        "import time\n\n\ndef odd(response, problem):\n    time.sleep(0.003)\n"
        "    return sum(c in '13579' for c in response) / 4 + 0.01 * len(response)\n"
    )
    return file


@pytest.fixture(scope="module")
def overrides(tiny, verifier):
    return lambda runs: [
        "train",
        "grpo",
        *overrides_of(tiny, *SMALL, f"reward.verifier={verifier}:odd", f"runs={runs}"),
    ]


@pytest.fixture(scope="module")
def server():
    return forkserver()


@pytest.fixture(scope="module")
def reference(overrides, tmp_path_factory) -> Path:
    """The uninterrupted run."""
    runs = tmp_path_factory.mktemp("reference")
    done = postgrad(*overrides(runs))
    assert done.returncode == 0, done.stderr
    steps = [line for line in metrics_of(runs / "test") if "reward/mean" in line]
    assert len(steps) == STEPS and all(line["grad_norm"] > 0 for line in steps), (
        "every step must move the weights"
    )
    return runs / "test"


def run_held(held_at: int | None, hold: Path, *arguments) -> None:
    """Runs the command in a forked process; see Run."""
    if held_at is not None:
        hold_at_step(held_at, hold)
    run_words(*arguments)


class Run:
    """One process that runs the command; it logs step `held_at` only after `release`."""

    def __init__(
        self,
        server,
        overrides,
        runs: Path,
        slow_sync: bool = False,
        held_at: int | None = None,
    ) -> None:
        self.runs = runs
        self.folder = runs / "test"
        self.output = runs / "output.txt"
        self.hold = runs / "hold"
        self.release()
        if held_at is not None:
            self.hold.touch()
        self.process = server.Process(
            target=run_held, args=(held_at, self.hold, overrides(runs), str(self.output), slow_sync)
        )
        self.process.start()

    def release(self) -> None:
        self.hold.unlink(missing_ok=True)

    def steps(self) -> int:
        """Return the last step in metrics.jsonl, -1 if there is none yet."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return -1
        return (
            int(lines[-1].split('"step": ')[1].split(",")[0])
            if lines and lines[-1].endswith("}")
            else -1
        )

    def wait_until(self, condition) -> bool:
        """Wait until the condition holds; False if the process ended first."""
        limit = time.monotonic() + 300
        while self.process.is_alive():
            if condition():
                return True
            assert time.monotonic() < limit, "the run hangs"
            time.sleep(0.001)  # a step takes 50 ms: its verifier sleeps
        return condition()

    def kill(self) -> None:
        """Kill the process group with kill -9: nothing is cleaned up."""
        for kill in (lambda: os.killpg(self.process.pid, signal.SIGKILL), self.process.kill):
            try:
                kill()
            except ProcessLookupError:
                continue
        self.process.join(60)

    def interrupt(self, number=signal.SIGINT) -> None:
        os.killpg(self.process.pid, number)  # a terminal signals the process group

    def exit_code(self) -> int:
        self.process.join(60)
        assert self.process.exitcode is not None
        return self.process.exitcode


def checkpoint_names(folder: Path) -> set[str]:
    """Return the names in checkpoints/, hidden ones too."""
    try:
        return {entry.name for entry in os.scandir(folder / "checkpoints")}
    except OSError:
        return set()


def assert_same_run(folder: Path, reference: Path) -> None:
    for name in ("policy/model.safetensors", "optimizer.safetensors", "state.json", "method.bin"):
        file = f"checkpoints/step-{STEPS}/{name}"
        assert (folder / file).read_bytes() == (reference / file).read_bytes(), file
    assert metrics_without_timing(folder) == metrics_without_timing(reference)
    assert (folder / "checkpoints" / "latest").read_bytes() == (
        reference / "checkpoints" / "latest"
    ).read_bytes()
    tables = sorted(p.name for p in (reference / "rollouts").iterdir())
    assert tables == [f"step-{n:06d}.parquet" for n in range(1, STEPS + 1)]
    assert sorted(p.name for p in (folder / "rollouts").glob("step-*")) == tables
    for name in tables:
        assert pq.read_table(folder / "rollouts" / name).equals(
            pq.read_table(reference / "rollouts" / name)
        ), name


def finish(server, overrides, runs: Path, reference: Path) -> None:
    """Run the same command to its end and compare with the reference."""
    run = Run(server, overrides, runs)
    assert run.exit_code() == 0, run.output.read_text()
    assert_same_run(runs / "test", reference)


@pytest.mark.slow
def test_kill_9_at_any_moment(server, overrides, reference, tmp_path):
    """After the start, during steps, during a checkpoint: the end has the same bits."""
    for seconds in (0.0, 0.3):  # while it imports and loads
        run = Run(server, overrides, tmp_path)
        time.sleep(seconds)
        run.kill()
    for step in (0, 1, 3, 6):  # 0: after the first validation
        run = Run(server, overrides, tmp_path, held_at=STEPS - 1)
        assert run.wait_until(lambda run=run, step=step: run.steps() >= step), (
            run.output.read_text()
        )
        run.kill()
        assert run.steps() < STEPS, "killed too late to show anything"
    finish(server, overrides, tmp_path, reference)


@pytest.mark.slow
def test_kill_9_while_a_checkpoint_is_written(server, overrides, reference, tmp_path):
    """While the first or a later one is written, and after its rename before `latest` changes."""
    for names in ({".step-2.partial"}, {".step-6.partial"}, {"step-8", ".latest.partial"}):
        for _ in range(8):
            run = Run(server, overrides, tmp_path, slow_sync=True)
            assert run.wait_until(
                lambda run=run, names=names: names <= checkpoint_names(run.folder)
            ), f"{names} was never seen: {run.output.read_text()}"
            run.kill()
            if names <= checkpoint_names(run.folder):
                break
        assert names <= checkpoint_names(run.folder), f"no kill hit the time of {names}"
    latest = (tmp_path / "test" / "checkpoints" / "latest").read_text().strip()
    newest = max(
        int(name.removeprefix("step-"))
        for name in checkpoint_names(tmp_path / "test")
        if name.startswith("step-")
    )
    assert latest == f"step-{newest - 2}", "the newest exists, but `latest` does not name it yet"
    finish(server, overrides, tmp_path, reference)
    assert not [name for name in checkpoint_names(tmp_path / "test") if name.startswith(".")], (
        "unfinished checkpoints are removed"
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_the_same_command_continues(
    server, overrides, reference, tmp_path, number
):
    run = Run(server, overrides, tmp_path, held_at=STEPS - 1)
    assert run.wait_until(lambda: run.steps() >= 4), run.output.read_text()
    run.interrupt(number)
    run.release()
    assert run.exit_code() == 130, run.output.read_text()
    step = run.steps()
    text = run.output.read_text()
    assert 4 <= step < STEPS
    assert f"saved at step {step} of {STEPS}" in text and "the same command continues" in text
    assert (run.folder / "checkpoints" / "latest").read_text().strip() == f"step-{step}"
    finish(server, overrides, tmp_path, reference)
    assert f"continuing at step {step}" in run.output.read_text()


@pytest.mark.slow
def test_second_ctrl_c_stops_at_once_and_keeps_the_checkpoints(
    server, overrides, reference, tmp_path
):
    run = Run(server, overrides, tmp_path, held_at=STEPS - 1)
    assert run.wait_until(lambda: run.steps() >= 5), run.output.read_text()
    run.interrupt()
    run.interrupt()
    run.release()
    assert run.exit_code() == 130
    assert "continues" in run.output.read_text() and "Traceback" not in run.output.read_text()
    finish(server, overrides, tmp_path, reference)


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_prints_no_traceback(server, overrides, tmp_path):
    run = Run(server, overrides, tmp_path, held_at=0)
    assert run.wait_until(lambda: (run.folder / "config.yaml").exists()), run.output.read_text()
    # While modules load, Python drops a signal that hits a destructor: people press again.
    for _ in range(40):
        with contextlib.suppress(ProcessLookupError):
            run.interrupt()
        run.process.join(0.5)
        if not run.process.is_alive():
            break
    assert run.exit_code() == 130 and "Traceback" not in run.output.read_text()


@pytest.mark.slow
def test_command_of_a_finished_run_changes_nothing(server, overrides, reference, tmp_path):
    shutil.copytree(reference, tmp_path / "test")
    before = tree(tmp_path)
    config = (tmp_path / "test" / "config.yaml").read_text()
    (tmp_path / "test" / "config.yaml").write_text(
        config.replace(str(reference.parent), str(tmp_path))
    )
    run = Run(server, overrides, tmp_path)
    assert run.exit_code() == 0
    assert f"done: {STEPS} steps" in run.output.read_text()
    after = tree(tmp_path)
    for name in ("test/config.yaml", "output.txt"):
        before.pop(name, None)
        after.pop(name)
    assert after == before


def train_here(tiny, verifier, runs, reporter, *overrides):
    own = (f"reward.verifier={verifier}:odd", f"runs={runs}", "training.steps=4", *overrides)
    return train(config_of("grpo", tiny, *SMALL, *own), reporter)


@pytest.fixture(scope="module")
def complete(tiny, verifier, tmp_path_factory) -> list[dict]:
    """The metrics of four steps without an interruption."""
    runs = tmp_path_factory.mktemp("complete")
    return metrics_without_timing(train_here(tiny, verifier, runs, Reporter()).folder)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 4))])
def test_ctrl_c_in_any_step_changes_no_metric(tiny, verifier, tmp_path, step, complete):
    """Step 3 is validated and step 4 is the last: each validation is written once."""
    first = train_here(tiny, verifier, tmp_path, ctrl_c_at(step))
    assert first.interrupted and first.step == step
    second = train_here(tiny, verifier, tmp_path, Reporter())
    assert not second.interrupted and second.step == 4
    assert metrics_without_timing(tmp_path / "test") == complete


@pytest.mark.slow
def test_ctrl_c_between_two_steps_is_not_lost(tiny, verifier, tmp_path, monkeypatch):
    """It hits the destructor of a step's result, in which Python drops exceptions."""
    advance = Driver.advance
    pressed: list[bool] = []

    class StepResult:
        def __del__(self) -> None:
            if not pressed:
                pressed.append(True)
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Driver, "advance", lambda driver: (advance(driver), StepResult())[1])
    result = train_here(tiny, verifier, tmp_path, Reporter())
    assert pressed and result.interrupted and result.step == 2


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_ctrl_c_in_any_step_of_the_warmup_run_starts_no_main_run(
    tiny, verifier, tmp_path, capsys, monkeypatch, step
):
    write = RunLog.write

    def write_and_press(self, number, metrics):
        if number == step and self.folder.name == "test-warmup":
            signal.raise_signal(signal.SIGINT)
        return write(self, number, metrics)

    warmup = (
        "warmup.recipe=sft",
        "warmup.overrides=[training.steps=3,training.problems_per_step=4]",
    )
    own = (*toy_run(steps=1), *warmup, f"reward.verifier={verifier}:odd", f"runs={tmp_path}")
    overrides = ["train", "grpo", *overrides_of(tiny, *own)]
    with monkeypatch.context() as patched:
        patched.setattr(RunLog, "write", write_and_press)
        assert main(overrides) == 130
    assert f"saved at step {step} of 3 in {tmp_path}/test-warmup" in capsys.readouterr().err
    assert not (tmp_path / "test").exists()
    assert main(overrides) == 0
    assert metrics_of(tmp_path / "test")[-1]["step"] == 1


@pytest.mark.slow
def test_run_that_reached_stop_at_stays_finished(tiny, verifier, tmp_path):
    """The goal is reached after a few steps; the same command must not train on."""
    overrides = (
        "training.stop_at=0.2",
        "training.validate_every=1",
        "training.steps=30",
        "training.checkpoint_every=30",
    )
    first = train_here(tiny, verifier, tmp_path, Reporter(), *overrides)
    assert first.reached and 0 < first.step < 30
    last = metrics_of(first.folder)[-1]
    assert last["step"] == first.step and last["validation/accuracy"] >= 0.2
    assert (first.folder / "checkpoints" / f"step-{first.step}").is_dir()
    before = tree(tmp_path)
    second = train_here(tiny, verifier, tmp_path, Reporter(), *overrides)
    assert second.step == first.step and tree(tmp_path) == before


@pytest.mark.slow
def test_resume_with_other_data_is_refused(tiny, verifier, tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [json.dumps({"prompt": f"{i}+1=", "ground_truth": "1"}) + "\n" for i in range(9)]
    data.write_text("".join(rows))
    overrides = (f"data.train={data}", "training.checkpoint_every=1")
    train_here(tiny, verifier, tmp_path, ctrl_c_at(2), *overrides)
    data.write_text("".join(rows[:7]))
    with refused("changed", "data.train", shows=r"num_items is 7 .* data\.train"):
        train_here(tiny, verifier, tmp_path, Reporter(), *overrides)


@pytest.mark.slow
def test_files_of_a_killed_run_are_repaired(tiny, verifier, tmp_path, complete):
    """What was written after the checkpoint goes; files of other names stay."""
    folder = train_here(tiny, verifier, tmp_path, ctrl_c_at(2)).folder
    with (folder / "metrics.jsonl").open("a") as stream:  # lines after the checkpoint, then a kill
        stream.write('{"step": 3, "time": 1.0, "reward/mean": 0.5}\n{"step": 4, "ti')
    rollouts = folder / "rollouts"
    for name in ("step-000003.parquet", ".step-000009.parquet.partial", "step-mine.parquet"):
        (rollouts / name).write_bytes(b"of a step that was never saved")
    for name in ("validation-000009", "validation-mine"):
        (folder / "eval" / name).mkdir()
        (folder / "eval" / name / "summary.json").touch()
    train_here(tiny, verifier, tmp_path, Reporter())
    assert not (folder / "eval" / "validation-000009").exists(), "of a step that was never saved"
    assert (folder / "eval" / "validation-mine").exists()
    assert metrics_without_timing(folder) == complete
    names = [*(f"step-{number:06d}.parquet" for number in range(1, 5)), "step-mine.parquet"]
    assert sorted(path.name for path in rollouts.iterdir()) == names
    assert pq.read_table(rollouts / "step-000003.parquet").num_rows == 16


@pytest.mark.slow
def test_damaged_line_of_metrics_loses_no_other_line(tiny, verifier, tmp_path, complete):
    notes = []
    reporter = Reporter()
    reporter.note = notes.append
    folder = train_here(tiny, verifier, tmp_path, ctrl_c_at(3)).folder
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 2)
    lines[at] = b"\xff" + lines[at][:20] + b"\n"
    file.write_bytes(b"".join(lines))
    train_here(tiny, verifier, tmp_path, reporter)
    assert metrics_without_timing(folder) == [line for line in complete if line["step"] != 2]
    assert any("metrics.jsonl" in note and "step 2" in note for note in notes)


@pytest.mark.slow
def test_removed_checkpoint_is_written_again(tiny, verifier, tmp_path):
    overrides = ("training.checkpoint_every=1",)
    train_here(tiny, verifier, tmp_path / "complete", Reporter(), *overrides)
    train_here(tiny, verifier, tmp_path / "cut", ctrl_c_at(3), *overrides)
    shutil.rmtree(tmp_path / "cut" / "test" / "checkpoints" / "step-3")
    (tmp_path / "cut" / "test" / "checkpoints" / ".step-3.partial").mkdir()
    train_here(tiny, verifier, tmp_path / "cut", Reporter(), *overrides)
    runs = (tmp_path / "cut" / "test", tmp_path / "complete" / "test")
    assert metrics_without_timing(runs[0]) == metrics_without_timing(runs[1])
    assert checkpoint_names(runs[0]) == checkpoint_names(runs[1]) == {"latest", "step-3", "step-4"}
    final = "test/checkpoints/step-4/policy/model.safetensors"
    assert (tmp_path / "cut" / final).read_bytes() == (tmp_path / "complete" / final).read_bytes()


STOPPED_TWICE = """
import sys, time, types
import postgrad.cli.main as cli
module = types.ModuleType("waits")
def run(arguments):
    print("ready", flush=True)
    time.sleep(60)
module.run = run
sys.modules["postgrad.cli.train"] = module
sys.argv = ["postgrad", "train"]
code = cli.main()
time.sleep(1)
sys.exit(code)
"""


@pytest.mark.slow
def test_sigterm_before_the_first_step_is_one_line_even_with_a_late_ctrl_c():
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED_TWICE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.stderr is not None
    line = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.terminate()
    assert process.wait(60) == 130 and line.startswith(
        "postgrad: stopped; the same command continues"
    )
    assert process.stderr.read() == ""
