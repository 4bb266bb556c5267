"""Pairs of a list of ranked or rated replies."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from postgrad.cli.main import main
from postgrad.data.ranked_replies import with_ranked_pair
from postgrad.data.rows import RowError

Row = dict[str, Any]


def rated(*scores: Any, field: str = "overall_score") -> Row:
    """A row of UltraFeedback: reply a has the first score, b the second, and so on."""
    replies = [{"response": "abcd"[i], field: score} for i, score in enumerate(scores)]
    return {"instruction": "Why?", "models": ["m"], "completions": replies}


def ranked(*ranks: float) -> Row:
    """A row of Nectar."""
    answers = [{"answer": "abcd"[i], "model": "m", "rank": rank} for i, rank in enumerate(ranks)]
    return {"prompt": "\n\nHuman: Why?\n\nAssistant: ", "answers": answers, "turns": 1}


PAIRS: list[tuple[Row, tuple[str, str]]] = [
    (rated(5.0, 8.0, 2.0), ("b", "c")),
    (rated(5.0, None, 2.0, float("nan")), ("a", "c")),
    (rated("5", "10"), ("b", "a")),
    (ranked(2, 3, 1), ("c", "b")),
    ({"instruction": "Why?", "generations": ["a", "b"], "ratings": [1, 5]}, ("b", "a")),
]


@pytest.mark.parametrize(("row", "pair"), PAIRS)
def test_best_against_worst(row: Row, pair: tuple[str, str]):
    result = with_ranked_pair(row, "best_worst")
    assert (result["chosen"], result["rejected"]) == pair
    assert "completions" not in result and "answers" not in result


def test_best_against_any_worse_one():
    """Replies that are as good as the best one are never rejected; the choice is repeatable."""
    rows = [rated(8.0, 8.0, 2.0, 5.0) for _ in range(30)]
    for i, row in enumerate(rows):
        row["completions"] = [
            {**one, "response": f"{one['response']}{i}"} for one in row["completions"]
        ]
    pairs = [with_ranked_pair(row, "best_random") for row in rows]
    assert {pair["chosen"][0] for pair in pairs} == {"a"}
    assert {pair["rejected"][0] for pair in pairs} == {"c", "d"}
    assert pairs == [with_ranked_pair(row, "best_random") for row in rows]


def test_several_ratings_need_a_choice():
    row = rated(5.0, 8.0)
    for one, score in zip(row["completions"], (3.0, 1.0), strict=True):
        one["fine-grained_score"] = score
    with pytest.raises(RowError, match="rating=overall_score or rating=fine-grained_score"):
        with_ranked_pair(row, "best_worst")
    assert with_ranked_pair(row, "best_worst", "overall_score")["chosen"] == "b"
    assert with_ranked_pair(row, "best_worst", "fine-grained_score")["chosen"] == "a"


@pytest.mark.parametrize(
    ("row", "rating", "key"),
    [
        (rated(5.0, 5.0), "", "rated alike"),
        (rated(5.0, None), "", "fewer than two"),
        (rated(5.0, 8.0, field="quality"), "", "rating=NAME"),
        ({"prompt": "Why?", "responses": ["a", "b"], "scores": [1.0]}, "", "rating=NAME"),
        ({"prompt": "Why?", "responses": ["a", "b"], "scores": [1.0]}, "scores", "one rating for"),
        ({"prompt": "Why?", "response": "a"}, "", "no column has a list"),
    ],
)
def test_no_pair(row: Row, rating: str, key: str):
    with pytest.raises(RowError, match=key):
        with_ranked_pair(row, "best_worst", rating)


def test_prepared_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.parquet"
    rows = [ranked(2, 3, 1), ranked(1, 1)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["data", "prepare", "own", f"from={source}", f"out={out}", "pairs=best_worst"]
    assert main(command) == 0
    assert "dropped 1: all replies of answers are rated alike" in capsys.readouterr().out
    (row,) = parquet.read_table(out).to_pylist()
    assert row["prompt"] == [{"role": "user", "content": "Why?"}]
    assert (row["chosen"], row["rejected"]) == ("c", "b")
    assert main([*command[:-1], "pairs=all"]) == 2
