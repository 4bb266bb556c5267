"""Reward functions of TRL: called by name with lists, over the columns as they are in the data."""

from pathlib import Path
from typing import Any

import pytest

from postgrad.api.rewards import as_verifier_setting
from postgrad.data.problems import problems_of_rows
from postgrad.errors import ConfigError
from postgrad.problem import Failure, Score
from postgrad.user_code import PythonObject
from postgrad.verifiers.functions import WeightedReward
from postgrad.verifiers.scorer import Scorer

TEXT_ROWS = [{"prompt": "2+2=", "answer": 4, "level": 1}, {"prompt": "3+5=", "answer": 8}]
CHAT_ROWS = [{"prompt": [{"role": "user", "content": "2+2="}], "answer": "4"}]
FILE = """
def right(prompts, completions, answer, **columns):
    assert len(prompts) == len(completions) == len(answer)
    return [float(text == str(one)) for text, one in zip(completions, answer)]

def applies(completions, level, **columns):
    return [None if one is None else len(text) for text, one in zip(completions, level)]

async def share(completions):
    return [1 / len(completions)] * len(completions)

def short(completions, **columns):
    return [1.0]

def number(completions, **columns):
    return 1.0

def mapping(completions, **columns):
    return {1: "a", 2: "b"}

def unordered(completions, **columns):
    return {1.0, 2.0}

def ours(response, problem):
    return len(response)
"""


def scorer_of(*functions: Any, weights: tuple[float, ...] = ()) -> Scorer:
    factors = weights or (1.0,) * len(functions)
    pairs = zip(functions, factors, strict=True)
    terms = [WeightedReward(weight, one.__name__, one) for one, weight in pairs]
    return Scorer(PythonObject("test", terms))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(FILE)
    return str(path)


def test_the_function_gets_the_columns_with_their_types():
    seen: list[dict[str, Any]] = []

    def reward(prompts, completions, answer, level=None, **more):
        seen.append(locals())
        return [0.5] * len(prompts)

    problems = problems_of_rows(TEXT_ROWS, "rows")
    scorer = scorer_of(reward)
    scorer.check(problems)
    assert scorer.score([*problems, problems[0]], ["4", "7", "5"]) == [Score(0.5)] * 3
    (call,) = seen
    logs = {name: call["more"][name] for name in ("log_extra", "log_metric")}
    assert all(map(callable, logs.values()))
    assert call == {
        "seen": seen,
        "prompts": ["2+2=", "3+5=", "2+2="],
        "completions": ["4", "7", "5"],
        "answer": [4, 8, 4],
        "level": [1, None, 1],
        "more": {"ground_truth": ["4", "8", "4"], **logs},
    }


def test_prompts_of_messages_give_completions_of_messages():
    def reward(prompts, completions):
        assert prompts == [[{"role": "user", "content": "2+2="}]]
        return [len(one[0]["content"]) for one in completions]

    problems = problems_of_rows(CHAT_ROWS, "rows")
    assert scorer_of(reward).score(problems, ["four"]) == [Score(4.0)]


def test_none_leaves_a_term_out_of_the_sum():
    """TRL's nansum; a response to which no function applies has no reward."""

    def first(completions, **columns):
        return [None, 2.0, None]

    def second(completions, **columns):
        return [3.0, 5.0, None]

    problems = problems_of_rows([TEXT_ROWS[0]], "rows") * 3
    one, two, three = scorer_of(first, second, weights=(1.0, 0.5)).score(problems, ["a"] * 3)
    assert one == Score(1.5, {"second": 3.0})
    assert two == Score(4.5, {"first": 2.0, "second": 5.0})
    assert isinstance(three, Failure) and "None" in three.reason
    assert isinstance(scorer_of(first).score(problems, ["a"] * 3)[0], Failure)


def test_functions_of_a_file(file):
    problems = problems_of_rows(TEXT_ROWS, "rows")
    with Scorer(f"{file}:right") as scorer:
        scorer.check(problems)
        assert scorer.score(problems, ["4", "7"]) == [Score(1.0), Score(0.0)]
    with Scorer(f"{file}:share") as scorer:
        assert scorer.score(problems, ["4", "7"]) == [Score(0.5)] * 2


def test_a_sum_of_functions_of_trl_and_other_verifiers(file):
    problems = problems_of_rows(TEXT_ROWS, "rows")
    with Scorer(f"{file}:right + 0.1*{file}:applies - 2*exact", workers=1) as scorer:
        first, second = scorer.score(problems, ["4", "88"])
    assert isinstance(first, Score) and isinstance(second, Score)
    assert (first.value, second.value) == pytest.approx((1 + 0.1 - 2, 0.0))
    assert first.parts["exact"] == 1.0 and f"{file}:applies" not in second.parts


def test_an_unknown_data_source_is_refused_beside_a_function_of_trl(file):
    def ours(response, problem):
        return 1.0

    known = problems_of_rows([row | {"data_source": "openai/gsm8k"} for row in TEXT_ROWS], "rows")
    unknown = problems_of_rows([row | {"data_source": "of nobody"} for row in TEXT_ROWS], "rows")
    rules = f"auto + {file}:right"
    for verifier in (rules, as_verifier_setting([rules, ours])):
        assert verifier is not None
        with Scorer(verifier) as scorer:
            scorer.check(known)
            with pytest.raises(ConfigError, match="of nobody"):
                scorer.check(unknown)


def test_results_that_are_no_list_of_rewards(file):
    from postgrad.errors import RunError

    problems = problems_of_rows(TEXT_ROWS, "rows")
    with Scorer(f"{file}:short") as scorer, pytest.raises(RunError, match="1 scores for 2"):
        scorer.score(problems, ["4", "7"])
    for name in ("number", "mapping", "unordered"):
        with Scorer(f"{file}:{name}") as scorer:
            (failure, _) = scorer.score(problems, ["4", "7"])
        assert isinstance(failure, Failure) and "not a list" in failure.reason


def test_an_object_that_returns_a_dict_of_scores_fails():
    class Judge:
        def score(self, problems, responses):
            return {1: 0.5, 2: 1.0}

    with Scorer(PythonObject("test", [WeightedReward(1.0, "judge", Judge())])) as scorer:
        (failure, _) = scorer.score(problems_of_rows(TEXT_ROWS, "rows"), ["4", "7"])
    assert isinstance(failure, Failure) and "dict, not a list" in failure.reason


def by_position(completions, /):
    return []


def environment(completions, environments):
    return []


def both(response, completions):
    return []


@pytest.mark.parametrize(
    ("function", "named"), [(by_position, "position"), (environment, "environments")]
)
def test_functions_that_cannot_be_called_are_refused(function, named):
    with pytest.raises(ConfigError, match=named):
        scorer_of(function)
    with pytest.raises(ConfigError, match="response"):
        scorer_of(both)


@pytest.mark.parametrize("wrong", ["right.part", "right(limit=1)", "right + 1"])
def test_what_a_function_of_trl_cannot_have_in_a_sum(wrong, file):
    with pytest.raises(ConfigError, match="TRL"):
        Scorer(f"{file}:{wrong}")


def test_a_column_that_the_function_needs(file):
    def reward(completions, solution, **columns):
        return [0.0] * len(completions)

    with pytest.raises(ConfigError, match="column solution"):
        scorer_of(reward).check(problems_of_rows(TEXT_ROWS, "rows"))


def test_a_first_argument_that_is_no_response_is_refused():
    def reward(prompts, responses):
        return 0.0

    with pytest.raises(ConfigError, match="prompts"):
        scorer_of(reward)
