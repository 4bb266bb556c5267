"""What the terminal shows: lines, the panel's parts, and a pipe whose reader has gone."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_runs import metrics_of, overrides_of, random_batch

from postgrad.phases import duration, print_line
from postgrad.training import display
from postgrad.training.display import (
    LineReporter,
    NotebookReporter,
    format_metrics,
    in_notebook,
    make_reporter,
    one_line,
    sparkline,
)
from postgrad.types import Batch, Trajectory

SMALL = (
    "training.steps=3",
    "training.problems_per_step=2",
    "rollout.samples=2",
    "rollout.max_response_tokens=4",
    "reward.workers=1",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stderr",
    [
        pytest.param(subprocess.PIPE, id="apart"),
        pytest.param(subprocess.STDOUT, id="same pipe", marks=pytest.mark.nightly),
    ],
)
def test_run_goes_on_when_the_reader_of_its_output_has_gone(tiny, tmp_path, stderr):
    """As in `postgrad train ... | head -1`."""
    arguments = overrides_of(tiny, *SMALL, f"runs={tmp_path}")
    command = [sys.executable, "-m", "postgrad.cli.main", "train", "grpo", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() != ""
    process.stdout.close()
    errors = process.stderr.read() if process.stderr is not None else ""
    assert process.wait(300) == 0 and "Broken" not in errors
    assert [line["step"] for line in metrics_of(tmp_path / "test")] == [1, 2, 3]
    assert (tmp_path / "test" / "checkpoints" / "latest").read_text() == "step-3\n"


@pytest.mark.parametrize("same_pipe", [False, True])
def test_lines_for_a_closed_pipe_are_discarded(monkeypatch, tmp_path, same_pipe):
    reading, writing = os.pipe()
    errors = tmp_path / "errors"
    error_stream = os.fdopen(os.dup(writing), "w") if same_pipe else errors.open("w")
    with os.fdopen(writing, "w") as stream, error_stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", error_stream)
        print_line("before")
        assert os.read(reading, 100) == b"before\n"
        os.close(reading)
        print_line("after")
        print("a plain print", flush=True)
        print("an error", file=sys.stderr, flush=True)
        monkeypatch.undo()
    assert same_pipe or errors.read_text() == "an error\n"


def test_duration_in_hours_minutes_or_seconds():
    assert [duration(s) for s in (0.4, 12, 185, 3720)] == ["0s", "12s", "3m05s", "1h02m"]


def test_sparkline_shows_means_of_equal_shares():
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([0.0, 0.0, 0.5, 0.5, 1.0, 1.0], width=3) == "▁▅█"


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"reward_model/accuracy": 0.625, "reward_model/margin": 0.02}, "preferred 0.625"),
        ({"kto/accuracy": 0.5}, "preferred 0.500"),
    ],
)
def test_methods_without_rewards_show_how_well_they_do(metrics, line):
    assert format_metrics(metrics)[0] == line


def test_one_line_cuts_long_texts():
    assert one_line("a\n b", 9) == "a b"
    assert one_line("abcdef", 4) == "abc…"


def test_stdout_that_is_no_terminal_gets_lines(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Path(os.devnull).open("w"))  # noqa: SIM115
    assert isinstance(make_reporter(), LineReporter)


@pytest.mark.parametrize(
    ("signal", "reward", "shown"), [(0.0, 0.0, True), (0.25, 0.5, False), (0.0, None, False)]
)
def test_a_step_that_trains_nothing_says_so_on_its_line(signal, reward, shown, capsys):
    metrics = {"step": 1.0, "advantages/rows_with_signal": signal, "response/truncated": 0.85}
    if reward is not None:
        metrics["reward/mean"] = reward
    LineReporter().step(metrics, Batch.of([Trajectory("a", [1], [2])]))
    line = capsys.readouterr().out
    assert ("no learning signal: all rewards equal" in line) == shown
    assert "truncated 85%" in line


def test_a_notebook_shows_the_panel_with_the_texts_of_the_model_escaped():
    reporter = NotebookReporter("runs/x")
    reporter.clock.start(0, 10)
    batch = random_batch(0)
    batch.rows["text"] = ["<b>4</b>"] * len(batch)
    batch.rows["question"] = ["2+2="] * len(batch)
    batch.rows["reward"] = batch.rows["group"].float()
    reporter.step({"step": 4, "reward/mean": 0.25, "entropy": 1.5}, batch)
    reporter.validated(4, {"validation/accuracy": 0.5})
    bundle = reporter.panel()._repr_mimebundle_((), ())
    assert "<b>4</b>" not in bundle["text/html"] and "&lt;b&gt;4" in bundle["text/html"]
    for text in ("step 4/10", "reward  0.250", "entropy 1.500", "accuracy 0.500", "2+2="):
        assert text in bundle["text/plain"]


def test_a_notebook_draws_not_too_often_and_a_last_time_at_the_end(monkeypatch):
    monkeypatch.setattr(display, "in_notebook", lambda: True)
    reporter = make_reporter()
    assert isinstance(reporter, NotebookReporter)
    shown = []
    reporter.handle = SimpleNamespace(update=shown.append)
    for _ in range(50):
        reporter.saved(Path("step-1"))
    assert len(shown) == 1
    reporter.stopped()
    assert len(shown) == 2


@pytest.mark.parametrize("shell, expected", [(object(), False), (None, False)])
def test_a_terminal_is_no_notebook(monkeypatch, shell, expected):
    module = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(display.sys.modules, "IPython", module)
    assert in_notebook() is expected
