"""`postgrad eval` with a language model as judge: behind a server, beside the model, or a fake; ratings are kept and not asked again."""

import json

import pytest
from live import live
from served import serve

from postgrad.cli.main import main

WORDS = (
    "data=one=arithmetic:1:digits:train",
    "n=2",
    "limit=3",
    "max_response_tokens=5",
    "threads=1",
    "device=cpu",
    "batch=2",
)
MARKED = ("reward.verifier=llm_judge", "reward.pass_score=3", "reward.judge.highest=5")


def rows(out):
    return [json.loads(line) for line in (out / "one.jsonl").read_text().splitlines()]


def test_a_served_judge_marks_the_answers_and_a_second_run_asks_nothing(tiny, tmp_path, capsys):
    def judge(text):
        said = text.split("The response:\n")[-1].split("\n")[0]
        return f"RATING: {1 + len(said) % 5}"

    out = tmp_path / "out"
    with serve(chat=judge) as served:
        overrides = [
            "eval",
            str(tiny),
            *WORDS,
            *MARKED,
            f"reward.judge.model='{served.address}'",
            f"out={out}",
        ]
        assert main(overrides) == 0
        asked = len(served.asked)
        assert main(overrides) == 0 and len(served.asked) == asked > 1
        (out / "one.jsonl").unlink()
        assert main(overrides) == 0 and len(served.asked) == asked, "the ratings were kept"
    found = rows(out)
    assert len(found) == 6 and all(
        row["score"] == 1 + len(row["response"].split("\n")[0]) % 5 for row in found
    )
    assert [row["right"] for row in found] == [row["score"] >= 3 for row in found] and len(
        {row["right"] for row in found}
    ) == 2
    assert all(
        row["verifier"] == "llm_judge" and row["parts"] == {"rating": row["score"]} for row in found
    )
    summary = json.loads((out / "summary.json").read_text())["sets"]["one"]
    assert summary["score"] == pytest.approx(sum(row["score"] for row in found) / 6)
    assert len((out / "judge.jsonl").read_text().splitlines()) == asked


def test_a_local_judge_and_postgrad_serve_are_asked_alike(tiny, tmp_path):
    """One greedy model gives the same ratings, and fails to, wherever it is."""
    more = [
        *MARKED,
        "reward.judge.retries=0",
        "reward.judge.max_tokens=4",
        "reward.max_failure_rate=1",
    ]
    where = {"local": str(tiny), "live": "policy:live", "fake": "fake:4"}
    with live(tiny) as server:
        for name, judge in (where | {"served": f"{server.url}#tiny"}).items():
            template = tmp_path / "short.txt"
            template.write_text("{question}{response}RATING")
            overrides = [
                f"reward.judge.model='{judge}'",
                f"reward.judge.template={template}",
                f"out={tmp_path / name}",
            ]
            assert main(["eval", str(tiny), *WORDS, *more, *overrides]) == 0
    assert [row["score"] for row in rows(tmp_path / "fake")] == [4.0] * 6 and all(
        row["right"] for row in rows(tmp_path / "fake")
    )
    kinds = {
        name: [(row["score"], row["failure"]) for row in rows(tmp_path / name)]
        for name in ("local", "live", "served")
    }
    assert kinds["local"] == kinds["live"] == kinds["served"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), "every rating of a judge reaches reward.pass_score=1; say from which rating on"),
        (
            ("reward.pass_score=3",),
            "reward.verifier=llm_judge needs a judge; add reward.judge.model=",
        ),
        (
            ("reward.pass_score=3", "reward.judge.model='http://127.0.0.1:9/v1#m'"),
            "start the server there",
        ),
        (
            ("reward.pass_score=3", "reward.judge.model=/no/such"),
            "judge: model.path=/no/such: no such folder",
        ),
    ],
)
def test_a_judge_that_cannot_be_asked_is_one_line_and_nothing_is_written(
    tiny, tmp_path, capsys, monkeypatch, overrides, says
):
    from postgrad.rollout import http

    monkeypatch.setattr(http, "START_S", 0.3)
    named = (
        ()
        if any("judge.model" in word for word in overrides) or "reward.pass_score=3" in overrides
        else ("reward.judge.model=fake:1",)
    )
    assert (
        main(
            [
                "eval",
                str(tiny),
                *WORDS,
                "reward.verifier=llm_judge",
                *named,
                *overrides,
                f"out={tmp_path / 'out'}",
            ]
        )
        == 2
    )
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()
