"""events.jsonl: how a run started, resumed and ended."""

import json

import pytest
from tiny_runs import CallAtStep, config_of, ctrl_c_at, toy_run, tree

from postgrad.errors import RunError
from postgrad.training.driver import train
from postgrad.training.report import Reporter

SMALL = toy_run(steps=3, problems=2, samples=2)
KEEP = ("training.checkpoint_every=1", "training.max_flat_steps=9")


def run(tiny, tmp_path, reporter: Reporter):
    return train(config_of("grpo", tiny, *SMALL, *KEEP, f"runs={tmp_path}"), reporter)


def events(tmp_path) -> list[tuple[str, int, str]]:
    lines = (tmp_path / "test" / "events.jsonl").read_text().splitlines()
    return [(line["event"], line["step"], line["text"]) for line in map(json.loads, lines)]


@pytest.mark.slow
def test_stop_resume_and_end_are_events_and_a_finished_run_stays_as_it_is(tiny, tmp_path):
    assert run(tiny, tmp_path, ctrl_c_at(2)).interrupted
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
    before = tree(tmp_path)
    assert run(tiny, tmp_path, Reporter()).step == 3
    assert tree(tmp_path) == before, "the command of a finished run changes nothing"


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


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RunError("step 2, stage score: nobody answers"), "step 2, stage score: nobody answers"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    ],
)
def test_an_error_is_a_failed_event_and_an_unexpected_one_has_its_type(error, text, tiny, tmp_path):
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        run(tiny, tmp_path, CallAtStep(2, fail))
    event, step, shown = events(tmp_path)[-1]
    assert (event, step, shown[: len(text)]) == ("failed", 2, text)
    assert shown == text or isinstance(error, ZeroDivisionError)
