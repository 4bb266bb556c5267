"""GRPO on rubric rewards: criteria are named rewards, and the policy learns them."""

import pytest
from jsonl import write_jsonl
from method_runs import run
from openai_server import serve


@pytest.mark.slow
def test_the_policy_learns_what_the_rubric_asks_for(tiny, tmp_path):
    """The judge counts sevens for one criterion and nines for the other, which is unwanted."""

    def judge(text: str) -> str:
        response = text.split("The response:\n")[1].split("\n")[0]
        digit = "7" if "criterion:\nsevens" in text else "9"
        return f"RATING: {response.count(digit)}"

    rubric = [
        {"criterion": "sevens", "weight": 2, "name": "sevens"},
        {"criterion": "nines", "weight": -1, "name": "nines"},
    ]
    rows = [{"prompt": f"{i}+1=", "uid": str(i), "rubric": rubric} for i in range(8)]
    data = tmp_path / "rows.jsonl"
    write_jsonl(data, *rows)
    with serve(chat=judge) as served:
        lines = run(
            "grpo",
            tiny,
            tmp_path,
            f"data.train={data}",
            "reward.verifier=llm_judge",
            f"reward.judge.model='{served.address}'",
            "reward.judge.template=rubric",
            "reward.judge.lowest=0",
            "reward.judge.highest=6",
            "optimizer.lr=5e-3",
            "training.steps=12",
            "training.problems_per_step=8",
        )
    for line in lines:
        expected = line["reward/sevens"] - line["reward/nines"] / 2
        assert line["reward/mean"] == pytest.approx(expected, abs=1e-6)
    assert lines[-1]["reward/sevens"] > lines[0]["reward/sevens"] + 0.3
    assert lines[-1]["reward/nines"] <= lines[0]["reward/nines"] + 0.05
