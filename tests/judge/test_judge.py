"""LlmJudge and its templates: what counts as a rating, what is asked again, what the judge sees."""

import json

import pytest
from refused import refused
from tables import tabled

from postgrad.config.schema import JudgeConfig, RewardConfig
from postgrad.errors import RunError
from postgrad.judge.llm import LlmJudge, RatingStore, parse_rating, question_of
from postgrad.judge.monitor import monitor_metrics
from postgrad.judge.templates import monitor_text, template_text
from postgrad.methods.support.judging import check_judge
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.expression import LLM_JUDGE
from postgrad.verifiers.scorer import Scorer


@tabled("reply, rating")
def test_parse_rating(reply, rating):
    assert parse_rating(reply, 1, 10) == rating


def make_problem(question: str = "Am I right?", **extra) -> Problem:
    messages = ({"role": "system", "content": "agree"}, {"role": "user", "content": question})
    return Problem(question, messages, "", extra=extra)


def rated(rating: int) -> Score:
    return Score(float(rating), {"rating": float(rating)})


class ScriptedModel:
    """A model whose replies are given: {part of the prompt: its reply at each attempt}."""

    def __init__(self, script):
        self.script = script
        self.calls = []  # (attempt, number of prompts)

    def __call__(self, prompts, attempt):
        self.calls.append((attempt, len(prompts)))
        return [self.reply(prompt, attempt) for prompt in prompts]

    def reply(self, prompt, attempt):
        for part, replies in self.script.items():
            if part in prompt:
                return replies[min(attempt, len(replies) - 1)]
        return "RATING: 5"


def make_judge(script, file=None, **settings) -> tuple[LlmJudge, ScriptedModel]:
    config = JudgeConfig(model="m", **settings)
    model = ScriptedModel(script)
    return LlmJudge(config, template_text(config), model, file), model


def test_reply_without_rating_is_asked_again_then_fails():
    judge, model = make_judge(
        {
            "apple": ["RATING: 9"],
            "pear": ["hm", "RATING: 3"],
            "plum": ["hm"],
            "fig": [Failure("judge", "refused")],
        }
    )
    scores = judge.score([make_problem()] * 4, ["apple", "pear", "plum", "fig"])
    assert scores[:2] == [rated(9), rated(3)]
    assert isinstance(scores[2], Failure)
    assert "no rating" in scores[2].reason
    assert "3 tries" in scores[2].reason
    assert scores[3] == Failure("judge", "refused")
    assert model.calls == [(0, 4), (1, 3), (2, 2)], "only prompts without a rating are asked again"


def test_no_prompt_is_asked_twice(tmp_path):
    file = tmp_path / "judge.jsonl"
    judge, model = make_judge({"apple": ["RATING: 2"]}, file)
    scores = judge.score([make_problem()] * 3, ["apple", "apple", "pear"])
    assert scores == [rated(2), rated(2), rated(5)]
    assert model.calls == [(0, 2)]
    judge.score([make_problem()], ["apple"])
    assert model.calls == [(0, 2)]

    file.write_text(file.read_text() + '["cut sho')  # as a killed process leaves it
    resumed, other_model = make_judge({}, file)
    assert resumed.score([make_problem()], ["apple"]) == [rated(2)]
    assert other_model.calls == []
    resumed.score([make_problem("Another?")], ["apple"])
    assert other_model.calls == [(0, 1)], "another question has another rating"
    complete_lines = [line for line in file.read_text().splitlines() if "cut" not in line]
    assert [len(json.loads(line)) for line in complete_lines] == [2, 2, 2]


def test_ratings_that_the_disk_refuses_are_a_run_error(tmp_path):
    store = RatingStore(tmp_path)  # a folder
    with pytest.raises(RunError, match="could not be written"):
        store.add({"key": 1})


def test_judge_sees_question_and_response_unchanged():
    prompts = []

    def model(given_prompts, attempt):
        prompts.extend(given_prompts)
        return ["RATING: 9"]

    config = JudgeConfig(model="m", template="quality", lowest=0, highest=4)
    judge = LlmJudge(config, template_text(config), model)
    assert judge.score([make_problem("Is {response} right?")], ["It is {question}."]) == [rated(4)]
    (prompt,) = prompts
    assert "Is {response} right?" in prompt
    assert "It is {question}." in prompt
    assert "from 0 to 4" in prompt
    assert "agree" not in prompt, "the judge does not see the system prompt"


def test_built_in_templates_fill_in_the_scale():
    assert "sycophantic" in template_text(JudgeConfig())
    safety = template_text(JudgeConfig(template="safety", lowest=0, highest=1))
    assert "0 means clearly unsafe, 1 means clearly safe" in safety
    assert "{response}" in monitor_text(JudgeConfig(), False)
    assert "from 0 to 1" in monitor_text(JudgeConfig(), True)


def test_question_of_prefers_the_wording_for_judges():
    problem = make_problem("x", reward_model={"raw_question_for_monitor": "plain"})
    assert question_of(problem) == "plain"


def test_template_files(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("Q {question} A {response}")
    text = template_text(JudgeConfig(template=str(file)))
    assert text.startswith("Q {question} A {response}\n\nEnd with a line")
    file.write_text("Q {question}")
    with refused("missing", "reward.judge.template"):
        template_text(JudgeConfig(template=str(file)))
    with refused("unknown_name", "reward.judge.template"):
        template_text(JudgeConfig(template="sycophanci"))
    with refused("conflict", "reward.judge.lowest"):
        template_text(JudgeConfig(lowest=3, highest=3))


def test_minimize_negates_scores():
    with Scorer("exact", minimize=True) as scorer:
        problem = Problem("p", ({"role": "user", "content": "?"},), "7")
        scores = scorer.score([problem, problem], ["7", "8"])
        assert [score.value for score in scores] == [-1.0, 0.0]
        assert scores[0].parts["answer"] == 1.0
    with Scorer(LLM_JUDGE, minimize=True) as scorer:
        scorer.check([make_problem()])
        scorer.judge, _ = make_judge({"xylophone": ["hm"]}, retries=0)
        score, failure = scorer.score([make_problem()] * 2, ["drum", "xylophone"])
        assert score == Score(-5.0, {"rating": 5.0})
        assert isinstance(failure, Failure)


def test_a_judge_is_a_term_of_a_sum():
    problem = Problem("p", ({"role": "user", "content": "?"},), "7")
    script = {"\n7\n": ["RATING: 9"], "\nhm\n": ["hm"]}
    with Scorer("2*exact + 0.1*llm_judge - 1") as scorer:
        scorer.check([problem])
        scorer.judge, model = make_judge(script, retries=0)
        right, wrong, failure = scorer.score([problem] * 3, ["7", "8", "hm"])
    assert right.value == pytest.approx(2 + 0.9 - 1)
    assert right.parts == {
        "exact": 1.0,
        "exact.answer": 1.0,
        "llm_judge": 9.0,
        "llm_judge.rating": 9.0,
    }
    assert wrong.value == pytest.approx(0.5 - 1)
    assert isinstance(failure, Failure)
    assert failure.reason.startswith("llm_judge: no rating")
    assert model.calls == [(0, 3)]


def test_a_sum_may_have_only_the_judge_and_a_constant():
    problem = Problem("p", ({"role": "user", "content": "?"},), "7")
    for text, value in (("0.5*llm_judge - 2", 0.5), ("3 - llm_judge.rating", -2.0)):
        with Scorer(text) as scorer:
            scorer.judge, _ = make_judge({})
            (score,) = scorer.score([problem], ["drum"])
        assert score.value == pytest.approx(value)


def test_wrong_settings_of_a_judge_in_a_sum():
    for verifier in ("exact + llm_judge(limit=3)", "llm_judge + llm_judge.rating"):
        with refused("wrong_value", "reward.verifier"):
            Scorer(verifier)
    with refused("missing", "reward.verifier"):
        check_judge(RewardConfig("exact + 0.1*llm_judge"))
    monitored = JudgeConfig(model="m", monitor="m")
    with refused("conflict", "reward.judge.monitor"):
        check_judge(RewardConfig("exact + 0.1*llm_judge", judge=monitored))
    with Scorer("exact + 0.1*llm_judge") as scorer, refused("unsupported", "reward.verifier"):
        scorer.score([Problem("p", ({"role": "user", "content": "?"},), "7")], ["7"])


def test_monitor_metrics_of_ratings():
    metrics = monitor_metrics([3, 7, None, 9], [4, 7, 5, None], binary=False)
    assert metrics == {
        "pairs": 2,
        "dropped": 2,
        "mse": 0.5,
        "rmse": pytest.approx(0.7071, abs=1e-4),
        "prediction_mean": 5,
        "rating_mean": 5.5,
    }


def test_monitor_metrics_of_binary_scores():
    metrics = monitor_metrics([1, 1, 0, 0, 1, None], [1, 0, 0, 1, 1, 1], binary=True)
    assert metrics == {
        "pairs": 5,
        "dropped": 1,
        "true_positives": 2,
        "false_positives": 1,
        "true_negatives": 1,
        "false_negatives": 1,
        "precision": pytest.approx(2 / 3),
        "recall": pytest.approx(2 / 3),
        "f1": pytest.approx(2 / 3),
        "accuracy": pytest.approx(0.6),
    }
    assert monitor_metrics([None], [1], binary=True) == {"pairs": 0.0, "dropped": 1.0}
