"""`log_extra` and `log_metric` of TRL's reward functions, in the Scorer."""

from typing import Any

import numpy as np
import pytest

from postgrad.data.problems import problems_of_rows
from postgrad.errors import RunError
from postgrad.problem import Failure, Problem, Score
from postgrad.user_code import PythonObject
from postgrad.verifiers.functions import WeightedReward
from postgrad.verifiers.reward_log import RewardLog
from postgrad.verifiers.scorer import Scorer

ROWS = [{"prompt": "2+2=", "answer": "4", "log_extra": "x"}, {"prompt": "3+5=", "answer": "8"}]
FILE = """
def right(completions, answer, log_metric, **kwargs):
    log_metric("right", 0.25)
    return [float(text == one) for text, one in zip(completions, answer)]

def short(completions, log_extra):
    log_extra("characters", [len(text) for text in completions])
    return [0.0] * len(completions)
"""


@pytest.fixture
def problems() -> list[Problem]:
    return problems_of_rows(ROWS, "rows")


def scorer_of(*functions: Any) -> Scorer:
    return Scorer(PythonObject("test", [WeightedReward(1.0, f.__name__, f) for f in functions]))


def logged(problems: list[Problem], *functions: Any) -> RewardLog:
    log = RewardLog()
    scorer = scorer_of(*functions)
    scorer.check(problems)
    results = scorer.score(problems, ["4", "888"], log=log)
    assert all(isinstance(result, Score) for result in results), results
    return log


def test_columns_and_the_mean_of_all_calls_as_in_trl(problems):
    def first(completions, log_extra, log_metric):
        log_extra("length", [len(text) for text in completions])
        log_metric("share", 1)
        log_metric("share", np.float32(0.5))
        log_metric("undefined", float("nan"))
        return [0.0] * 2

    async def second(completions, **kwargs):
        for text in completions:
            kwargs["log_extra"]("upper", [text.upper()])
        kwargs["log_metric"]("share", 0.0)
        return [1.0] * 2

    log = logged(problems, first, second)
    assert log.columns == {"length": [1, 3], "upper": ["4", "888"]}
    assert log.means() == {"share": 0.5}
    assert log.row(1) == {"length": 3, "upper": "888"}


def test_a_function_needs_no_completions_to_be_one_of_trl(problems):
    def reward(answer, log_metric):
        log_metric("count", len(answer))
        return [1.0] * len(answer)

    assert logged(problems, reward).means() == {"count": 2.0}


def test_without_a_log_the_function_is_called_all_the_same(problems):
    def reward(completions, log_extra, log_metric):
        log_extra("a", [1, 2])
        log_metric("b", 1.0)
        return [1.0] * 2

    assert scorer_of(reward).score(problems, ["4", "8"]) == [Score(1.0)] * 2


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_wrong_number_of_values_is_refused_in_one_line(number, problems):
    def reward(completions, log_extra):
        log_extra("mine", [1] * number)
        return [0.0] * 2

    with pytest.raises(RunError, match=f"{number} values of column mine for 2") as caught:
        scorer_of(reward).score(problems, ["4", "8"], log=RewardLog())
    assert "\n" not in str(caught.value)


def test_a_column_of_two_functions_is_refused(problems):
    def first(completions, log_extra):
        log_extra("mine", [1, 2])
        return [0.0] * 2

    def second(completions, log_extra):
        return first(completions, log_extra)

    with pytest.raises(RunError, match="two reward functions log a column mine"):
        scorer_of(first, second).score(problems, ["4", "8"])


def test_what_a_function_logs_before_it_raises_is_dropped(problems):
    def reward(completions, log_extra, log_metric):
        log_extra("mine", [1])
        log_metric("share", 1.0)
        raise ValueError("no")

    log = RewardLog()
    results = scorer_of(reward).score(problems, ["4", "8"], log=log)
    assert all(isinstance(one, Failure) and "no" in one.reason for one in results)
    assert not log.columns and not log.metrics


@pytest.mark.parametrize(("name", "value"), [("log_metric", "much"), ("log_extra", "ab")])
def test_values_of_a_wrong_type_name_the_line(name, value, problems):
    def reward(completions, **kwargs):
        kwargs[name]("mine", value)
        return [0.0] * 2

    (failure, _) = scorer_of(reward).score(problems, ["4", "8"])
    assert isinstance(failure, Failure) and "test_reward_log.py" in failure.reason


def test_values_become_those_of_json(problems):
    values = [np.arange(2), {1: (float("nan"), 2**70)}]

    def reward(completions, log_extra):
        log_extra("nested", values)
        log_extra("array", np.array([1.5, 2.5]))
        log_extra("objects", [object, "half \ud800"])
        return [0.0] * 2

    columns = logged(problems, reward).columns
    assert columns["nested"] == [[0, 1], {"1": [None, str(2**70)]}]
    assert columns["array"] == [1.5, 2.5]
    assert columns["objects"] == ["<class 'object'>", "half ?"]


def test_functions_of_a_file_in_a_sum(tmp_path, problems):
    file = tmp_path / "rewards.py"
    file.write_text(FILE)
    log = RewardLog()
    with Scorer(f"{file}:right + 0.5*{file}:short + exact", workers=1) as scorer:
        scorer.check(problems)
        results = scorer.score(problems, ["4", "88"], log=log)
    assert [one.value for one in results if isinstance(one, Score)] == [2.0, 0.0]
    assert (log.columns, log.means()) == ({"characters": [1, 2]}, {"right": 0.25})


class CountingBackend:
    def __init__(self) -> None:
        self.names: list[str] = []

    def verify(self, items: Any, verifier_names: Any) -> list[Score | Failure]:
        self.names += verifier_names
        return [Score(1.0) for _ in items]


def test_verifiers_beside_functions_run_in_the_backend_of_the_run(tmp_path, problems):
    from postgrad.api.rewards import as_verifier_setting

    file = tmp_path / "rewards.py"
    file.write_text(FILE)
    rules = f"{file}:right + math"
    for verifier in (rules, as_verifier_setting([rules, lambda response, problem: 0.0])):
        backend = CountingBackend()
        with Scorer(verifier or "") as scorer:
            scorer.use_backend(backend)
            results = scorer.score(problems, ["4", "0"])
        assert [one.value for one in results if isinstance(one, Score)] == [2.0, 1.0]
        assert backend.names == ["math", "math"]
