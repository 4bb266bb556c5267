"""training.profile_steps: what it writes, and that it does not change the run."""

import gzip
import json

import pytest
from tiny_runs import NoteReporter, config_of, metrics_without_timing, toy_run

from postgrad.training.driver import train

SMALL = toy_run(steps=3, response_tokens=3)


@pytest.mark.slow
def test_profiled_step_writes_a_table_and_a_trace_and_computes_the_same(tiny, tmp_path):
    lines = {}
    for steps in ("[]", "[2]"):
        reporter = NoteReporter()
        config = config_of(
            "grpo",
            tiny,
            *SMALL,
            f"training.profile_steps={steps}",
            f"runs={tmp_path / str(len(steps))}",
        )
        folder = train(config, reporter).folder
        lines[steps] = metrics_without_timing(folder)
        assert (folder / "profile").exists() == bool(reporter.notes) == (steps == "[2]")
    assert lines["[]"] == lines["[2]"]
    assert {p.name for p in (folder / "profile").iterdir()} == {"step-2.txt", "step-2.json.gz"}
    table = (folder / "profile" / "step-2.txt").read_text()
    assert "aten::mm" in table and "Self CPU time total" in table
    with gzip.open(folder / "profile" / "step-2.json.gz") as file:
        names = [
            event["name"]
            for event in json.load(file)["traceEvents"]
            if event.get("cat") == "user_annotation"
        ]
    for stage in ("sample", "score", "estimate", "update"):
        assert names.count(stage) == 1


def test_profile_that_cannot_be_written_does_not_end_the_run(tiny, tmp_path):
    reporter = NoteReporter()
    config = config_of("grpo", tiny, *SMALL, "training.profile_steps=[1]", f"runs={tmp_path}")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "profile").write_text("in the way")
    assert train(config, reporter).step == 3
    assert any("the profile of step 1 could not be written" in text for text in reporter.notes)
