"""RubricJudge: weighted marks by hand, named parts, and rubrics that cannot be used."""

import pytest

from postgrad.config.schema import JudgeConfig, RewardConfig
from postgrad.errors import ConfigError
from postgrad.judge.rubric import RubricJudge, rubric_of
from postgrad.judge.templates import template_text
from postgrad.methods.support.judging import check_judge, check_references
from postgrad.problem import Failure, Problem, Score

RUBRIC = [
    {"criterion": "says seven", "weight": 3, "name": "seven"},
    {"criterion": "is short"},
    {"criterion": "insults", "weight": -2, "name": "rude"},
]


def make_problem(rubric: object, **extra: object) -> Problem:
    message = {"role": "user", "content": "3+4?"}
    return Problem("p1", (message,), "", extra={"rubric": rubric} | extra)


def judge(replies: dict[str, str], lowest: int = 0, highest: int = 4) -> RubricJudge:
    """A judge whose model replies by the criterion in the prompt."""
    config = JudgeConfig(template="rubric", lowest=lowest, highest=highest, retries=0)

    def ask(prompts, attempt):
        return [
            next(reply for text, reply in replies.items() if f"criterion:\n{text}" in prompt)
            for prompt in prompts
        ]

    return RubricJudge(config, template_text(config), ask)


def test_marks_are_weighted_and_named():
    """(3 · 3/4 + 1 · 1 - 2 · 1/2) / (3 + 1) = 2.25 / 4."""
    replies = {"says seven": "RATING: 3", "is short": "4", "insults": "RATING: 2"}
    (score,) = judge(replies).score([make_problem(RUBRIC)], ["7"])
    assert score == Score(2.25 / 4, {"seven": 0.75, "criterion-2": 1.0, "rude": 0.5})


def test_only_the_negative_criterion_gives_a_negative_score():
    replies = {"says seven": "0", "is short": "0", "insults": "4"}
    (score,) = judge(replies).score([make_problem(RUBRIC)], ["7"])
    assert isinstance(score, Score) and score.value == -0.5


def test_problems_have_their_own_criteria_and_a_missing_rating_fails_its_row_only():
    other = make_problem(None, extra_info={"rubric": [{"criterion": "is polite"}]})
    replies = {"says seven": "4", "is short": "perhaps", "insults": "0", "is polite": "1"}
    first, second = judge(replies).score([make_problem(RUBRIC), other], ["7", "8"])
    assert isinstance(first, Failure) and "criterion-2" in first.reason
    assert second == Score(0.25, {"criterion-1": 0.25})


@pytest.mark.parametrize(
    "rubric",
    [
        None,
        [],
        "be nice",
        [{"weight": 1}],
        [{"criterion": " "}],
        [{"criterion": "a", "weight": "heavy"}],
        [{"criterion": "a", "weight": float("nan")}],
        [{"criterion": "a", "weight": -1}],
        [{"criterion": "a", "name": "x"}, {"criterion": "b", "name": "x"}],
        ["a"],
    ],
)
def test_unusable_rubrics_are_refused_with_the_problem(rubric):
    with pytest.raises(ConfigError, match="problem p1"):
        rubric_of(make_problem(rubric))
    reward = RewardConfig(verifier="llm_judge", judge=JudgeConfig(model="m", template="rubric"))
    with pytest.raises(ConfigError, match="problem p1"):
        check_references(reward, [make_problem(rubric)])


def test_settings_that_a_rubric_does_not_use_are_refused():
    for own in ({"both_orders": True}, {"monitor": "m"}):
        config = JudgeConfig(model="m", template="rubric", **own)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=next(iter(own))):
            check_judge(RewardConfig(verifier="llm_judge", judge=config))
