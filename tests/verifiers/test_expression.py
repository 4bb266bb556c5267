"""Weighted sums of verifiers: parsing, the parts of a sum, malformed sums."""

import json
import re

import pytest
from refused import refused
from tables import tabled

from postgrad.api.rewards import as_verifier_setting
from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, Score
from postgrad.sandbox.local import probe
from postgrad.sandbox.outcome import SandboxError
from postgrad.verifiers.expression import Term, is_sum, parse_reward
from postgrad.verifiers.scorer import Scorer

PROBLEM = Problem("p1", (), "42", "math")


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("math + 0.1*format", [Term(1.0, "math"), Term(0.1, "format")]),
        (
            "boxed - 0.2*overlong(limit=20, buffer=4)",
            [Term(1.0, "boxed"), Term(-0.2, "overlong", "", {"limit": 20.0, "buffer": 4.0})],
        ),
        ("2*boxed - 1", [Term(2.0, "boxed"), Term(-1.0)]),
        ("-1*bold", [Term(-1.0, "bold")]),
        ("- bold + 3", [Term(-1.0, "bold"), Term(3.0)]),
        ("code.passed", [Term(1.0, "code", "passed")]),
        (
            "1e-3*length(limit=100).characters",
            [Term(0.001, "length", "characters", {"limit": 100.0})],
        ),
        (
            "0.5*my/own-file.py:right + exact",
            [Term(0.5, "my/own-file.py:right"), Term(1.0, "exact")],
        ),
        (
            "my/file.py:right.part + exact",
            [Term(1.0, "my/file.py:right", "part"), Term(1.0, "exact")],
        ),
    ],
)
def test_parse_reward(text, terms):
    reward = parse_reward(text)
    assert reward.is_sum and list(reward.terms) == terms


@pytest.mark.parametrize(
    "name", ["math", "mth", "package.module:function", "folder/my-file.py:right", "a.b.c:f", ""]
)
def test_plain_names_are_not_sums(name):
    assert not is_sum(name)


@tabled("text, code, culprit")
def test_malformed_sums_are_refused_in_one_line(text, code, culprit):
    with refused(code, "reward.verifier", shows=re.escape(culprit)) as caught:
        Scorer(text)
    assert "\n" not in str(caught.value)
    with refused("user_code", shows="nowhere.py:right"):
        Scorer("math + nowhere.py:right")


def score(text: str, response: str, problem: Problem = PROBLEM) -> Score | Failure:
    with Scorer(text, workers=1) as scorer:
        (result,) = scorer.score([problem], [response])
    return result


def test_parts_of_a_sum_are_the_terms_and_their_parts():
    text = "2*boxed + 0.5*format - 0.25"
    assert score(text, "\\boxed{42}") == Score(
        1.75, {"boxed": 1.0, "boxed.answer": 1.0, "boxed.format": 1.0, "format": 0.0}
    )
    tagged = "</think> <answer>\\boxed{41}</answer>"
    assert score(text, tagged) == Score(
        0.25, {"boxed": 0.0, "boxed.answer": 0.0, "boxed.format": 1.0, "format": 1.0}
    )
    assert score("3*boxed.format", tagged) == Score(3.0, {"boxed.format": 1.0})
    difference = score("length(limit=10) - length(limit=20)", "x" * 10)
    assert isinstance(difference, Score) and difference.value == pytest.approx(0.5)
    assert difference.parts["length(limit=20)"] == 0.5


def right(response, problem):
    return float(response == problem.ground_truth)


def test_weights_of_a_list_multiply_those_of_its_sums():
    rewards = ["exact - 0.5*length(limit=4) + 1", "0.1*format"]
    text = as_verifier_setting(rewards, [2, -1])
    assert text == "2*exact - 1*length(limit=4) + 2 - 0.1*format"
    assert score(text, "42") == Score(
        3.5, {"exact": 1.0, "exact.answer": 1.0, **LENGTH, "format": 0.0}
    )
    mixed = as_verifier_setting([rewards[0], right], [2, 10])
    assert mixed is not None
    assert score(mixed, "42") == Score(
        13.5, {"exact": 1.0, "exact.answer": 1.0, **LENGTH, "right": 1.0}
    )
    assert as_verifier_setting("exact") == "exact"


LENGTH = {"length(limit=4)": 0.5, "length(limit=4).characters": 2.0}


@pytest.mark.parametrize(
    ("text", "response", "truth", "reason"),
    [
        ("boxed + gsm8k", "\\boxed{x}", "x", "gsm8k: "),
        ("boxed.color", "\\boxed{42}", "42", "boxed has no part color"),
        ("overlong(limit=4, buffer=20)", "x", "42", "overlong(limit=4,buffer=20): "),
    ],
)
def test_a_failed_term_fails_the_sum(text, response, truth, reason):
    result = score(text, response, Problem("p1", (), truth, "math"))
    assert isinstance(result, Failure)
    assert result.kind == "invalid"
    assert result.reason.startswith(reason)


@pytest.mark.slow
def test_scorer_accepts_sums_with_auto(hostile):
    problems = [Problem("a", (), "42", "openai/gsm8k"), Problem("b", (), "8", "math_dapo")]
    tagged = "t </think> <answer>{}</answer>"
    responses = ["#### 42", "\\boxed{2^3}", tagged.format("42"), tagged.format("\\boxed{9}")]
    with Scorer("auto + 0.1*format", workers=1, timeout_s=30) as scorer:
        scorer.check(problems)
        results = scorer.score(problems * 2, responses)
    assert [result.value for result in results] == pytest.approx([1.0, 1.0, 1.1, 0.1])
    assert "gsm8k" in results[0].parts
    assert "math" in results[1].parts
    with Scorer(f"0.5*{hostile('length')} + exact", workers=1, timeout_s=30) as scorer:
        (result,) = scorer.score(problems[:1], ["42"])
    assert result.value == 2.0
    with refused("unknown_name", "reward.verifier"):
        Scorer("auto + 0.1*fromat")


def test_auto_says_where_it_is_less_strict_than_verl():
    gsm8k = Problem("a", (), "42", "openai/gsm8k")
    other = Problem("b", (), "8", "math_dapo")
    with Scorer("auto + 0.1*format") as scorer:
        (note,) = scorer.notes([other, gsm8k, gsm8k])
        assert "reward.verifier=gsm8k_strict" in note
        assert scorer.notes([other]) == []
    with Scorer("gsm8k_strict") as scorer:
        assert scorer.notes([gsm8k]) == []


def has_sandbox() -> bool:
    try:
        probe()
    except SandboxError:
        return False
    return True


HAS_SANDBOX = has_sandbox()  # without one, `code` can score no row
SUM = Problem("a", (), "42", "arithmetic/digits")
TESTED = Problem("b", (), "", "code", extra={"test_list": ["assert f(1) == 2"]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "problems", "fits"),
    [
        ("code", [SUM, SUM], False),
        ("code", [SUM, TESTED], HAS_SANDBOX),  # some row can be scored
        ("exact + 0.1*code.passed", [SUM], False),  # every term must fit
        ("exact.no", [SUM], False),
        ("code", [TESTED], HAS_SANDBOX),
        ("auto", [SUM, TESTED], HAS_SANDBOX),
        ("environment", [SUM], True),  # reads what the run's environment gives later
        ("llm_judge", [SUM], True),
    ],
)
def test_verifier_that_fits_no_row_is_refused_before_the_run(verifier, problems, fits):
    with Scorer(verifier, workers=1, timeout_s=30) as scorer:
        if fits:
            scorer.check_fit(problems, "data.train")
            return
        with refused("conflict", "reward.verifier"):
            scorer.check_fit(problems, "data.train")


def test_rows_without_a_ground_truth_are_told_to_add_one():
    advice = "add a column ground_truth"
    with Scorer("numeric", workers=1) as scorer:
        with refused("conflict", "reward.verifier", shows=advice):
            scorer.check_fit([Problem("a", (), "", "x")], "data.train")
        with refused("conflict", "reward.verifier") as caught:
            scorer.check_fit([Problem("a", (), "no number", "x")], "data.train")
    assert advice not in str(caught.value)


def test_rows_tried_are_spaced_over_the_set():
    problems = [SUM] * 300
    problems[200:] = [Problem("c", (), "no number", "x")] * 100
    with Scorer("numeric", workers=1) as scorer:
        scorer.check_fit(problems, "data.train")
        scorer.check_fit(problems[::-1], "data.train")
        with refused("conflict", "reward.verifier"):
            scorer.check_fit(problems[200:], "data.train")


@tabled("verifier, part, known")
def test_part_that_no_built_in_verifier_reports_is_refused_before_the_run(verifier, part, known):
    sums = [Problem("c", (), "#### 3", "gsm8k"), SUM]
    settings = {f"method.reward_weights.{part}": part}
    with Scorer(verifier, workers=1, timeout_s=30) as scorer:
        if known:
            scorer.check_parts(sums, settings)
            return
        with pytest.raises(ConfigError, match=r"method\.reward_weights\..*answer"):
            scorer.check_parts(sums, settings)


@pytest.mark.skipif(not HAS_SANDBOX, reason="code can score no row without a sandbox")
def test_parts_are_checked_for_every_verifier_of_the_rows_and_past_rows_that_fail():
    broken = Problem("b", (), "no tests", "code")
    good = Problem("g", (), json.dumps(["assert add(1, 2) == 3"]), "code")
    gsm8k = Problem("c", (), "#### 3", "gsm8k")
    with Scorer("auto", workers=1, timeout_s=30) as scorer:
        scorer.check_parts([gsm8k, broken, good], {"method.reward_weights.format": "format"})
        with refused("unknown_name", "method.reward_weights.steps"):
            scorer.check_parts([broken, good], {"method.reward_weights.steps": "steps"})
        with refused("unknown_name", "method.reward_weights.passed", shows="gsm8k"):
            scorer.check_parts([broken, good, gsm8k], {"method.reward_weights.passed": "passed"})
