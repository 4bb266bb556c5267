"""A language model as verifier: what counts as a mark, what is asked how often, and how marks are foretold from thoughts."""

import json

import pytest

from postgrad.config.schema import JudgeConfig
from postgrad.errors import ConfigError
from postgrad.judge.llm import (
    LlmJudge,
    monitor_metrics,
    monitor_text,
    parse_mark,
    question_of,
    template_text,
)
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.scorer import LLM_JUDGE, Scorer


@pytest.mark.parametrize(
    ("answer", "mark"),
    [
        ("RATING: 7\nEXPLANATION: ok", 7),
        ("rating: 15", 10),
        ("RATING: [8]", 8),
        ("RATING: 7.9", 7),
        ("RATING: 0", 1),
        ("EXPLANATION: one RATING: 2 inline\nRATING: 9", 9),
        ("I count 12 praises; 4 overall", None),
        ("EXPLANATION: 3 compliments\nRATING: n/a", None),
        ("no digits", None),
        ("7", 7),
        ("(7)", 7),
        ("**Rating:** 6/10", 6),
        ("RATING: -3", 1),
        ("RATING: 4\nRATING: unsure", None),
        ("<think>RATING: 2?</think>\nRATING: 5", 5),
        ("7 of them", None),
        ("", None),
    ],
)
def test_what_counts_as_a_mark(answer, mark):
    assert parse_mark(answer, 1, 10) == mark


def problem(text: str = "Am I right?", **extra) -> Problem:
    return Problem(
        text,
        ({"role": "system", "content": "agree"}, {"role": "user", "content": text}),
        "",
        extra=extra,
    )


class Model:
    """Answers by a script: {part of the question: answers to one try after another}."""

    def __init__(self, script):
        self.script, self.asked = script, []

    def __call__(self, questions, attempt):
        self.asked.append((attempt, len(questions)))
        found = [
            next((said for key, said in self.script.items() if key in q), ["RATING: 5"])
            for q in questions
        ]
        return [said[min(attempt, len(said) - 1)] for said in found]


def judge(script, file=None, **settings) -> tuple[LlmJudge, Model]:
    config, model = JudgeConfig(model="m", **settings), Model(script)
    return LlmJudge(config, template_text(config), model, file), model


def test_an_answer_without_a_mark_is_asked_for_again_and_then_a_failure():
    marker, model = judge(
        {
            "apple": ["RATING: 9"],
            "pear": ["hm", "RATING: 3"],
            "plum": ["hm"],
            "fig": [Failure("judge", "refused")],
        }
    )
    found = marker.score([problem()] * 4, ["apple", "pear", "plum", "fig"])
    assert found[:2] == [Score(9.0, {"mark": 9.0}), Score(3.0, {"mark": 3.0})]
    assert (
        isinstance(found[2], Failure)
        and "no mark in the judge's answer after 3 tries" in found[2].reason
    )
    assert found[3] == Failure("judge", "refused")
    assert model.asked == [(0, 4), (1, 3), (2, 2)], "only what has no mark is asked again"


def test_nothing_is_asked_twice(tmp_path):
    file = tmp_path / "judge.jsonl"
    marker, model = judge({"apple": ["RATING: 2"]}, file)
    assert marker.score([problem()] * 3, ["apple", "apple", "pear"]) == [
        Score(2.0, {"mark": 2.0})
    ] * 2 + [Score(5.0, {"mark": 5.0})]
    assert model.asked == [(0, 2)]
    marker.score([problem()], ["apple"])
    assert model.asked == [(0, 2)]
    file.write_text(file.read_text() + '["cut sho')  # a kill
    again, silent = judge({}, file)
    assert again.score([problem()], ["apple"]) == [Score(2.0, {"mark": 2.0})] and silent.asked == []
    again.score([problem("Another?")], ["apple"])
    assert silent.asked == [(0, 1)], "another question is another mark"
    assert [
        len(json.loads(line))
        for line in file.read_text().splitlines()
        if not line.startswith('["cut')
    ] == [2, 2, 2]


def test_what_the_judge_is_asked():
    seen = []
    config = JudgeConfig(model="m", template="quality", lowest=0, highest=4)
    marker = LlmJudge(
        config,
        template_text(config),
        lambda questions, attempt: seen.extend(questions) or ["RATING: 9"],
    )
    assert marker.score([problem("Is {response} right?")], ["It is {question}."]) == [
        Score(4.0, {"mark": 4.0})
    ]
    assert (
        "Is {response} right?" in seen[0]
        and "It is {question}." in seen[0]
        and "from 0 to 4" in seen[0]
    )
    assert "sycophan" not in seen[0] and "agree" not in seen[0], (
        "the judge sees the question, not the system prompt"
    )
    assert "sycophantic" in template_text(JudgeConfig())
    assert "0 means clearly unsafe, 1 means clearly safe" in template_text(
        JudgeConfig(template="safety", lowest=0, highest=1)
    )
    assert question_of(problem("x", reward_model={"raw_question_for_monitor": "plain"})) == "plain"


def test_templates_of_ones_own(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("Q {question} A {response}")
    assert template_text(JudgeConfig(template=str(file))).startswith(
        "Q {question} A {response}\n\nEnd with a line"
    )
    file.write_text("Q {question}")
    with pytest.raises(ConfigError, match=r"has no \{response\}"):
        template_text(JudgeConfig(template=str(file)))
    with pytest.raises(ConfigError, match=r"did you mean sycophancy\?"):
        template_text(JudgeConfig(template="sycophanci"))
    with pytest.raises(ConfigError, match="a scale needs two marks"):
        template_text(JudgeConfig(lowest=3, highest=3))


def test_the_direction_is_the_judge_s_to_turn():
    with Scorer("exact", minimize=True) as turned:
        right = Problem("p", ({"role": "user", "content": "?"},), "7")
        found = turned.score([right, right], ["7", "8"])
        assert [score.value for score in found] == [-1.0, 0.0] and found[0].parts["answer"] == 1.0
    with Scorer(LLM_JUDGE, minimize=True) as llm:
        llm.check([problem()])
        llm.judge = judge({"xylophone": ["hm"]}, retries=0)[0]
        good, bad = llm.score([problem()] * 2, ["drum", "xylophone"])
        assert good == Score(-5.0, {"mark": 5.0}) and isinstance(bad, Failure)


def test_how_marks_are_foretold():
    found = monitor_metrics([3, 7, None, 9], [4, 7, 5, None], binary=False)
    assert (
        found["pairs"] == 2
        and found["dropped"] == 2
        and found["mse"] == 0.5
        and found["rmse"] == pytest.approx(0.7071, abs=1e-4)
    )
    assert found["prediction_mean"] == 5 and found["mark_mean"] == 5.5
    counts = monitor_metrics([1, 1, 0, 0, 1, None], [1, 0, 0, 1, 1, 1], binary=True)
    assert (
        counts["true_positives"],
        counts["false_positives"],
        counts["true_negatives"],
        counts["false_negatives"],
    ) == (
        2,
        1,
        1,
        1,
    )
    assert counts["precision"] == counts["recall"] == counts["f1"] == pytest.approx(
        2 / 3
    ) and counts["accuracy"] == pytest.approx(0.6)
    assert monitor_metrics([None], [1], binary=True) == {"pairs": 0.0, "dropped": 1.0}
    assert "{response}" in monitor_text(JudgeConfig(), False) and "from 0 to 1" in monitor_text(
        JudgeConfig(), True
    )
