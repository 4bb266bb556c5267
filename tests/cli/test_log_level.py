"""Log levels: what is printed at quiet, normal and debug."""

import pytest
from refused import refused
from tiny_runs import config_of

from postgrad.cli.main import run
from postgrad.log_level import VARIABLE, log_level
from postgrad.training.display import make_reporter
from postgrad.training.driver import train

SMALL = (
    "data.train=arithmetic:1",
    "training.steps=1",
    "training.problems_per_step=2",
    "rollout.samples=2",
    "rollout.max_response_tokens=2",
)


@pytest.fixture(autouse=True)
def no_level(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")


@pytest.mark.parametrize(
    ("level", "shown", "hidden"),
    [
        ("quiet", [], ["step 1/1", "starting", "seconds:", "saved"]),
        ("normal", ["starting", "step 1/1"], ["seconds:", "saved"]),
        ("debug", ["starting", "step 1/1", "seconds: ", "sample ", "saved"], []),
    ],
)
def test_output_of_a_run(level, shown, hidden, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, level)
    train(config_of("grpo", tiny, *SMALL, f"runs={tmp_path}", "name=run"), make_reporter())
    output = capsys.readouterr().out
    assert all(text in output for text in shown), output
    assert not any(text in output for text in hidden), output


def test_notes_are_printed_at_every_level(monkeypatch, capsys):
    for level in ("quiet", "normal", "debug"):
        monkeypatch.setenv(VARIABLE, level)
        make_reporter().note("warning: odd")
        assert capsys.readouterr().out == "warning: odd\n"


def test_options_before_and_after_the_command(capsys):
    assert run(["--debug", "train", "grpo", "model.pth=x"]) == 2
    error = capsys.readouterr().err
    assert log_level() == "debug"
    assert error.startswith("Traceback")
    assert "postgrad: " in error.splitlines()[-1]
    assert run(["train", "grpo", "model.pth=x", "--quiet"]) == 2
    assert log_level() == "quiet"
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "debgu")
    with refused("unknown_name", "POSTGRAD_LOG"):
        log_level()
    assert run(["recipes"]) == 2
