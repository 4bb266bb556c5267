"""A language model that compares two answers: what counts as a verdict, in which order it sees them, and what it is not asked."""

import pytest

from postgrad.config.schema import JudgeConfig, RewardConfig
from postgrad.errors import ConfigError
from postgrad.judge.llm import is_pairwise, template_text
from postgrad.judge.pairwise import FIRST, SECOND, TIE, PairJudge, answer_of, parse_ranking
from postgrad.methods.support.judging import check_judge, check_references
from postgrad.problem import Failure, Problem, Score


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("RANKING: A > B", FIRST),
        ("RANKING: B > A", SECOND),
        ("RANKING: A = B", TIE),
        ("RANKING: B = A", TIE),
        ("A is shorter, but right.\n\n**RANKING:** A>B\n", FIRST),
        ("> ranking: `b > a`.", SECOND),
        ("RANKING: A > B\nOn reflection:\nRANKING: B > A", SECOND),
        ("<think>RANKING: A > B?</think>\nRANKING: B > A", SECOND),
        ("B > A", SECOND),
        ("**A = B**", TIE),
        ("RANKING: A > B\nRANKING: unsure", None),
        ("RANKING: A > B or B > A", None),
        ("RANKING: A > A", None),
        ("RANKING: A < B", None),
        ("RANKING: A", None),
        ("RANKING: 1 > 2", None),
        ("I would say A > B here", None),
        ("The RANKING: A > B", None),
        ("A", None),
        ("A is better", None),
        ("RATING: 7", None),
        ("", None),
    ],
)
def test_what_counts_as_a_verdict(answer, verdict):
    assert parse_ranking(answer) is verdict


def problem(number: int = 0, reference: str = "reference") -> Problem:
    return Problem(f"p{number}", ({"role": "user", "content": f"instruction {number}"},), reference)


def shown(prompt: str) -> tuple[str, str]:
    """The two answers as the judge sees them."""
    first, second = prompt.split("Answer A:\n")[1].split("\n\nAnswer B:\n")
    return first, second.split("\n\nEnd with")[0]


class Model:
    """Answers by a function of the two answers; remembers what it was asked."""

    def __init__(self, prefers):
        self.prefers, self.asked = prefers, []

    def __call__(self, prompts, attempt):
        self.asked += [shown(prompt) for prompt in prompts]
        return [self.prefers(*shown(prompt)) for prompt in prompts]


def judge(prefers, file=None, seed=0, **settings) -> tuple[PairJudge, Model]:
    config, model = JudgeConfig(model="m", template="pairwise", **settings), Model(prefers)
    return PairJudge(config, template_text(config), model, file, seed=seed), model


def always_first(first: str, second: str) -> str:
    return "RANKING: A > B"


def likes_good(first: str, second: str) -> str:
    return (
        "RANKING: A > B"
        if "good" in first
        else "RANKING: B > A"
        if "good" in second
        else "RANKING: A = B"
    )


@pytest.mark.parametrize("both", [False, True])
def test_the_response_wins_ties_and_loses_wherever_it_is_shown(both):
    problems = [problem(i, "good reference" if i % 3 == 0 else "plain") for i in range(60)]
    responses = ["mine" if i % 3 == 0 else "good" if i % 3 == 1 else "mine" for i in range(60)]
    found = judge(likes_good, both_orders=both)[0].score(problems, responses)
    assert [score.value for score in found] == [(0.0, 1.0, 0.5)[i % 3] for i in range(60)]
    assert all(score.parts["win"] == score.value for score in found)
    assert not both or all(score.parts["chose_first"] == 0.5 for score in found)


def test_a_judge_that_always_says_first_gives_half():
    """In both orders exactly; in one seeded order by the share of responses that were shown first, which is near half."""
    problems, responses = [problem(i) for i in range(400)], [f"response {i}" for i in range(400)]
    both = judge(always_first, both_orders=True)[0].score(problems, responses)
    assert both == [Score(0.5, {"win": 0.5, "chose_first": 1.0})] * 400
    one, model = judge(always_first)
    wins = [score.value for score in one.score(problems, responses)]
    assert wins == [float(first.startswith("response")) for first, _ in model.asked]
    assert 170 <= sum(wins) <= 230, "three standard deviations of a fair coin"


def test_the_order_follows_from_the_seed_and_nothing_else():
    problems, responses = [problem(i) for i in range(40)], [f"response {i}" for i in range(40)]
    whole, model = judge(always_first)
    whole.score(problems, responses)
    parts, other = judge(always_first)
    for i in reversed(range(40)):
        parts.score(problems[i : i + 1], responses[i : i + 1])
    assert sorted(other.asked) == sorted(model.asked), "neither the batch nor its order matters"
    seeded, third = judge(always_first, seed=1)
    seeded.score(problems, responses)
    assert third.asked != model.asked and {frozenset(pair) for pair in third.asked} == {
        frozenset(pair) for pair in model.asked
    }


def test_without_a_verdict_it_is_a_failure_in_either_order():
    def grumbles(first, second):
        return "no idea" if first == "odd" else always_first(first, second)

    problems, responses = [problem(i) for i in range(3)], ["odd", "even", "odd"]
    marker, model = judge(grumbles, both_orders=True, retries=1)
    bad, good, worse = marker.score(problems, responses)
    assert (
        isinstance(bad, Failure)
        and isinstance(worse, Failure)
        and good == Score(0.5, {"win": 0.5, "chose_first": 1.0})
    )
    assert "no ranking in the judge's answer after 2 tries; it ended in 'no idea'" in bad.reason
    assert len(model.asked) == 6 + 2, "only what has no verdict is asked again"
    refused = judge(lambda *_: Failure("judge", "refused"), retries=0)[0]
    assert refused.score(problems[:1], ["x"]) == [Failure("judge", "refused")]


def test_nothing_is_asked_twice_and_equal_answers_not_at_all(tmp_path):
    marker, model = judge(likes_good, tmp_path / "judge.jsonl")
    problems = [problem(0), problem(0), problem(1)]
    found = marker.score(problems, ["good", "good", "reference"])
    assert (
        [score.value for score in found] == [1.0, 1.0, 0.5]
        and found[2].parts == {"win": 0.5}
        and len(model.asked) == 1
    )
    again, silent = judge(always_first, tmp_path / "judge.jsonl")
    assert again.score(problems, ["good", "good", "reference"]) == found and silent.asked == []


def test_the_string_that_ended_a_response_is_no_part_of_the_answer():
    assert (
        answer_of("Yes.\n# Query: and", ("</s>", "# Query:")) == "Yes.\n"
        and answer_of("Yes.", ("# Query:",)) == "Yes."
    )
    config, model = JudgeConfig(template="pairwise", both_orders=True), Model(always_first)
    marker = PairJudge(config, template_text(config), model, stops=["#", "!"])
    assert marker.score([problem(), problem()], ["reference#", "mine!#"])[0] == Score(
        0.5, {"win": 0.5}
    )
    assert model.asked == [("mine", "reference"), ("reference", "mine")]


def test_what_the_judge_is_asked(tmp_path):
    marker, model = judge(always_first, both_orders=True)
    asked = problem(reference="{second} and {question}")
    marker.score([asked], ["I say {first}"])
    assert model.asked == [
        ("I say {first}", "{second} and {question}"),
        ("{second} and {question}", "I say {first}"),
    ]
    prompt = marker.prompt(asked, "I say {first}", True)
    assert "The user wrote:\ninstruction 0\n" in prompt and prompt.endswith(
        "write A = B only if neither is better."
    )
    file = tmp_path / "mine.txt"
    file.write_text("{question}: {first} or {second}?")
    own = JudgeConfig(template=str(file))
    assert is_pairwise(own) and template_text(own).startswith(
        "{question}: {first} or {second}?\n\nEnd with a line"
    )
    file.write_text("{question}: {first}? Say RANKING: and so on; {second}")
    assert template_text(own) == file.read_text()
    file.write_text("{question}: {second}?")
    with pytest.raises(ConfigError, match=r"has no \{first\}"):
        template_text(own)
    with pytest.raises(ConfigError, match=r"did you mean pairwise\?"):
        template_text(JudgeConfig(template="pairwize"))
    assert not is_pairwise(JudgeConfig())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"template": "pairwise", "highest": 5},
            "reward.judge.highest=5 has no use: reward.judge.template=pairwise compares two",
        ),
        (
            {"template": "pairwise", "monitor": "policy:live"},
            "reward.judge.monitor=policy:live has no use",
        ),
        (
            {"both_orders": True},
            "reward.judge.both_orders=True has no use: reward.judge.template=sycophancy shows one answer",
        ),
    ],
)
def test_settings_that_nobody_would_read_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        check_judge(RewardConfig("llm_judge", judge=JudgeConfig(model="m", **settings)))


def test_a_problem_without_a_reference_is_refused():
    reward = RewardConfig("llm_judge", judge=JudgeConfig(model="m", template="pairwise"))
    check_references(reward, [problem()])
    with pytest.raises(ConfigError, match="problem p7 has none"):
        check_references(reward, [problem(), problem(7, "")])
    check_references(
        RewardConfig("llm_judge", judge=JudgeConfig(model="m", template="quality")),
        [problem(7, "")],
    )
