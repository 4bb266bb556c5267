"""The panel of a notebook: what it shows, and that text of the model is escaped."""

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import random_batch

from postgrad.training import notebook
from postgrad.training.display import make_reporter
from postgrad.training.notebook import NotebookReporter, curve_svg


def test_html_and_plain_text_show_progress_metrics_validation_and_escaped_samples():
    panel = NotebookReporter("runs/x")
    panel.progress.start(0, 10)
    batch = random_batch(0)
    batch.rows["text"] = ["<b>4</b>"] * len(batch)
    batch.rows["question"] = ["2+2="] * len(batch)
    batch.rows["reward"] = batch.rows["group"].float()
    panel.step({"step": 4, "reward/mean": 0.25, "entropy": 1.5}, batch)
    panel.validated(4, {"validation/accuracy": 0.5})
    bundle = panel._repr_mimebundle_()
    assert "<b>4</b>" not in bundle["text/html"] and "&lt;b&gt;4" in bundle["text/html"]
    assert "width:40.0%" in bundle["text/html"] and "<polyline" in bundle["text/html"]
    for text in ("step 4/10", "reward 0.250", "entropy 1.500", "accuracy 0.500", "2+2="):
        assert text in bundle["text/plain"]


def test_a_curve_is_scaled_to_its_range_and_thinned_out():
    assert 'points="0.0,78.0 480.0,2.0"' in curve_svg([1.0, 3.0])
    assert curve_svg([float(i) for i in range(1000)]).count(",") <= notebook.MAX_POINTS


def test_a_notebook_gets_the_panel_and_updates_are_not_too_frequent(monkeypatch: Any):
    monkeypatch.setattr("postgrad.training.display.in_notebook", lambda: True)
    panel = make_reporter()
    assert isinstance(panel, NotebookReporter)
    shown: list[Any] = []
    panel.handle = type("Handle", (), {"update": lambda _, one: shown.append(one)})()
    for _ in range(50):
        panel.saved(Path("step-1"))
    assert len(shown) == 1
    panel.stopped()
    assert len(shown) == 2


@pytest.mark.parametrize("shell, expected", [(object(), False), (None, False)])
def test_a_terminal_is_no_notebook(monkeypatch: Any, shell: Any, expected: bool):
    module = type("IPython", (), {"get_ipython": staticmethod(lambda: shell)})
    monkeypatch.setitem(notebook.sys.modules, "IPython", module)
    assert notebook.in_notebook() is expected
