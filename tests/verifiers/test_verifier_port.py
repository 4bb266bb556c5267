"""Verifiers by name and by data source, users' verifiers, and the Scorer."""

import re
import subprocess
import sys

import pytest
from refused import refused
from tables import tabled

from postgrad.data.problems import problems_of_rows
from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, Score
from postgrad.user_code import PythonObject
from postgrad.verifiers.expression import Term
from postgrad.verifiers.loading import find_verifier, load_verifier
from postgrad.verifiers.port import as_score, run_verifier
from postgrad.verifiers.scorer import Scorer
from postgrad.verifiers.table import SOURCES, VERIFIERS, choose


@tabled("source, name")
def test_choose_by_data_source(source, name, problem):
    assert choose(problem("5", source)) == name


@pytest.mark.parametrize(
    "source", ["research", "mathematics", "claimed", "decode", "arcade", "happs", ""]
)
def test_unknown_data_source_is_refused(source, problem):
    with refused("missing", "reward.verifier") as error:
        choose(problem("5", source))
    assert repr(source) in str(error.value)
    assert "\n" not in str(error.value)


def test_every_data_set_with_ground_truth_has_a_verifier(problem):
    from postgrad.data.prepare.catalog import SETS

    sources = {
        entry.data_source for entry in SETS.values() if entry.judged == "rule" and entry.data_source
    }
    assert {"openai/gsm8k", "humaneval", "mmlu_pro", "minerva"} <= sources
    for source in sources:
        assert choose(problem("5", source)) in VERIFIERS


def test_a_prompt_that_asks_for_an_answer_line_is_scored_by_it():
    asks = {"role": "user", "content": "What is 2+3? The last line must read Answer: $Answer"}
    assert choose(Problem("p1", (asks,), "5", "math_dapo")) == "math_answer"
    boxes = {"role": "user", "content": "What is 2+3? Answer: with \\boxed{}"}
    assert choose(Problem("p1", (boxes,), "5", "math_dapo")) == "math"


def test_a_boxed_prompt_without_data_source_is_math():
    system = {"role": "system", "content": "Put the final answer within \\boxed{}."}
    assert choose(Problem("p1", (system,), "5")) == "math"


def test_every_verifier_in_the_tables_can_be_loaded():
    assert {name for _, name in SOURCES} <= set(VERIFIERS)
    for spec in VERIFIERS.values():
        module = spec.path.partition(":")[0].removeprefix("postgrad.verifiers.grading.")
        assert spec.inline is (module in ("answers", "choice", "form", "environment"))
        if spec.inline:
            assert callable(load_verifier(spec.path))


def test_user_verifier_by_path(hostile, tmp_path, monkeypatch):
    assert find_verifier(hostile("length")).inline is False
    (tmp_path / "mine.py").write_text("def right(response, problem):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    assert load_verifier(find_verifier("mine.py:right").path)("", None) == 1.0  # type: ignore[arg-type]
    assert (
        find_verifier("postgrad.verifiers.grading.answers:exact").path
        == "postgrad.verifiers.grading.answers:exact"
    )


def test_a_function_with_verl_arguments_gets_them_by_name(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    score = float(solution_str == ground_truth)\n"
        "    known = data_source == 'sums'\n"
        "    return {'score': score, 'index': extra_info['index'], 'known': known}\n"
        "def short(solution_str, ground_truth, method='strict'):\n"
        "    return len(solution_str) - len(ground_truth)\n"
    )
    problem = Problem(
        "u", ({"role": "user", "content": "1+1"},), "2", "sums", (), {"extra_info": {"index": 7}}
    )
    verifier = load_verifier(find_verifier(f"{tmp_path}/theirs.py:compute_score").path)
    assert as_score(verifier("2", problem)) == Score(1.0, {"index": 7.0, "known": 1.0})
    assert as_score(verifier("3", problem)) == Score(0.0, {"index": 7.0, "known": 1.0})
    assert load_verifier(find_verifier(f"{tmp_path}/theirs.py:short").path)("1234", problem) == 3


def test_a_further_argument_of_a_verl_function_must_be_given(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "import functools\n"
        "def compute_score(solution_str, ground_truth, limit):\n"
        "    return float(len(solution_str) < limit)\n"
        "def with_limit(function):\n"
        "    @functools.wraps(function)\n"
        "    def call(**arguments):\n"
        "        return function(limit=3, **arguments)\n"
        "    return call\n"
        "limited = with_limit(compute_score)\n"
    )
    path = f"{tmp_path}/theirs.py:compute_score"
    with refused("missing", "reward.verifier"):
        find_verifier(path)
    assert find_verifier(f"{path}(limit=3)").arguments == {"limit": 3.0}
    with Scorer(f"{path}(limit=3)", workers=1) as scorer:
        problem = Problem("u", ({"role": "user", "content": "1+1"},), "2", "sums")
        scores = scorer.score([problem] * 2, ["12", "1234"])
    assert [score.value for score in scores if isinstance(score, Score)] == [1.0, 0.0]
    limited = load_verifier(find_verifier(f"{tmp_path}/theirs.py:limited").path)
    problem = Problem("u", ({"role": "user", "content": "1+1"},), "2", "sums")
    assert limited("12", problem) == 1.0


def test_verl_arguments_keep_the_type_of_the_ground_truth(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str in ground_truth['target'])\n"
    )
    truth = {"target": ["Paris", "paris"]}
    row = {"prompt": "Capital?", "data_source": "x", "reward_model": {"ground_truth": truth}}
    problem = problems_of_rows([row], "rows")[0]
    verifier = load_verifier(find_verifier(f"{tmp_path}/theirs.py:compute_score").path)
    assert (verifier("paris", problem), verifier("Rome", problem)) == (1.0, 0.0)


def test_a_function_as_in_cs336_gets_the_ground_truth(tmp_path):
    (tmp_path / "course.py").write_text(
        "def reward(model_response, ground_truth, fast=True):\n"
        "    right = float(model_response == ground_truth)\n"
        "    return {'format_reward': 1.0, 'answer_reward': right, 'reward': right}\n"
    )
    problem = Problem("u", ({"role": "user", "content": "1+1"},), "2", "sums")
    verifier = load_verifier(find_verifier(f"{tmp_path}/course.py:reward").path)
    parts = {"format_reward": 1.0, "answer_reward": 1.0}
    assert as_score(verifier("2", problem)) == Score(1.0, parts)
    assert as_score(verifier("3", problem)) == Score(0.0, parts | {"answer_reward": 0.0})


def test_an_async_function_of_verl_given_as_an_object_is_awaited(problem):
    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth)

    scorer = Scorer(PythonObject("theirs", [Term(1.0, "theirs", function=compute_score)]))
    results = scorer.score([problem("3")] * 2, ["3", "4"])
    assert results == [Score(1.0), Score(0.0)]


@tabled("arguments")
def test_a_function_with_other_arguments_is_refused(arguments, tmp_path):
    (tmp_path / "odd.py").write_text(f"def odd({arguments}):\n    return 1.0\n")
    with refused("user_code", "reward", shows=re.escape(f"odd.py:odd({arguments})")):
        find_verifier(f"{tmp_path}/odd.py:odd")


def test_an_argument_without_a_default_must_be_given(tmp_path):
    (tmp_path / "brief.py").write_text("def brief(response, problem, limit):\n    return limit\n")
    with refused("missing", "reward.verifier", shows=r"needs limit.*brief\(limit=1\)"):
        find_verifier(f"{tmp_path}/brief.py:brief")
    with Scorer(f"0.5*{tmp_path}/brief.py:brief(limit=4)", workers=1) as scorer:
        (score,) = scorer.score([Problem("u", (), "3")], ["text"])
    assert isinstance(score, Score) and score.value == 2.0


@tabled("name, message")
def test_wrong_names_are_refused_in_one_line(name, message, hostile, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    name = name.replace("HERE", hostile("").rpartition("/")[0]).replace("BROKEN", str(broken))
    with pytest.raises(ConfigError) as error:
        find_verifier(name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_failure_names_the_line_of_the_users_code(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import json\ndef score(response, problem):\n    return json.loads(response)\n"
    )
    verifier = load_verifier(find_verifier(f"{tmp_path}/mine.py:score").path)
    failure = run_verifier(verifier, "{", Problem("u", (), "2"))
    assert isinstance(failure, Failure)
    assert failure.reason.endswith(" (mine.py, line 3)")


def test_as_score_accepts_numbers_dicts_and_scores():
    numpy = pytest.importorskip("numpy")
    assert as_score(True) == Score(1.0)
    assert as_score(2) == Score(2.0)
    assert as_score(numpy.float32(0.5)) == Score(0.5)
    assert as_score(Score(0.5, {"a": 1.0})) == Score(0.5, {"a": 1.0})
    assert as_score({"score": 0.5, "acc": True, "pred": "42"}) == Score(0.5, {"acc": 1.0})
    assert as_score(Failure("judge", "no")) == Failure("judge", "no")


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1.0",
        b"1",
        [1.0],
        float("nan"),
        float("inf"),
        {},
        {"acc": 1.0},
        {"score": None},
        {"score": "1"},
        {"score": float("nan")},
        Score(float("nan")),
        Score(1.0, {"a": float("nan")}),
        {"score": 1.0, "acc": float("inf")},
        Score("1"),  # type: ignore[arg-type]
    ],
)
def test_as_score_refuses_other_values(result):
    failure = as_score(result)
    assert isinstance(failure, Failure)
    assert failure.kind == "invalid"


@pytest.mark.slow
def test_scorer_chooses_a_verifier_per_problem(problem):
    problems = [
        problem("590", "arithmetic/digits"),
        problem("5", "openai/gsm8k"),
        problem("8", "math_dapo"),
        problem("B", "arc_c"),
    ]
    with Scorer(workers=1) as scorer:
        results = scorer.score(problems, ["590", "#### 5", "\\boxed{2^3}", "(C)"])
    assert [result.value for result in results if isinstance(result, Score)] == [1, 1, 1, 0]


def test_scorer_uses_the_named_verifier_for_all(problem):
    with Scorer("exact") as scorer:
        assert scorer.score([problem("8", "math_dapo")], ["\\boxed{8}"]) == [
            Score(0.0, {"answer": 0.0})
        ]
        assert scorer.score([], []) == []


def test_scorer_refuses_wrong_settings(problem):
    for key, value in (
        ("verifier", "mth"),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("workers", -1),
    ):
        code = "unknown_name" if key == "verifier" else "wrong_value"
        with refused(code, f"reward.{key}", shows=f"={value}"):
            Scorer(**{key: value})
    scorer = Scorer()
    with refused("missing", "reward.verifier"):
        scorer.check([problem("5"), problem("5", "nobody/knows")])
    with pytest.raises(ValueError, match="1 problems for 2 responses"):
        scorer.score([problem("5")], ["a", "b"])
    scorer.close()


@pytest.mark.slow
def test_scorer_imports_neither_torch_nor_math_verify():
    code = """if True:
        import sys
        from postgrad.problem import Problem
        from postgrad.verifiers.scorer import Scorer
        assert "torch" not in sys.modules, "postgrad.verifiers imports torch"
        with Scorer("math", 30, 1) as scorer:
            result, = scorer.score([Problem("p", (), "8")], ["\\\\boxed{2^3}"])
        assert result.value == 1, result
        assert "sympy" not in sys.modules and "math_verify" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_async_functions_score(tmp_path, problem):
    file = tmp_path / "mine.py"
    file.write_text(
        "import asyncio\n\n\n"
        "async def plain(response, problem):\n"
        "    await asyncio.sleep(0)\n"
        "    return float(response == problem.ground_truth)\n\n\n"
        "async def verl(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth)}\n"
    )
    from postgrad.verifiers.scorer import Scorer

    for name in ("plain", "verl"):
        with Scorer(f"{file}:{name}", workers=1) as scorer:
            results = scorer.score([problem("3")] * 2, ["3", "4"])
        assert [result.value for result in results] == [1.0, 0.0]
