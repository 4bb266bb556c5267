"""combine.py: sums of verifiers as one setting, their parts, and what is wrong with one that cannot be read."""

import pytest

from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.combine import Term, combined, terms_of
from postgrad.verifiers.scorer import Scorer
from postgrad.verifiers.verifier import find_verifier, is_sum

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
def test_sums_are_read(text, terms):
    assert is_sum(text) and terms_of(text) == terms


@pytest.mark.parametrize(
    "name", ["math", "mth", "package.module:function", "folder/my-file.py:right", "a.b.c:f", ""]
)
def test_plain_names_are_not_sums(name):
    assert not is_sum(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mth + 0.1*format", "did you mean math?"),
        ("math + 0.1*fromat", "did you mean format?"),
        ("math + ", "is not"),
        ("math * 0.1", "is not weight*verifier"),
        ("math + x y", "is not weight*verifier"),
        ("overlong(4)", "is not name=number"),
        ("overlong(limit=many)", "is not name=number"),
        ("overlong(limitt=4)", "did you mean limit?"),
        ("exact(limit=4)", "has no argument limit"),
        ("math + math", "stands there twice"),
        ("2 - 1", "no verifier in it"),
        ("math + nowhere.py:right", "there is no such file"),
    ],
)
def test_wrong_sums_are_one_clear_line(text, message):
    with pytest.raises(ConfigError) as error:
        find_verifier(text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_sum_needs_the_pool_if_a_term_does():
    assert find_verifier("boxed + 0.1*format").inline is True
    assert find_verifier("math + 0.1*format").inline is False
    assert find_verifier("code + 0.1*format").seconds == find_verifier("code").seconds > 0


def test_parts_are_the_terms_and_their_parts():
    verifier = combined("2*boxed + 0.5*format - 0.25")
    assert verifier("\\boxed{42}", PROBLEM) == Score(
        1.75, {"boxed": 1.0, "boxed.answer": 1.0, "boxed.format": 1.0, "format": 0.0}
    )
    tagged = "</think> <answer>\\boxed{41}</answer>"
    assert verifier(tagged, PROBLEM) == Score(
        0.25, {"boxed": 0.0, "boxed.answer": 0.0, "boxed.format": 1.0, "format": 1.0}
    )
    assert combined("3*boxed.format")(tagged, PROBLEM) == Score(3.0, {"boxed.format": 1.0})
    two = combined("length(limit=10) - length(limit=20)")("x" * 10, PROBLEM)
    assert (
        isinstance(two, Score)
        and two.value == pytest.approx(0.5)
        and two.parts["length(limit=20)"] == 0.5
    )


def test_one_failure_fails_the_sum_by_name():
    result = combined("boxed + gsm8k")("\\boxed{x}", Problem("p1", (), "x", "math"))
    assert (
        isinstance(result, Failure)
        and result.kind == "invalid"
        and result.reason.startswith("gsm8k: ")
    )
    result = combined("boxed.color")("\\boxed{42}", PROBLEM)
    assert isinstance(result, Failure) and "no part color" in result.reason
    result = combined("overlong(limit=4, buffer=20)")("x", PROBLEM)
    assert isinstance(result, Failure) and "at most the limit" in result.reason


def test_judge_takes_a_sum_and_auto_in_it(hostile):
    problems = [Problem("a", (), "42", "openai/gsm8k"), Problem("b", (), "8", "math_dapo")]
    tags = "t </think> <answer>{}</answer>"
    with Scorer("auto + 0.1*format", workers=1, timeout_s=30) as scorer:
        scorer.check(problems)
        results = scorer.score(
            problems * 2, ["#### 42", "\\boxed{2^3}", tags.format("42"), tags.format("\\boxed{9}")]
        )
    assert [r.value for r in results if isinstance(r, Score)] == pytest.approx([1.0, 1.0, 1.1, 0.1])
    assert (
        isinstance(results[0], Score)
        and "gsm8k" in results[0].parts
        and isinstance(results[1], Score)
        and "math" in results[1].parts
    )
    with Scorer(f"0.5*{hostile('length')} + exact", workers=1, timeout_s=30) as scorer:
        (result,) = scorer.score(problems[:1], ["42"])
    assert isinstance(result, Score) and result.value == 2.0
    with pytest.raises(ConfigError, match="did you mean format"):
        Scorer("auto + 0.1*fromat")
