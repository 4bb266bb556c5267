"""The math verifiers, in the pool: equal and different answers, and hostile ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

from postgrad.problem import Problem, Score
from postgrad.verifiers.grading.answers import truth_of
from postgrad.verifiers.scorer import Scorer
from postgrad.verifiers.table import choose

DATA = Path(__file__).parents[3] / "shared" / "data"

# cs336, section 4, (given, truth): accepted by both of its modes, then by math-verify only.
SAME = table(__file__, "same")
# Rejected by both there, and the false positives it warns of, which are rejected here.
DIFFERENT = table(__file__, "different")


def test_math_accepts_and_rejects(grade):
    pairs = [(f"so \\boxed{{{g}}}", t) for g, t in (*SAME, *DIFFERENT)]
    values = grade("math", pairs)
    expected = [1.0] * len(SAME) + [0.0] * len(DIFFERENT)
    assert [p for p, v, e in zip(pairs, values, expected, strict=True) if v != e] == []


def test_math_needs_the_box(grade):
    assert grade(
        "math", [("The answer is 5", "5"), ("\\boxed{5", "5"), ("\\boxed{4} no \\boxed{5}", "5")]
    ) == [0, 0, 1]


# LUFFY's T11: response after the opening <think>, truth, the reference's verdict, ours.
T11 = table(__file__, "verl_math")


def test_think_math_table(grade):
    values = grade("think_math", [(response, truth) for response, truth, _, _ in T11])
    assert values == [row[3] for row in T11]


def test_r1_zero_math_multiplies(grade):
    tags = "t </think> <answer>{}</answer>"
    responses = [
        tags.format("2^3"),
        tags.format("The answer is 8"),
        "<answer>2^3</answer>",
        tags.format("9"),
        "t </think>  <answer>8</answer>",
    ]
    assert grade("r1_zero_math", [(response, "8") for response in responses]) == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}",
        "9^{9^{9^9}}",
        "99999999!",
        "((9!)!)!",
        "2^{99999999}",
        "(" * 500 + ")" * 500,
        "\\sqrt{" * 200 + "2" + "}" * 200,
        "9" * 100_000,
        "__import__('os').system('touch /tmp/postgrad-was-here')",
        "10**10**10",
        "\\text{" * 100 + "}" * 100,
    ],
)
def test_hostile_answers_are_wrong_without_algebra(grade, answer):
    assert grade("math", [(f"\\boxed{{{answer}}}", "\\frac{x}{3}")]) == [0.0]
    assert not Path("/tmp/postgrad-was-here").exists()


# (given, truth): math-verify's algebra takes over 10 s for each.
ENDLESS = [
    ("(x+y+z+w+1)^{90}", "(x+1)^2"),
    ("y^2 = 4x^4 - 4x", "y^2 = 4x^3 - 4x"),
    ("11^{2020}", "\\frac{e^{-2 t}}{15}+C_{1} e^{t}+C_{2} e^{-t}+ C_{3} \\cos (t)+C_{4} \\sin (t)"),
]


def test_endless_algebra_is_a_wrong_answer_and_no_failure(grade):
    assert grade("math", [(f"\\boxed{{{given}}}", truth) for given, truth in ENDLESS]) == [0, 0, 0]


def test_the_time_limit_stops_algebra_and_gives_back_the_signal():
    code = """if True:
        import signal
        from postgrad.verifiers.grading import algebra
        algebra.LIMIT_S = 0.05
        with algebra.time_limit():
            while True:
                try:
                    while True:
                        pass
                except Exception:
                    pass
        assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL
        assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_no_string_reaches_eval():
    code = """if True:
        from postgrad.verifiers.grading import math
        import sympy
        assert sympy.Number("7") == 7 and sympy.Number("0.5") == 0.5
        assert sympy.Number("3/2") == sympy.Rational(3, 2)
        for text in ("x", "2+2", "__import__('os')", "(1).__class__"):
            try:
                sympy.sympify(text)
            except ValueError:
                continue
            raise SystemExit(f"{text} was evaluated")
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "bupo").is_dir(), reason="no real data here")
def test_every_real_truth_is_its_own_right_answer(math_pool):
    from pyarrow import parquet

    problems = []
    for file in sorted(DATA.glob("*/*.parquet")):
        for row in parquet.read_table(file, columns=["data_source", "reward_model"]).to_pylist():
            problems.append(
                Problem(file.name, (), str(row["reward_model"]["ground_truth"]), row["data_source"])
            )
    items = [(f"so \\boxed{{{truth_of(problem)}}}.", problem) for problem in problems]
    results = math_pool.verify(items, [choose(problem) for problem in problems])
    assert [
        p.ground_truth
        for p, r in zip(problems, results, strict=True)
        if not isinstance(r, Score) or r.value != 1
    ] == []


@pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason="no real data here")
def test_gsm8k_solutions_are_right_in_both_forms():
    rows = [
        json.loads(line)["answer"]
        for line in (DATA / "gsm8k" / "test.jsonl").read_text().splitlines()
    ]
    problems = [Problem("p", (), answer, "openai/gsm8k") for answer in rows]
    with Scorer() as scorer:
        for responses in (rows, [answer.replace("####", "so") for answer in rows]):
            assert all(
                isinstance(result, Score) and result.value == 1
                for result in scorer.score(problems, responses)
            )
        others = scorer.score(problems, rows[1:] + rows[:1])
    assert sum(result.value for result in others if isinstance(result, Score)) < 0.05 * len(rows)


def test_a_word_is_no_product_of_its_letters(grade) -> None:
    pairs = [(r"\boxed{Davdi}", "David"), (r"\boxed{David}", "David"), (r"\boxed{yx}", "xy")]
    assert grade("math", pairs) == [0.0, 1.0, 1.0]
