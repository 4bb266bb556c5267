"""A run that is killed, interrupted or stopped goes on bit for bit: real processes, real signals, every file compared.

Processes are forked from a server that has torch loaded already, so that a start costs a fraction of a second; the reference
runs by the plain command in a fresh interpreter.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from world import config_of, metrics_of, overrides_of, postgrad, run_words, toy_run, tree

from postgrad.training.driver import train
from postgrad.training.log import is_timing
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
    # The pause lets the tests see a step before the next ones are over, on a busy machine too.
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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "world",
            "postgrad.training.driver",
            "postgrad.cluster.host",
            "postgrad.cli.train",
            "hydra",
            "transformers.models.qwen3",
        ]
    )
    return context


@pytest.fixture(scope="module")
def reference(overrides, tmp_path_factory) -> Path:
    """The run that nobody touched."""
    runs = tmp_path_factory.mktemp("reference")
    done = postgrad(*overrides(runs))
    assert done.returncode == 0, done.stderr
    steps = [line for line in metrics_of(runs / "test") if "reward/mean" in line]
    assert len(steps) == STEPS and all(line["grad_norm"] > 0 for line in steps), (
        "every step must move the weights"
    )
    return runs / "test"


class Run:
    """One process of the command."""

    def __init__(self, server, overrides, runs: Path, slow_sync: bool = False) -> None:
        self.runs, self.folder, self.output = runs, runs / "test", runs / "output.txt"
        self.process = server.Process(
            target=run_words, args=(overrides(runs), str(self.output), slow_sync)
        )
        self.process.start()

    def steps(self) -> int:
        """Highest step in metrics.jsonl, -1 when there is none yet."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return -1
        return (
            int(lines[-1].split('"step": ')[1].split(",")[0])
            if lines and lines[-1].endswith("}")
            else -1
        )

    def when(self, condition) -> bool:
        """Wait, in a tight loop, until the condition holds; False when the process ended first."""
        limit = time.monotonic() + 60
        while self.process.is_alive():
            if condition():
                return True
            assert time.monotonic() < limit, "the run hangs"
        return condition()

    def kill(self) -> None:
        """As kill -9 of the whole group: nobody cleans up."""
        for kill in (lambda: os.killpg(self.process.pid, signal.SIGKILL), self.process.kill):
            try:
                kill()
            except ProcessLookupError:
                continue
        self.process.join(60)

    def interrupt(self, number=signal.SIGINT) -> None:
        os.killpg(self.process.pid, number)  # a terminal signals the whole group

    def exit_code(self) -> int:
        self.process.join(60)
        assert self.process.exitcode is not None
        return self.process.exitcode


def listed(folder: Path) -> set[str]:
    """What lies under checkpoints/, hidden names too."""
    try:
        return {entry.name for entry in os.scandir(folder / "checkpoints")}
    except OSError:
        return set()


def assert_same_run(folder: Path, reference: Path) -> None:
    for name in ("policy/model.safetensors", "optimizer.safetensors", "state.json", "method.bin"):
        file = f"checkpoints/step-{STEPS}/{name}"
        assert (folder / file).read_bytes() == (reference / file).read_bytes(), file
    assert steady(folder) == steady(reference)
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


def steady(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if not is_timing(k)} for line in metrics_of(folder)]


def finish(server, overrides, runs: Path, reference: Path) -> None:
    run = Run(server, overrides, runs)
    assert run.exit_code() == 0, run.output.read_text()
    assert_same_run(runs / "test", reference)


@pytest.mark.slow
def test_kill_9_at_any_moment(server, overrides, reference, tmp_path):
    """Right after the start, in the middle of steps, while a checkpoint is being written: the end is the same to the bit."""
    for seconds in (0.0, 0.3):  # while it imports and loads
        run = Run(server, overrides, tmp_path)
        time.sleep(seconds)
        run.kill()
    for step in (0, 1, 3, 6):  # 0: after the first validation, before any checkpoint
        run = Run(server, overrides, tmp_path)
        assert run.when(lambda run=run, step=step: run.steps() >= step), run.output.read_text()
        run.kill()
        assert run.steps() < STEPS, "killed too late to show anything"
    finish(server, overrides, tmp_path, reference)


@pytest.mark.slow
def test_kill_9_with_adapters(server, overrides, tmp_path):
    """The adapter's own file is what a run with LoRA goes on from: merged weights would have lost its last bits."""
    adapted = lambda runs: [*overrides(runs), "model.lora.rank=4", "optimizer.lr=1e-2"]  # noqa: E731
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = Run(server, adapted, tmp_path / "whole")
    assert whole.exit_code() == 0, whole.output.read_text()
    for step in (1, 5):
        run = Run(server, adapted, tmp_path / "cut")
        assert run.when(lambda run=run, step=step: run.steps() >= step), run.output.read_text()
        run.kill()
        assert run.steps() < STEPS, "killed too late to show anything"
    finish(server, adapted, tmp_path / "cut", whole.folder)
    for name in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        file = f"checkpoints/step-{STEPS}/{name}"
        assert (run.folder / file).read_bytes() == (whole.folder / file).read_bytes()


@pytest.mark.slow
def test_kill_9_while_a_checkpoint_is_written(server, overrides, reference, tmp_path):
    """While the first of all is written aside, while a later one is, and between its renaming and the move of `latest`."""
    for names in ({".step-2.partial"}, {".step-6.partial"}, {"step-8", ".latest.partial"}):
        for _ in range(8):
            run = Run(server, overrides, tmp_path, slow_sync=True)
            assert run.when(lambda run=run, names=names: names <= listed(run.folder)), (
                f"{names} was never seen: {run.output.read_text()}"
            )
            run.kill()
            if names <= listed(run.folder):
                break
        assert names <= listed(run.folder), f"no kill fell into the time of {names}"
    latest = (tmp_path / "test" / "checkpoints" / "latest").read_text().strip()
    newest = max(
        int(name.removeprefix("step-"))
        for name in listed(tmp_path / "test")
        if name.startswith("step-")
    )
    assert latest == f"step-{newest - 2}", "the newest is there, but not yet the latest"
    finish(server, overrides, tmp_path, reference)
    assert not [name for name in listed(tmp_path / "test") if name.startswith(".")], (
        "what the kills left half-written is gone"
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_says_how_to_go_on_and_the_same_command_continues(
    server, overrides, reference, tmp_path, number
):
    run = Run(server, overrides, tmp_path)
    assert run.when(lambda: run.steps() >= 4), run.output.read_text()
    run.interrupt(number)
    assert run.exit_code() == 130, run.output.read_text()
    step = run.steps()
    text = run.output.read_text()
    assert 4 <= step < STEPS
    assert f"saved at step {step} of {STEPS}" in text and "the same command continues" in text
    assert (run.folder / "checkpoints" / "latest").read_text().strip() == f"step-{step}"
    finish(server, overrides, tmp_path, reference)
    assert f"continuing at step {step}" in run.output.read_text()


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_and_loses_nothing_saved(
    server, overrides, reference, tmp_path
):
    run = Run(server, overrides, tmp_path)
    assert run.when(lambda: run.steps() >= 5)
    run.interrupt()
    run.interrupt()
    assert run.exit_code() == 130
    assert "continues" in run.output.read_text() and "Traceback" not in run.output.read_text()
    finish(server, overrides, tmp_path, reference)


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_is_no_traceback(server, overrides, tmp_path):
    run = Run(server, overrides, tmp_path)
    assert run.when(lambda: run.output.exists())
    time.sleep(0.1)
    for _ in range(
        40
    ):  # while modules load, Python drops a signal that falls into a destructor: people press again
        with contextlib.suppress(ProcessLookupError):
            run.interrupt()
        run.process.join(0.5)
        if not run.process.is_alive():
            break
    assert run.exit_code() == 130 and "Traceback" not in run.output.read_text()


@pytest.mark.slow
def test_the_command_of_a_finished_run_changes_nothing_and_says_so(
    server, overrides, reference, tmp_path
):
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
        before.pop(name, None), after.pop(name)
    assert after == before


class Presses(Reporter):
    """Presses Ctrl-C while a given step runs."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, metrics, batch) -> None:
        if metrics["step"] == self.at:
            signal.raise_signal(signal.SIGINT)


def in_process(tiny, verifier, runs, reporter, *overrides):
    return train(
        config_of(
            "grpo",
            tiny,
            *SMALL,
            f"reward.verifier={verifier}:odd",
            f"runs={runs}",
            "training.steps=4",
            *overrides,
        ),
        reporter,
    )


@pytest.mark.parametrize("step", [1, 3, 4])
def test_ctrl_c_in_any_step_changes_no_metric_even_in_the_last(tiny, verifier, tmp_path, step):
    """Step 3 is validated, step 4 is the last: the validations must be there in the end, once."""
    in_process(tiny, verifier, tmp_path / "whole", Reporter())
    first = in_process(tiny, verifier, tmp_path / "cut", Presses(step))
    assert first.interrupted and first.step == step
    second = in_process(tiny, verifier, tmp_path / "cut", Reporter())
    assert not second.interrupted and second.step == 4
    assert steady(tmp_path / "cut" / "test") == steady(tmp_path / "whole" / "test")


def test_a_run_that_reached_its_goal_stays_finished(tiny, verifier, tmp_path):
    """The goal is reached after a few steps; the same command must not train on."""
    overrides = (
        "training.stop_at=0.2",
        "training.validate_every=1",
        "training.steps=30",
        "training.checkpoint_every=30",
    )
    first = in_process(tiny, verifier, tmp_path, Reporter(), *overrides)
    assert first.reached and 0 < first.step < 30
    before = tree(tmp_path)
    second = in_process(tiny, verifier, tmp_path, Reporter(), *overrides)
    assert second.step == first.step and tree(tmp_path) == before


def test_resuming_from_a_checkpoint_of_other_data_is_refused(tiny, verifier, tmp_path):
    from postgrad.errors import ConfigError

    data = tmp_path / "data.jsonl"
    rows = [
        json.dumps(
            {
                "prompt": [{"role": "user", "content": f"{i}+1="}],
                "data_source": "x",
                "reward_model": {"ground_truth": "1"},
            }
        )
        + "\n"
        for i in range(9)
    ]
    data.write_text("".join(rows))
    overrides = (f"data.train={data}", "training.checkpoint_every=1")
    in_process(tiny, verifier, tmp_path, Presses(2), *overrides)
    data.write_text("".join(rows[:7]))
    with pytest.raises(ConfigError, match=r"num_items is 7 .* data\.train"):
        in_process(tiny, verifier, tmp_path, Reporter(), *overrides)


def test_metrics_cut_short_by_a_kill_are_mended(tiny, verifier, tmp_path):
    in_process(tiny, verifier, tmp_path / "whole", Reporter())
    in_process(tiny, verifier, tmp_path / "cut", Presses(2))
    file = tmp_path / "cut" / "test" / "metrics.jsonl"
    with file.open("a") as out:
        out.write(
            '{"step": 3, "time": 1.0, "reward/mean": 0.5}\n{"step": 4, "ti'
        )  # written after the checkpoint, then killed
    (tmp_path / "cut" / "test" / "rollouts" / "step-000003.parquet").write_bytes(
        b"of a step that was never saved"
    )
    in_process(tiny, verifier, tmp_path / "cut", Reporter())
    assert steady(tmp_path / "cut" / "test") == steady(tmp_path / "whole" / "test")
    assert (
        pq.read_table(tmp_path / "cut" / "test" / "rollouts" / "step-000003.parquet").num_rows == 16
    )


def test_a_damaged_line_of_metrics_costs_no_other_line(tiny, verifier, tmp_path):
    notes, reporter = [], Reporter()
    reporter.note = notes.append
    in_process(tiny, verifier, tmp_path / "whole", Reporter())
    in_process(tiny, verifier, tmp_path / "cut", Presses(3))
    file = tmp_path / "cut" / "test" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 2)
    lines[at] = b"\xff" + lines[at][:20] + b"\n"
    file.write_bytes(b"".join(lines))
    (tmp_path / "cut" / "test" / "rollouts" / ".step-000009.parquet.partial").write_bytes(b"half")
    (tmp_path / "cut" / "test" / "rollouts" / "step-mine.parquet").write_bytes(b"not ours")
    in_process(tiny, verifier, tmp_path / "cut", reporter)
    whole = [line for line in steady(tmp_path / "whole" / "test") if line["step"] != 2]
    assert steady(tmp_path / "cut" / "test") == whole
    assert "metrics.jsonl lacks 1 of the 3 steps so far, the first of them 2" in notes
    assert {p.name for p in (tmp_path / "cut" / "test" / "rollouts").iterdir()} == {
        *(f"step-{n:06d}.parquet" for n in range(1, 5)),
        "step-mine.parquet",
    }


def test_a_checkpoint_that_was_removed_is_made_again(tiny, verifier, tmp_path):
    overrides = ("training.checkpoint_every=1",)
    in_process(tiny, verifier, tmp_path / "whole", Reporter(), *overrides)
    in_process(tiny, verifier, tmp_path / "cut", Presses(3), *overrides)
    shutil.rmtree(tmp_path / "cut" / "test" / "checkpoints" / "step-3")
    (tmp_path / "cut" / "test" / "checkpoints" / ".step-3.partial").mkdir()
    in_process(tiny, verifier, tmp_path / "cut", Reporter(), *overrides)
    assert steady(tmp_path / "cut" / "test") == steady(tmp_path / "whole" / "test")
    assert (
        listed(tmp_path / "cut" / "test")
        == listed(tmp_path / "whole" / "test")
        == {"latest", "step-3", "step-4"}
    )
    final = "test/checkpoints/step-4/policy/model.safetensors"
    assert (tmp_path / "cut" / final).read_bytes() == (tmp_path / "whole" / final).read_bytes()


STOPPED_TWICE = """
import sys, time, types
import postgrad.cli.main as cli
module = types.ModuleType("waits")
def run(words):
    print("ready", flush=True)
    time.sleep(60)
module.run = run
sys.modules["waits"] = module
cli.COMMANDS["train"] = ("waits", "")
sys.argv = ["postgrad", "train"]
code = cli.main()
time.sleep(1)
sys.exit(code)
"""


def test_sigterm_before_the_first_step_is_one_line_and_a_late_ctrl_c_adds_none():
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
