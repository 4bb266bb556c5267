"""Equality of answers: numbers, units, normalized LaTeX; what text can and cannot decide."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import tabled

from postgrad.verifiers.grading.closed_form import closed_value
from postgrad.verifiers.grading.equality import (
    MAX_ANSWER,
    compare,
    normalize,
    number,
    same_number,
    split_unit,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("42.", 42),
        ("42.0", 42),
        ("-7", -7),
        ("−7", -7),
        ("+7", 7),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("1,234", 1234),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1{,}000", 1000),
        ("1 000", 1000),
        ("1\\,000", 1000),
        ("$5", 5),
        ("\\$5", 5),
        ("-$5", -5),
        ("$57$", 57),
        ("50%", 50),
        ("50\\%", 50),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("\\frac34", Fraction(3, 4)),
        ("\\dfrac{-3}{4}", Fraction(-3, 4)),
        ("-\\tfrac{3}4", Fraction(-3, 4)),
        ("7 3/4", Fraction(31, 4)),
        ("-7 3/4", Fraction(-31, 4)),
        ("7\\frac{3}{4}", Fraction(31, 4)),
    ],
)
def test_number_reads(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1,23",
        "1,2345",
        "1 2",
        "1$2",
        "5%3",
        "five",
        "x",
        "1/0",
        "1/2/3",
        "0x10",
        "1_000",
        "٣",
        "1..",
        "--1",
        "1e9999",
        "nan",
        "inf",
        "9" * 1000,
        "1e",
        ".",
        "-",
        "1/",
        "\\frac{1}{0}",
        "3 1/0",
        "10**10",
    ],
)
def test_number_refuses(text):
    assert number(text) is None


@given(st.integers(-(10**15), 10**15))
def test_number_reads_what_python_writes(n):
    assert number(f"{n:,}") == number(str(n)) == number(f"{n}.00") == n


@given(st.fractions())
def test_number_reads_fractions(value):
    assert number(f"{value.numerator}/{value.denominator}") == value


def test_percent_is_the_number_or_a_hundredth_of_it():
    assert same_number("50%", "50") and same_number("50%", "0.5") and same_number("0.5", "50\\%")
    assert not same_number("50%", "5")
    assert not same_number("50", "0.5")
    assert not same_number("50%", "0.5%")


@tabled("text, answer, unit")
def test_units(text, answer, unit):
    assert split_unit(text) == (answer, unit)


@tabled("one, other")
def test_normalize_makes_equal(one, other):
    assert normalize(one) == normalize(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("7 3/4", "73/4"), ("1 2", "12"), ("x\\to1", "x\\leftarrow1"), ("a", "A"), ("(1,2)", "[1,2]")],
)
def test_normalize_keeps_apart(one, other):
    assert normalize(one) != normalize(other)


@tabled("given, truth, verdict")
def test_compare(given, truth, verdict):
    assert compare(given, truth) is verdict


def test_overlong_answers_are_compared_as_text():
    long = "1+" * MAX_ANSWER
    assert compare(long, long) is True
    assert compare(long, "1") is False
    assert compare("1", long) is False


@given(st.text(max_size=60))
def test_compare_never_fails_and_an_answer_equals_itself(text):
    same = compare(text, text)
    assert same is True or not text.strip()
    assert compare(text, "17.25") in (True, False, None)


@tabled("text, value")
def test_closed_forms_have_a_value(text, value):
    assert closed_value(text) == pytest.approx(value, rel=1e-12)


# What can be read in two ways, is not a number, or would take long, has none: algebra decides.
NO_VALUE = [
    "",
    "x",
    "7\\frac{3}{4}",
    "1/2\\pi",
    "2 3",
    "\\pi2",
    "2^3^2",
    "9^{999}",
    "2^{99999}",
    "(2",
    "1,2",
    "1/0",
    "\\sqrt{-1}",
]


@pytest.mark.parametrize("text", [*NO_VALUE, "(" * 50 + "1" + ")" * 50, "1+" * 200 + "1"])
def test_other_texts_have_no_closed_value(text):
    assert closed_value(text) is None


@tabled("given, truth, verdict")
def test_different_numbers_are_rejected_without_algebra(given, truth, verdict):
    assert compare(given, truth) is verdict
