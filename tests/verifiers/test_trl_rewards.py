"""Reward functions of TRL: called by name with lists, over the columns as they are in the data."""

import os
from pathlib import Path
from typing import Any

import pytest
from refused import refused

from postgrad.api.rewards import as_verifier_setting
from postgrad.data.problems import problems_of_rows
from postgrad.problem import Failure, Score
from postgrad.user_code import PythonObject
from postgrad.verifiers.expression import Term
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
    terms = [Term(weight, one.__name__, function=one) for one, weight in pairs]
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
    assert call == {
        "seen": seen,
        "prompts": ["2+2=", "3+5=", "2+2="],
        "completions": ["4", "7", "5"],
        "answer": [4, 8, 4],
        "level": [1, None, 1],
        "more": {"ground_truth": ["4", "8", "4"]},
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
    with Scorer(f"{file}:right + 0.1*{file}:applies - 2*exact + 3", workers=1) as scorer:
        first, second = scorer.score(problems, ["4", "88"])
    assert isinstance(first, Score) and isinstance(second, Score)
    assert (first.value, second.value) == pytest.approx((1 + 0.1 - 2 + 3, 3.0))
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
            with refused("missing", "reward.verifier"):
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

    with Scorer(PythonObject("test", [Term(1.0, "judge", function=Judge())])) as scorer:
        (failure, _) = scorer.score(problems_of_rows(TEXT_ROWS, "rows"), ["4", "7"])
    assert isinstance(failure, Failure) and "dict, not a list" in failure.reason


def by_position(completions, /):
    return []


def environment(completions, environments):
    return []


def both(response, completions):
    return []


def state(completions, trainer_state):
    return []


def log(completions, log_extra, **columns):
    return []


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (by_position, "position"),
        (environment, "environments"),
        (state, "trainer_state"),
        (log, "log_extra"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(function, named):
    with refused("user_code", "reward", shows=named):
        scorer_of(function)
    with refused("user_code", "reward"):
        scorer_of(both)


@pytest.mark.parametrize("wrong", ["right.part", "right(limit=1)"])
def test_what_a_function_of_trl_cannot_have_in_a_sum(wrong, file):
    with refused("wrong_value", "reward.verifier"):
        Scorer(f"{file}:{wrong}")


def test_a_column_that_the_function_needs(file):
    def reward(completions, solution, **columns):
        return [0.0] * len(completions)

    with refused("missing", "solution"):
        scorer_of(reward).check(problems_of_rows(TEXT_ROWS, "rows"))


def test_a_first_argument_that_is_no_response_is_refused():
    def reward(prompts, responses):
        return 0.0

    with refused("user_code", "reward"):
        scorer_of(reward)


IDS = [[4, 17], [8, 8, 8]]


def needs_ids(completion_ids, **kwargs):
    return [float(sum(ids)) for ids in completion_ids]


def only_keywords(**kwargs):
    return needs_ids(kwargs["completion_ids"])


def has_default(completions, completion_ids=None):
    return [0.0 if completion_ids is None else float(sum(ids)) for ids in completion_ids or "ab"]


@pytest.mark.parametrize("function", [needs_ids, only_keywords, has_default])
def test_token_ids_where_they_are_known(function):
    problems = problems_of_rows(TEXT_ROWS, "rows")
    scorer = scorer_of(function)
    scorer.check(problems, has_token_ids=True)
    assert scorer.score(problems, ["4", "888"], lambda: IDS) == [Score(21.0), Score(24.0)]


def test_token_ids_that_are_not_known_are_refused_in_one_line():
    problems = problems_of_rows(TEXT_ROWS, "rows")
    scorer = scorer_of(needs_ids)
    for call in (lambda: scorer.check(problems), lambda: scorer.score(problems, ["4", "888"])):
        with refused("unsupported", "reward") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert scorer_of(has_default).score(problems, ["4", "8"]) == [Score(0.0)] * 2


@pytest.mark.parametrize("verifier", ["exact", "trl", "plain", "verl"])
def test_ids_are_made_only_for_functions_that_take_them(verifier):
    def trl(completions, answer=None):
        return [0.0] * len(completions)

    def plain(response, problem, completion_ids=None):
        return 0.0

    def verl(solution_str, ground_truth, completion_ids=None):
        return 0.0

    def fail() -> list[list[int]]:
        raise AssertionError("made")

    functions = {"trl": trl, "plain": plain, "verl": verl}
    scorer = scorer_of(functions[verifier]) if verifier in functions else Scorer(verifier)
    with scorer:
        scores = scorer.score(problems_of_rows(TEXT_ROWS, "rows"), ["a", "b"], fail)
    assert [score.value for score in scores if isinstance(score, Score)] == [0.0, 0.0]


class CountingBackend:
    def __init__(self) -> None:
        self.names: list[str] = []

    def verify(self, items: Any, verifier_names: Any) -> list[Score | Failure]:
        self.names += verifier_names
        return [Score(1.0) for _ in items]


def test_verifiers_beside_functions_run_in_the_backend_of_the_run(file):
    rules = f"{file}:right + math"
    for verifier in (rules, as_verifier_setting([rules, lambda response, problem: 0.0])):
        backend = CountingBackend()
        with Scorer(verifier or "") as scorer:
            scorer.use_backend(backend)
            results = scorer.score(problems_of_rows(TEXT_ROWS, "rows"), ["4", "0"])
        assert [one.value for one in results if isinstance(one, Score)] == [2.0, 1.0]
        assert backend.names == ["math", "math"]


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
def test_verifiers_beside_functions_have_the_limits_of_the_run(tmp_path):
    """A named one runs in child processes of their number and time limit; they end with it."""
    path = tmp_path / "verifiers.py"
    path.write_text(VERIFIERS)
    problems = problems_of_rows(TEXT_ROWS, "rows")

    def sums(name: str) -> list[str | None]:
        beside = as_verifier_setting([f"{path}:{name}", lambda response, problem: 0.0])
        return [f"{path}:{name} + {path}:trl", beside]

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
