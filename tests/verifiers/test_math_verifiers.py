"""The math verifiers, in the pool: equal and different answers, and hostile ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.problem import Problem, Score
from postgrad.verifiers.grading.answers import truth_of
from postgrad.verifiers.scorer import Scorer
from postgrad.verifiers.table import choose

DATA = Path(__file__).parents[3] / "shared" / "data"

# cs336, section 4, (given, truth): accepted by both of its modes, then by math-verify only.
SAME = [
    ("42.0", "42"),
    ("1/2", "0.5"),
    ("\\frac12", "\\frac{1}{2}"),
    ("\\dfrac{1}{2}", "\\frac{1}{2}"),
    ("1,000", "1000"),
    ("1{,}000", "1000"),
    ("1 000", "1000"),
    ("\\$5", "5"),
    ("50\\%", "50"),
    ("x=5", "5"),
    ("(1,2)", "(1, 2)"),
    ("1 and 2", "1,2"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("90^\\circ", "90"),
    ("90 degrees", "90"),
    ("10 cm", "10"),
    ("7 3/4", "31/4"),
    ("7 3/4", "7.75"),
    ("31/4", "7.75"),
    ("\\text{even}", "even"),
    ("Even", "even"),
    ("(A)", "A"),
    ("1e3", "1000"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"),
    ("(1,2)\\cup(3,4)", "(3,4)\\cup(1,2)"),
    ("4i+3", "3+4i"),
    ("42.", "42"),
    ("\\(42\\)", "42"),
    ("2/4", "1/2"),
    ("6/2", "3"),
    ("2^3", "8"),
    ("2^{10}", "1024"),
    ("10^6", "1000000"),
    ("2\\cdot 3", "6"),
    ("\\{1,2\\}", "2,1"),
    ("2,1", "1,2"),
    ("50\\%", "0.5"),
    ("0.3333333333", "1/3"),
    ("**42**", "42"),
    ("abc=5", "5"),
    ("2x+1=y", "y=2x+1"),
    ("x\\in[-2,7]", "[-2,7]"),
    ("4:3", "4/3"),
    # ours: rejected there, and right all the same
    ("5 dollars", "5"),
    ("1\\,000", "1000"),
    ("10\\%", "0.1"),
    ("1.5\\times10^3", "1500"),
    ("2+3=5", "5"),
    ("f(3)=10", "10"),
    ("(3,\\infty)", "x>3"),
    ("v v^{T}", "vv^T"),
    ("\\exp(T)", "e^T"),
    ("4^{T/2}", "2^T"),
    ("\\sqrt{4 \\pi g r_{0}^{2} \\rho_{0}}", "\\sqrt{4\\pi g \\rho_0 r_0^2}"),
    ("5 (i-1)", "-5+5i"),
    ("f'(x) = x+x", "2x"),
    ("-bc + ad", "ad - bc"),
    ("c + x", "x + c"),
    ("sqrt(2)", "\\sqrt{2}"),
    ("1/(1+sqrt(1 + sqrt(2)))", "\\frac{1}{1+\\sqrt{1+\\sqrt{2}}}"),
    ("\\frac{2}{6} E_1", "\\frac{1}{3} E_{1}"),
    ("C_2 e^{-t} + C_1 e^t", "C_{1} e^{t}+C_{2} e^{-t}"),
    ("y = C_1 e^t", "C_{1} e^{t}"),
    ("n(n-1)!", "n!"),
    ("f(0) = 2/2", "f(0)=1"),
    ("|x|", "\\sqrt{x^2}"),
    (
        "d=\\sqrt{74}, M=(1.3,-1.3)",
        "d=\\sqrt{74}, M=(\\frac{13}{10},-\\frac{13}{10})",
    ),
    ("$2/4$", "$\\frac{1}{2}$"),
    ("$2$ and $1$", "1,2"),
    ("min at $x=0$", "$x=0$"),
    ("\\{69, 84\\}", "$69$,$84$"),
    ("\\frac{1}{c_{a}}", "\\dfrac{1}{C_A}"),
    ("$\\min$ at $x=0/2$, max at $x=1$", "$\\min$ at $x=0$, max at $x=1$"),
]
# Rejected by both there, and the false positives it warns of, which are rejected here.
DIFFERENT = [
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("0.333", "1/3"),
    ("3.14159", "\\pi"),
    ("\\frac{2}{3}", "0.6667"),
    ("72 clips", "72"),
    ("10 m/s", "10"),
    ("1,23", "123"),
    ("1 million", "1000000"),
    ("five", "5"),
    ("3 hours", "3 minutes"),
    ("5 m", "5 km"),
    ("x=5", "y=5"),
    ("a+1", "c+1"),
    ("(a,b)", "(c,b)"),
    ("no", "on"),
    ("11_2", "11_3"),
    ("7 3/4", "73/4"),
    ("a+2b+3c=0", "0"),  # math-verify alone takes the right side of any equation
    ("x^2=4", "4"),
    ("2x=10", "10"),
    ("6", "5"),
    ("-\\infty", "\\infty"),
    (
        "A",
        "A^T",
    ),  # math-verify alone drops the transpose of letters, also where T is a power, and primes
    ("v^2", "vv^T"),
    ("5x", "5^Tx"),
    ("1+r", "(1+r)^{T}"),
    ("f(x)", "f'(x)"),
    ("y'", "y''"),
    ("k", "k t"),  # math-verify alone takes a last letter after a space for a unit: c, d, m, t
    ("v t", "v"),
    ("7 c", "7"),
    ("n = k m", "n = k"),
    ("5 \\text{ or } 6", "5"),
    ("", "5"),
    # what the parser drops: subscripts, primes, and all but one of several formulas
    ("\\frac{1}{3} E_{1}", "\\frac{1}{3} E_{2}"),
    ("I_1(2\\sqrt{z})", "I_0(2\\sqrt{z})"),
    ("\\Gamma_0(2)", "\\Gamma_1(2)"),
    ("V' = V E^{-1}", "V' = V E^{-1/2}"),
    (
        "d=74, M=(\\frac{13}{10},-\\frac{13}{10})",
        "d=\\sqrt{74}, M=(\\frac{13}{10},-\\frac{13}{10})",
    ),
    ("$\\max$ at $x=0$", "$\\max$ at $x=0$, min at $x= \\pm 11$"),
    ("$\\max$ at $x=0$, min at $x= \\pm 11$", "$\\max$ at $x=0$"),
    ("$\\max$ at $x= \\pm 11$, min at $x=0$", "$\\max$ at $x=0$, min at $x= \\pm 11$"),
    # math-verify takes equations without variables and tiny numbers for equal
    ("f(0) = 2", "f(0)=1"),
    ("2+3=6", "2+3=5"),
    ("3^{-343}", "3^{-243}"),
    # equal at many points, or in many digits
    ("101! - 2", "101! - 1"),
    ("\\lfloor\\frac{2n-2}{5}\\rfloor", "\\lfloor\\frac{2n-1}{5}\\rfloor"),
    ("|x-1000|", "1000-x"),
    ("\\sqrt{x^2}", "x"),
    ("(x, y) = 1", "(x, y) = 0"),
]


def test_math_accepts(grade):
    wrong = [
        pair
        for pair, value in zip(
            SAME, grade("math", [(f"so \\boxed{{{g}}}", t) for g, t in SAME]), strict=True
        )
        if value != 1
    ]
    assert wrong == []


def test_math_rejects(grade):
    pairs = [(f"so \\boxed{{{g}}}", t) for g, t in DIFFERENT]
    wrong = [
        pair for pair, value in zip(DIFFERENT, grade("math", pairs), strict=True) if value != 0
    ]
    assert wrong == []


def test_math_needs_the_box(grade):
    assert grade(
        "math", [("The answer is 5", "5"), ("\\boxed{5", "5"), ("\\boxed{4} no \\boxed{5}", "5")]
    ) == [0, 0, 1]


# LUFFY's T11: response after the opening <think>, truth, the reference's verdict, ours.
T11 = [
    ("x </think> \\boxed{\\frac12}", "0.5", 1, 1),
    ("x \\boxed{5}", "5", 0, 0),
    ("x \\boxed{5} </think> done", "5", 0, 0),
    ("x </think> b \\boxed{3} </think> \\boxed{4}", "3", 1, 1),
    ("x </think> b \\boxed{3} </think> \\boxed{4}", "4", 0, 0),
    ("x </think> The answer is 57", "57", 1, 1),
    ("x </think> The answer is 57 because of x.", "57", 1, 1),
    ("x </think> The answer is $\\frac{114}{2}$.", "57", 1, 1),
    ("x </think> The answer is 58", "57", 0, 0),
    ("x </think> \\boxed{57}", "$57$", 1, 1),
    ("x </think> \\boxed{A}", "A", 1, 1),
    ("x </think> \\boxed{\\text{A}}", "A", 1, 1),
    (
        "x </think> ANSWER: A",
        "A",
        0,
        1,
    ),  # its evaluation prompts ask for this very form, its grader cannot read it
    ("x </think> \\boxed{1,2}", "2,1", 1, 1),
    ("x </think> \\boxed{x=5}", "5", 1, 1),
]


def test_think_math_table(grade):
    values = grade("think_math", [(response, truth) for response, truth, _, _ in T11])
    assert [
        (row[0], value) for row, value in zip(T11, values, strict=True) if value != row[3]
    ] == []


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
