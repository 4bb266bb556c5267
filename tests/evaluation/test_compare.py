"""Paired comparison of two evaluations: hand-computed cases and refused input."""

import json

import numpy as np
import pytest
from jsonl import write_jsonl
from refused import refused

from postgrad.cli.main import main
from postgrad.evaluation.compare import bootstrap_interval, compare_set, sign_test


def values(digits: str) -> dict[str, list[bool]]:
    """Returns one sample per problem, right where the digit is 1."""
    return {f"p{i}": [digit == "1"] for i, digit in enumerate(digits)}


def test_counts_and_difference():
    result = compare_set(values("1100110011"), values("1110000000"))
    assert (result["a"], result["b"]) == (0.6, 0.3)
    assert (result["a_right_b_wrong"], result["b_right_a_wrong"]) == (4, 1)
    gap = result["difference"]
    assert gap["value"] == pytest.approx(-0.3) and gap["low"] < -0.3 < gap["high"]
    assert result["sign_test"] == pytest.approx(2 * (1 + 5) / 32)


def test_equal_results_have_no_difference():
    result = compare_set(values("1010"), values("1010"))
    assert result["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert result["sign_test"] == 1.0


@pytest.mark.parametrize(
    ("num_a", "num_b", "p"), [(0, 0, 1.0), (5, 5, 1.0), (6, 0, 2 / 64), (1, 9, 22 / 1024)]
)
def test_sign_test_is_exact(num_a, num_b, p):
    assert sign_test(num_a, num_b) == pytest.approx(p)


@pytest.mark.slow
def test_bootstrap_interval_is_near_the_normal_interval():
    """With many problems it is the mean ± 1.96 standard errors; every call gives the same."""
    differences = np.random.default_rng(1).choice([-1.0, 0.0, 1.0], 1500, p=[0.1, 0.6, 0.3])
    low, high = bootstrap_interval(differences)
    error = 1.96 * differences.std() / np.sqrt(len(differences))
    assert low == pytest.approx(differences.mean() - error, abs=0.003)
    assert high == pytest.approx(differences.mean() + error, abs=0.003)
    assert (low, high) == bootstrap_interval(differences)


def test_only_shared_problems_are_compared():
    result = compare_set({**values("10"), "only": [True]}, values("11"))
    assert result["problems"] == 2
    assert (result["only_a"], result["only_b"]) == (1, 0)
    assert result["b_right_a_wrong"] == 1
    with refused("conflict", "set"):
        compare_set({"x": [True]}, {"y": [True]})


def write_folder(path, temperature: float, **sets: list[bool]):
    path.mkdir()
    settings = {
        "model": {"path": path.name, "dtype": "float32"},
        "rollout": {"temperature": temperature},
    }
    (path / "settings.json").write_text(json.dumps(settings))
    for name, rights in sets.items():
        rows = [{"uid": f"p{i}", "right": right} for i, right in enumerate(rights)]
        write_jsonl(path / f"{name}.jsonl", *rows)
    return path


def test_compare_command(tmp_path, capsys):
    a = write_folder(tmp_path / "a", 0.0, gsm=[True, False, False], arc=[True])
    b = write_folder(tmp_path / "b", 1.0, gsm=[True, True, True], other=[True])
    assert main(["eval", "compare", str(a), str(b), f"out={tmp_path}/c.json"]) == 0
    shown = capsys.readouterr().out
    assert "+66.7 [+0.0, +100.0]" in shown
    assert "paired bootstrap" in shown
    assert "rollout.temperature" in shown.partition("+66.7")[0]  # before the figures
    assert "arc" not in shown
    assert json.loads((tmp_path / "c.json").read_text())["sets"]["gsm"]["b_right_a_wrong"] == 2


def test_another_ground_truth_of_a_problem_is_refused(tmp_path, capsys):
    for name, truth in (("a", "4"), ("b", "5")):
        folder = write_folder(tmp_path / name, 0.0)
        row = {"uid": "p0", "right": True, "ground_truth": truth}
        write_jsonl(folder / "x.jsonl", row)
    assert main(["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "problem p0" in line and "'4'" in line and "'5'" in line


@pytest.mark.parametrize("content", [b"", b"[1]", b"3", b"\xff", b"[" * 5000])
def test_damaged_settings_give_one_line(content, tmp_path, capsys):
    a = write_folder(tmp_path / "a", 0.0, x=[True])
    b = write_folder(tmp_path / "b", 0.0, x=[True])
    (b / "settings.json").write_bytes(content)
    assert main(["eval", "compare", str(a), str(b)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(b / "settings.json") in line


def test_a_folder_without_an_evaluation_is_told_what_writes_one(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    assert main(["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"out={tmp_path / 'a'}" in line
