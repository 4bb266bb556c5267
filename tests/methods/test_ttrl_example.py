"""examples/ttrl.py: the reward is agreement with the most frequent answer of the group."""

import json
import shutil
from pathlib import Path

import pytest
from method_runs import SMALL, bound
from tiny_runs import metrics_of, overrides_of

from postgrad.cli.main import main
from postgrad.methods.method import Step
from postgrad.types import Problem

EXAMPLE = Path(__file__).parents[2] / "examples" / "ttrl.py"


@pytest.fixture
def home(tmp_path, monkeypatch):
    shutil.copy(EXAMPLE, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rewards_are_votes_of_the_group(tiny, home):
    b = bound("grpo", tiny, "method=ttrl.py:Ttrl", "reward.verifier=numeric + 0.1*format")
    batch = b.until("sample").select(range(8))
    texts = ["7", "so 7.0", "8", None, "no", "8", "9", "9"]
    problems = [Problem(uid, ({"role": "user", "content": "?"},), "") for uid in "aaaabbbb"]
    step = Step(1)
    scores = b.method.score_texts(batch, problems, texts, step)
    assert [score.value for score in scores] == [1, 1, 0, 0, 0, 0, 1, 1]
    assert batch.rows["answer_vote"] == ["7", "7", "8", None, None, "8", "9", "9"]
    assert step.metrics["ttrl/agreement"] == 0.5


@pytest.mark.slow
def test_a_run_needs_no_ground_truth(tiny, home):
    rows = [json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(4)]
    (home / "rows.jsonl").write_text("".join(rows))
    own = ("data.train=rows.jsonl", "method=ttrl.py:Ttrl", "reward.verifier=numeric", "runs=runs")
    assert main(["train", "grpo", *overrides_of(tiny, *SMALL, *own)]) == 0
    lines = metrics_of(home / "runs" / "test")
    for line in lines:
        assert line["ttrl/agreement"] == pytest.approx(line["reward/mean"])
    assert any(line.get("grad_norm", 0.0) > 0 for line in lines)


@pytest.mark.slow
def test_a_verifier_without_answers_is_one_line(tiny, home, capsys):
    (home / "own.py").write_text("def score(response, problem):\n    return 1.0\n")
    own = ("method=ttrl.py:Ttrl", "reward.verifier=own.py:score", "runs=runs")
    assert main(["train", "grpo", *overrides_of(tiny, *SMALL, *own)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "reward.verifier=own.py:score" in error
    assert not (home / "runs").exists()
