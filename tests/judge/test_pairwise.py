"""PairJudge: what counts as a ranking, the order of the two answers, what is not asked."""

import pytest
from refused import refused
from tables import tabled

from postgrad.config.schema import JudgeConfig, RewardConfig
from postgrad.judge.pairwise import PairJudge, answer_of, parse_ranking
from postgrad.judge.templates import is_pairwise, template_text
from postgrad.methods.support.judging import check_judge, check_references
from postgrad.problem import Failure, Problem, Score


@tabled("reply, ranking")
def test_parse_ranking(reply, ranking):
    assert parse_ranking(reply) is ranking


def make_problem(number: int = 0, reference: str = "reference") -> Problem:
    return Problem(f"p{number}", ({"role": "user", "content": f"instruction {number}"},), reference)


def shown_answers(prompt: str) -> tuple[str, str]:
    """Return the two answers of a judge's prompt."""
    first, second = prompt.split("Answer A:\n")[1].split("\n\nAnswer B:\n")
    return first.rpartition("\n===")[0], second.rpartition("\n===")[0]


class ComparingModel:
    """A model that replies by a function of the two answers, and records the pairs it was shown."""

    def __init__(self, compare):
        self.compare = compare
        self.pairs = []

    def __call__(self, prompts, attempt):
        pairs = [shown_answers(prompt) for prompt in prompts]
        self.pairs += pairs
        return [self.compare(*pair) for pair in pairs]


def make_judge(compare, file=None, seed=0, **settings) -> tuple[PairJudge, ComparingModel]:
    config = JudgeConfig(model="m", template="pairwise", **settings)
    model = ComparingModel(compare)
    return PairJudge(config, template_text(config), model, file, seed=seed), model


def always_first(first: str, second: str) -> str:
    return "RANKING: A > B"


def prefer_good(first: str, second: str) -> str:
    if "good" in first:
        return "RANKING: A > B"
    if "good" in second:
        return "RANKING: B > A"
    return "RANKING: A = B"


@pytest.mark.parametrize("both", [False, True])
def test_score_does_not_depend_on_the_order(both):
    cases = [("good reference", "mine", 0.0), ("plain", "good", 1.0), ("plain", "mine", 0.5)] * 20
    problems = [make_problem(i, reference) for i, (reference, _, _) in enumerate(cases)]
    judge, _ = make_judge(prefer_good, both_orders=both)
    scores = judge.score(problems, [response for _, response, _ in cases])
    assert [score.value for score in scores] == [value for _, _, value in cases]
    assert all(score.parts["win"] == score.value for score in scores)
    if both:
        assert all(score.parts["chose_first"] == 0.5 for score in scores)


def test_a_judge_that_always_prefers_the_first_answer_gives_half():
    """Exactly half with both orders; with one seeded order, near half over many responses."""
    problems = [make_problem(i) for i in range(400)]
    responses = [f"response {i}" for i in range(400)]
    both, _ = make_judge(always_first, both_orders=True)
    expected = Score(0.5, {"win": 0.5, "chose_first": 1.0})
    assert both.score(problems, responses) == [expected] * 400
    one, model = make_judge(always_first)
    wins = [score.value for score in one.score(problems, responses)]
    assert wins == [float(first.startswith("response")) for first, _ in model.pairs]
    assert 170 <= sum(wins) <= 230, "three standard deviations of a fair coin"


def test_the_order_depends_on_the_seed_only():
    problems = [make_problem(i) for i in range(40)]
    responses = [f"response {i}" for i in range(40)]
    judge, model = make_judge(always_first)
    judge.score(problems, responses)
    one_by_one, other_model = make_judge(always_first)
    for i in reversed(range(40)):
        one_by_one.score(problems[i : i + 1], responses[i : i + 1])
    assert sorted(other_model.pairs) == sorted(model.pairs)
    seeded, seeded_model = make_judge(always_first, seed=1)
    seeded.score(problems, responses)
    assert seeded_model.pairs != model.pairs
    assert set(map(frozenset, seeded_model.pairs)) == set(map(frozenset, model.pairs))


def test_a_missing_ranking_is_a_failure():
    def no_ranking_for_odd(first, second):
        return "no idea" if first == "odd" else always_first(first, second)

    problems = [make_problem(i) for i in range(3)]
    judge, model = make_judge(no_ranking_for_odd, both_orders=True, retries=1)
    bad, good, also_bad = judge.score(problems, ["odd", "even", "odd"])
    assert good == Score(0.5, {"win": 0.5, "chose_first": 1.0})
    assert isinstance(also_bad, Failure)
    assert isinstance(bad, Failure)
    assert "no ranking" in bad.reason
    assert "2 tries" in bad.reason
    assert "'no idea'" in bad.reason
    assert len(model.pairs) == 6 + 2, "only prompts without a ranking are asked again"
    refusing, _ = make_judge(lambda *_: Failure("judge", "refused"), retries=0)
    assert refusing.score(problems[:1], ["x"]) == [Failure("judge", "refused")]


def test_equal_prompts_are_asked_once_and_equal_answers_never(tmp_path):
    judge, model = make_judge(prefer_good, tmp_path / "judge.jsonl")
    problems = [make_problem(0), make_problem(0), make_problem(1)]
    scores = judge.score(problems, ["good", "good", "reference"])
    assert [score.value for score in scores] == [1.0, 1.0, 0.5]
    assert scores[2].parts == {"win": 0.5}
    assert len(model.pairs) == 1
    resumed, other_model = make_judge(always_first, tmp_path / "judge.jsonl")
    assert resumed.score(problems, ["good", "good", "reference"]) == scores
    assert other_model.pairs == []


def test_the_judge_sees_a_response_up_to_the_stop_string():
    assert answer_of("Yes.\n# Query: and", ("</s>", "# Query:")) == "Yes.\n"
    assert answer_of("Yes.", ("# Query:",)) == "Yes."
    config = JudgeConfig(template="pairwise", both_orders=True)
    model = ComparingModel(always_first)
    judge = PairJudge(config, template_text(config), model, stops=["#", "!"])
    tie, _ = judge.score([make_problem(), make_problem()], ["reference#", "mine!#"])
    assert tie == Score(0.5, {"win": 0.5})
    assert model.pairs == [("mine", "reference"), ("reference", "mine")]


def test_placeholders_in_answers_are_not_filled():
    judge, model = make_judge(always_first, both_orders=True)
    problem = make_problem(reference="{second} and {question}")
    judge.score([problem], ["I say {first}"])
    assert model.pairs == [
        ("I say {first}", "{second} and {question}"),
        ("{second} and {question}", "I say {first}"),
    ]
    prompt = judge.prompt(problem, "I say {first}", True)
    assert "The user wrote:\ninstruction 0\n" in prompt
    assert prompt.endswith("write A = B only if neither is better.")


def test_template_files(tmp_path):
    file = tmp_path / "mine.txt"
    config = JudgeConfig(template=str(file))
    file.write_text("{question}: {first} or {second}?")
    assert is_pairwise(config)
    assert template_text(config).startswith("{question}: {first} or {second}?\n\nEnd with a line")
    file.write_text("{question}: {first}? Say RANKING: and so on; {second}")
    assert template_text(config) == file.read_text()
    file.write_text("{question}: {second}?")
    with refused("missing", "reward.judge.template"):
        template_text(config)
    with refused("unknown_name", "reward.judge.template"):
        template_text(JudgeConfig(template="pairwize"))
    assert not is_pairwise(JudgeConfig())


@pytest.mark.parametrize(
    ("settings", "at"),
    [
        ({"template": "pairwise", "highest": 5}, "reward.judge.highest"),
        ({"template": "pairwise", "monitor": "policy:live"}, "reward.judge.monitor"),
        ({"both_orders": True}, "reward.judge.both_orders"),
    ],
)
def test_unused_settings_are_refused(settings, at):
    with refused("no_effect", at):
        check_judge(RewardConfig("llm_judge", judge=JudgeConfig(model="m", **settings)))


def test_a_problem_without_a_reference_is_refused():
    reward = RewardConfig("llm_judge", judge=JudgeConfig(model="m", template="pairwise"))
    check_references(reward, [make_problem()])
    with refused("missing", "reward.judge.template", shows="p7"):
        check_references(reward, [make_problem(), make_problem(7, "")])
    quality = RewardConfig("llm_judge", judge=JudgeConfig(model="m", template="quality"))
    check_references(quality, [make_problem(7, "")])
