"""The paired comparison: intervals and tests against cases worked out by hand, and what it refuses."""

import json

import numpy as np
import pytest

from postgrad.cli.main import main
from postgrad.errors import ConfigError
from postgrad.evaluation.compare import bootstrap_interval, compare_set, sign_test


def sides(a: str, b: str) -> tuple[dict, dict]:
    return tuple({f"p{i}": [c == "1"] for i, c in enumerate(side)} for side in (a, b))


def test_counts_and_difference():
    result = compare_set(*sides("1100110011", "1110000000"))
    assert (result["a"], result["b"]) == (0.6, 0.3)
    assert (result["a_right_b_wrong"], result["b_right_a_wrong"]) == (4, 1)
    gap = result["difference"]
    assert gap["value"] == pytest.approx(-0.3) and gap["low"] < -0.3 < gap["high"]
    assert result["sign_test"] == pytest.approx(2 * (1 + 5) / 32)


def test_the_same_result_twice_has_no_difference():
    result = compare_set(*sides("1010", "1010"))
    assert (
        result["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
        and result["sign_test"] == 1.0
    )


@pytest.mark.parametrize(
    ("ahead", "behind", "p"), [(0, 0, 1.0), (5, 5, 1.0), (6, 0, 2 / 64), (1, 9, 22 / 1024)]
)
def test_the_sign_test_is_exact(ahead, behind, p):
    assert sign_test(ahead, behind) == pytest.approx(p)


def test_the_bootstrap_is_near_the_closed_form():
    """Many problems: the mean plus and minus 1.96 standard errors, and the same in every call."""
    values = np.random.default_rng(1).choice([-1.0, 0.0, 1.0], 1500, p=[0.1, 0.6, 0.3])
    low, high = bootstrap_interval(values)
    error = 1.96 * values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - error, abs=0.003) and high == pytest.approx(
        values.mean() + error, abs=0.003
    )
    assert (low, high) == bootstrap_interval(values)


def test_only_shared_problems_are_paired():
    a, b = sides("10", "11")
    result = compare_set({**a, "only": [True]}, b)
    assert (result["problems"], result["only_a"], result["only_b"], result["b_right_a_wrong"]) == (
        2,
        1,
        0,
        1,
    )
    with pytest.raises(ConfigError, match="no problem in common"):
        compare_set({"x": [True]}, {"y": [True]})


def folder(path, temperature: float, **sets: list[bool]):
    path.mkdir()
    (path / "settings.json").write_text(
        json.dumps(
            {
                "model": {"path": path.name, "dtype": "float32"},
                "rollout": {"temperature": temperature},
            }
        )
    )
    for name, rights in sets.items():
        lines = [
            json.dumps({"uid": f"p{i}", "right": right}) + "\n" for i, right in enumerate(rights)
        ]
        (path / f"{name}.jsonl").write_text("".join(lines))
    return path


def test_the_command(tmp_path, capsys):
    a = folder(tmp_path / "a", 0.0, gsm=[True, False, False], arc=[True])
    b = folder(tmp_path / "b", 1.0, gsm=[True, True, True], other=[True])
    assert main(["eval", "compare", str(a), str(b), f"out={tmp_path}/c.json"]) == 0
    shown = capsys.readouterr().out
    assert (
        "+66.7 [+0.0, +100.0]" in shown
        and "paired bootstrap" in shown
        and "more than the model: rollout.temperature." in shown
        and "arc" not in shown
    )
    assert json.loads((tmp_path / "c.json").read_text())["sets"]["gsm"]["b_right_a_wrong"] == 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["a"], "compare wants two folders"),
        (
            ["a", "bb"],
            "bb is no folder of an evaluation (it has no settings.json); did you mean b?",
        ),
        (["a", "b"], "no set in common: x and y"),
        (["a", "b", "seed=3"], "compare wants two folders"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    overrides, said, tmp_path, capsys, monkeypatch
):
    folder(tmp_path / "a", 0.0, x=[True]), folder(tmp_path / "b", 0.0, y=[True])
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "compare", *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("postgrad: ") and error.count("\n") == 1 and said in error
