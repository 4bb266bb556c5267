"""`completion_ids` and `trainer_state` of TRL's reward functions: given, refused, or left out."""

import os
from typing import Any

import pytest

from postgrad.api.rewards import as_verifier_setting
from postgrad.data.problems import problems_of_rows
from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, Score
from postgrad.user_code import PythonObject
from postgrad.verifiers.functions import WeightedReward
from postgrad.verifiers.scorer import Scorer
from postgrad.verifiers.trainer_state import TrainerState

ROWS = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "3+5=", "answer": "8", "trainer_state": "x"}]
IDS = [[4, 17], [8, 8, 8]]
BOTH = ("completion_ids", "trainer_state")
FILE = """
def length(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def progress(completions, trainer_state):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)
"""


@pytest.fixture
def problems() -> list[Problem]:
    return problems_of_rows(ROWS, "rows")


def scorer_of(function: Any, step: int | None = None) -> Scorer:
    scorer = Scorer(PythonObject("test", [WeightedReward(1.0, "reward", function)]))
    if step is not None:
        scorer.trainer_state = lambda: TrainerState(step, 8)
    return scorer


def needs_ids(completion_ids, **kwargs):
    return [float(sum(ids)) for ids in completion_ids]


def needs_state(trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * 2


def test_a_function_of_ids_alone_gets_them(problems):
    scorer = scorer_of(needs_ids)
    scorer.check(problems, ["completion_ids"])
    assert scorer.score(problems, ["4", "888"], lambda: IDS) == [Score(21.0), Score(24.0)]


def test_the_state_is_that_of_the_moment(problems):
    scorer = scorer_of(needs_state)
    scorer.check(problems, ["trainer_state"])
    for step in (0, 5):
        scorer.trainer_state = lambda step=step: TrainerState(step)
        assert scorer.score(problems, ["4", "888"]) == [Score(float(step))] * 2


def test_keywords_have_both_as_in_trl(problems):
    seen: list[dict[str, Any]] = []

    def reward(completions, **kwargs):
        seen.append(kwargs)
        return [0.0] * len(completions)

    scorer_of(reward, step=3).score(problems, ["4", "888"], lambda: IDS)
    scorer_of(reward).score(problems, ["4", "888"])
    given, left_out = seen
    assert given["completion_ids"] == IDS
    assert vars(given["trainer_state"]) == {"global_step": 3, "max_steps": 8}
    always = {"prompts", "answer", "ground_truth", "log_extra", "log_metric"}
    assert set(given) == {*always, *BOTH}
    assert set(left_out) == always, "nor the column of that name"


@pytest.mark.parametrize("verifier", ["exact", "trl", "plain"])
def test_ids_are_made_only_for_functions_that_take_them(verifier, problems):
    def trl(completions, answer=None):
        return [0.0] * len(completions)

    def plain(response, problem):
        return 0.0

    def fail() -> list[list[int]]:
        raise AssertionError("made")

    functions = {"trl": trl, "plain": plain}
    scorer = scorer_of(functions[verifier]) if verifier in functions else Scorer(verifier)
    with scorer:
        assert len(scorer.score(problems, ["4", "888"], fail)) == 2


@pytest.mark.parametrize(
    ("function", "name"), [(needs_ids, "completion_ids"), (needs_state, "trainer_state")]
)
def test_what_is_not_known_is_refused_in_one_line(function, name, problems):
    other = [one for one in BOTH if one != name]
    with pytest.raises(ConfigError, match=f"needs {name}") as caught:
        scorer_of(function).check(problems, other)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=f"needs {name}"):
        scorer_of(function).score(problems, ["4", "888"])


def test_a_default_is_used_where_nothing_is_known(problems):
    def reward(completions, completion_ids=None, trainer_state="unknown"):
        assert completion_ids is None and trainer_state == "unknown"
        return [1.0] * len(completions)

    scorer = scorer_of(reward)
    scorer.check(problems)
    assert scorer.score(problems, ["4", "888"]) == [Score(1.0)] * 2


def test_only_keywords_are_a_function_of_trl(problems):
    def reward(**kwargs):
        return [float(len(ids)) for ids in kwargs["completion_ids"]]

    scorer = scorer_of(reward)
    scorer.check(problems)
    assert scorer.score(problems, ["4", "888"], lambda: IDS) == [Score(2.0), Score(3.0)]


def test_defaults_of_these_names_leave_other_functions_what_they_are(problems):
    def ours(response, problem, trainer_state=None):
        return float(response == problem.ground_truth)

    def verl(solution_str, ground_truth, completion_ids=None):
        return float(solution_str == ground_truth)

    for function in (ours, verl):
        scores = scorer_of(function).score(problems, ["4", "888"], lambda: IDS)
        assert scores == [Score(1.0), Score(0.0)]


def test_an_unknown_attribute_of_the_state_is_named(problems):
    def reward(completions, trainer_state):
        return [trainer_state.epoch] * len(completions)

    results = scorer_of(reward, step=1).score(problems, ["4", "888"])
    for result in results:
        assert isinstance(result, Failure) and "trainer_state.epoch" in result.reason
        assert "global_step and max_steps" in result.reason
    assert not hasattr(TrainerState(1), "max_steps") and getattr(TrainerState(1), "x", 2) == 2


def test_functions_of_a_file_in_sums_and_lists(tmp_path, problems):
    file = tmp_path / "rewards.py"
    file.write_text(FILE)
    term = f"{file}:length + 4*{file}:progress"
    for verifier in (term, as_verifier_setting([term, lambda response, problem: 0.0])):
        assert verifier is not None
        with Scorer(verifier) as scorer:
            scorer.trainer_state = lambda: TrainerState(2, 8)
            with pytest.raises(ConfigError, match="completion_ids"):
                scorer.check(problems, ["trainer_state"])
            scorer.check(problems, BOTH)
            results = scorer.score(problems, ["4", "888"], lambda: IDS)
        assert [result.value for result in results if isinstance(result, Score)] == [3.0, 4.0]


VERIFIERS = """
import os
import time

def slow(response, problem):
    time.sleep(20)

def process(response, problem):
    return os.getpid()

def trl(completions, **kwargs):
    return [0.0] * len(completions)
"""


@pytest.mark.slow
def test_verifiers_beside_functions_have_the_limits_of_the_run(tmp_path, problems):
    """A named one runs in child processes of their number and time limit; they end with it."""
    file = tmp_path / "verifiers.py"
    file.write_text(VERIFIERS)

    def sums(name: str) -> list[str | None]:
        beside = as_verifier_setting([f"{file}:{name}", lambda response, problem: 0.0])
        return [f"{file}:{name} + {file}:trl", beside]

    for verifier in sums("slow"):
        with Scorer(verifier or "", timeout_s=0.2) as scorer:
            results = scorer.score(problems, ["4", "8"])
        assert [isinstance(one, Failure) and one.kind for one in results] == ["timeout"] * 2
    for verifier in sums("process"):
        with Scorer(verifier or "", workers=1) as scorer:
            results = scorer.score(problems * 8, ["4", "8"] * 8)
            (process,) = {int(one.value) for one in results if isinstance(one, Score)}
            assert process != os.getpid()
            os.kill(process, 0)
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
