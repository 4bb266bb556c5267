"""`postgrad eval` with a language model as judge: on a server or local."""

import json

import pytest
from jsonl import read_jsonl
from openai_server import serve
from serve_process import live

from postgrad.cli.main import main

OVERRIDES = (
    "data=one=arithmetic:1:digits:train",
    "n=2",
    "limit=3",
    "max_response_tokens=5",
    "threads=1",
    "device=cpu",
    "batch=2",
)
JUDGED = ("reward.verifier=llm_judge", "reward.pass_score=3", "reward.judge.highest=5")


def read_rows(out):
    return read_jsonl(out / "one.jsonl")


@pytest.mark.slow
def test_served_judge_rates_the_responses_and_ratings_are_stored(tiny, tmp_path, capsys):
    def judge(text):
        response = text.split("The response:\n")[-1].split("\n")[0]
        return f"RATING: {1 + len(response) % 5}"

    out = tmp_path / "out"
    with serve(chat=judge) as served:
        overrides = [
            "eval",
            str(tiny),
            *OVERRIDES,
            *JUDGED,
            f"reward.judge.model='{served.address}'",
            f"out={out}",
        ]
        assert main(overrides) == 0
        num_calls = len(served.asked)
        assert num_calls > 1
        assert main(overrides) == 0
        assert len(served.asked) == num_calls
        (out / "one.jsonl").unlink()
        assert main(overrides) == 0
        assert len(served.asked) == num_calls, "stored ratings are used"
    rows = read_rows(out)
    assert len(rows) == 6
    assert all(row["score"] == 1 + len(row["response"].split("\n")[0]) % 5 for row in rows)
    assert [row["right"] for row in rows] == [row["score"] >= 3 for row in rows]
    assert len({row["right"] for row in rows}) == 2
    assert all(
        row["verifier"] == "llm_judge" and row["parts"] == {"rating": row["score"]} for row in rows
    )
    summary = json.loads((out / "summary.json").read_text())["sets"]["one"]
    assert summary["score"] == pytest.approx(sum(row["score"] for row in rows) / 6)
    assert len((out / "judge.jsonl").read_text().splitlines()) == num_calls


@pytest.mark.slow
def test_local_live_and_served_judge_give_equal_ratings(tiny, tmp_path):
    """The same greedy model gives the same ratings and failures."""
    more = [
        *JUDGED,
        "reward.judge.retries=0",
        "reward.judge.max_tokens=4",
        "reward.max_failure_rate=1",
    ]
    judges = {"local": str(tiny), "live": "policy:live"}
    with live(tiny) as server:
        for name, judge in (judges | {"served": f"{server.url}#tiny"}).items():
            template = tmp_path / "short.txt"
            template.write_text("{question}{response}RATING")
            overrides = [
                f"reward.judge.model='{judge}'",
                f"reward.judge.template={template}",
                f"out={tmp_path / name}",
            ]
            assert main(["eval", str(tiny), *OVERRIDES, *more, *overrides]) == 0
    results = {
        name: [(row["score"], row["failure"]) for row in read_rows(tmp_path / name)]
        for name in ("local", "live", "served")
    }
    assert results["local"] == results["live"] == results["served"]
