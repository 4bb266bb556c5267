"""events.jsonl: how a run started, resumed and ended."""

import json
import signal

import pytest
from tiny_runs import config_of, toy_run

from postgrad.errors import RunError
from postgrad.training.driver import train
from postgrad.training.report import Reporter

SMALL = toy_run(steps=3, problems=2, samples=2)
KEEP = ("training.checkpoint_every=1", "training.max_flat_steps=9")


class CallAtStep(Reporter):
    """Calls a function when a step is reported."""

    def __init__(self, number: int, function) -> None:
        self.number = number
        self.function = function

    def step(self, metrics, batch) -> None:
        if metrics["step"] == self.number:
            self.function()


def run(tiny, tmp_path, reporter: Reporter):
    return train(config_of("grpo", tiny, *SMALL, *KEEP, f"runs={tmp_path}"), reporter)


def events(tmp_path) -> list[tuple[str, int, str]]:
    lines = (tmp_path / "test" / "events.jsonl").read_text().splitlines()
    return [(line["event"], line["step"], line["text"]) for line in map(json.loads, lines)]


@pytest.mark.slow
def test_stop_resume_and_end_are_events_and_a_finished_run_adds_none(tiny, tmp_path):
    assert run(
        tiny, tmp_path, CallAtStep(2, lambda: signal.raise_signal(signal.SIGINT))
    ).interrupted
    assert [e[:2] for e in events(tmp_path)] == [
        ("started", 0),
        ("checkpoint", 1),
        ("note", 2),
        ("checkpoint", 2),
        ("stopped", 2),
    ]
    run(tiny, tmp_path, Reporter())
    assert [e[:2] for e in events(tmp_path)[5:]] == [
        ("resumed", 2),
        ("checkpoint", 3),
        ("finished", 3),
    ]
    before = events(tmp_path)
    run(tiny, tmp_path, Reporter())
    assert events(tmp_path) == before


@pytest.mark.slow
def test_missing_finished_event_is_added_by_the_next_command(tiny, tmp_path):
    run(tiny, tmp_path, Reporter())
    file = tmp_path / "test" / "events.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1])[:-9])  # a full disk cut the previous line too
    run(tiny, tmp_path, Reporter())
    text = file.read_text().splitlines()
    assert text[: len(lines) - 2] == [line.decode().rstrip() for line in lines[:-2]]
    assert [json.loads(line)["event"] for line in text[len(lines) - 1 :]] == ["resumed", "finished"]


def test_run_error_is_a_failed_event(tiny, tmp_path):
    def fail():
        raise RunError("step 2, stage score: nobody answers")

    with pytest.raises(RunError):
        run(tiny, tmp_path, CallAtStep(2, fail))
    assert events(tmp_path)[-1] == ("failed", 2, "step 2, stage score: nobody answers")


def test_unexpected_error_is_a_failed_event_with_its_type(tiny, tmp_path):
    def fail():
        raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError):
        run(tiny, tmp_path, CallAtStep(1, fail))
    assert events(tmp_path)[-1][2].startswith("ZeroDivisionError: by zero")
