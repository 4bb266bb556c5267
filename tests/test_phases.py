"""What a person who waits reads: phases, counts and notes."""

import io

import pytest
from rich.console import Console

from postgrad import phases
from postgrad.training.display import PanelReporter


def test_each_phase_is_one_line_and_counts_come_at_intervals(capsys, monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(phases.time, "monotonic", lambda: clock[0])
    lines = phases.PhaseLines(every_s=10.0)
    with phases.shown_by(lines.show):
        phases.begin("reading problems.jsonl")
        for done in range(1, 129):
            clock[0] += 0.25
            phases.count(done, 128)
        phases.begin("loading the model")
    phases.begin("nobody watches")
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "reading problems.jsonl",
        "reading problems.jsonl 40/128",
        "reading problems.jsonl 80/128",
        "reading problems.jsonl 120/128",
        "loading the model",
    ]


def test_within_a_step_only_long_phases_get_a_line(capsys, monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(phases.time, "monotonic", lambda: clock[0])
    lines = phases.PhaseLines(every_s=10.0)
    lines.is_patient = True
    with phases.shown_by(lines.show):
        for _ in range(20):
            phases.begin("sampling")
            clock[0] += 1.0
            phases.count(8, 8)
            phases.begin("updating")
        phases.begin("sampling")
        clock[0] += 11.0
        phases.count(40, 128)
    assert capsys.readouterr().out.splitlines() == ["sampling 40/128"]


@pytest.fixture
def panel(monkeypatch) -> PanelReporter:
    reporter = PanelReporter("run")
    reporter.live.console = Console(file=io.StringIO(), force_terminal=True, width=100)
    return reporter


def test_notes_stay_above_the_panel(panel) -> None:
    panel.is_shown = True
    panel.show()
    panel.note("too long: 739 of 7473 left out")
    panel.note("[bold] is no markup")
    panel.phase("sampling", 40, 128)
    panel.stopped()
    text = panel.live.console.file.getvalue()
    assert "too long: 739 of 7473 left out" in text and "[bold] is no markup" in text
    assert "sampling 40/128" not in text.rsplit("step 0", 1)[-1]  # the run has ended
