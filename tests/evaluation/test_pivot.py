"""`postgrad eval table`: many evaluations as a table, as CSV and as bars."""

import csv
import io
import json

import pytest

from postgrad.cli.main import main
from postgrad.evaluation.pivot import draw_bars
from postgrad.results.metrics import summarize


def write_evaluation(folder, model, rights):
    rows = [
        {
            "uid": str(i // 2),
            "data_source": "d",
            "right": right,
            "score": float(right),
            "parts": {"format": 1.0},
            "failure": None,
            "can_vote": False,
            "answer": None,
            "finish": "stop",
            "length": 3,
        }
        for i, right in enumerate(rights)
    ]
    folder.mkdir(parents=True)
    summary = {"model": model, "settings": {}, "sets": {"math": summarize(rows)}}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def evaluations(tmp_path):
    write_evaluation(tmp_path / "e" / "a", "one", [True, False, False, False])
    write_evaluation(tmp_path / "e" / "b", "two", [True, True, True, False])
    return tmp_path / "e"


def test_table_has_a_row_per_model(evaluations, capsys):
    assert main(["eval", "table", str(evaluations)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["model", "math"], ["one", "25.0%"], ["two", "75.0%"]]
    assert main(["eval", "table", str(evaluations), "metric=best"]) == 0
    assert "50.0%" in capsys.readouterr().out and main(["eval", "table", "/nowhere"]) == 2


def test_two_evaluations_of_one_model_and_set_keep_their_rows(evaluations, capsys):
    write_evaluation(evaluations / "c", "one", [True, True, True, True])
    assert main(["eval", "table", str(evaluations)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[-1] for line in lines] == ["25.0%", "75.0%", "100.0%"]
    assert f"one ({evaluations}/a)" in lines[0] and f"one ({evaluations}/c)" in lines[2]


def test_bars_have_the_heights_of_the_table(evaluations, monkeypatch, tmp_path):
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    draw_bars({"one": {"a": 0.25, "b": None}, "two": {"a": 0.75}}, "avg", tmp_path / "b.svg")
    axes = figures[0].axes[0]
    assert [bar.get_height() for bar in axes.patches] == [0.25, 0.0, 0.75, 0.0]
    assert [text.get_text() for text in axes.texts] == ["25.0%", "-", "75.0%", "-"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two"]


def test_files(evaluations, tmp_path):
    for name in ("t.md", "t.csv", "t.png"):
        assert main(["eval", "table", str(evaluations), f"out={tmp_path / name}"]) == 0
    rows = list(csv.reader(io.StringIO((tmp_path / "t.csv").read_text())))
    assert rows == [["model", "math"], ["one", "0.25"], ["two", "0.75"]]
    for wrong in (f"out={tmp_path / 't.gif'}", "metric=bst"):
        assert main(["eval", "table", str(evaluations), wrong]) == 2
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "summary.json").write_text('{"model": "m", "sets": {}}')
    assert main(["eval", "table", str(tmp_path / "empty")]) == 2
    assert "| one | 25.0% |" in (tmp_path / "t.md").read_text()
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["eval", "table", str(evaluations), f"out={tmp_path / 't.doc'}"]) == 2
