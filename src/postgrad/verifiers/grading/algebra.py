"""Equality of two answers by their values, and where values cannot decide, by math-verify.

Only the pool's child processes import this. Values at fixed points decide most pairs at once.
math-verify's computer algebra has LIMIT_S of processor time for the rest; what it has not shown to
be equal by then is not. A hostile answer can keep C code busy for hours, or use all memory: the
pool kills the child. Answers are never evaluated as Python.
"""

import logging
import random
import re
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NoReturn

import mpmath
import sympy
import sympy.physics.units  # simplify() imports it, and it needs the parser replaced below
from latex2sympy2_extended import latex2sympy, normalize_latex
from math_verify import LatexExtractionConfig, verify
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef
from sympy.parsing import sympy_parser

LIMIT_S = 1.0  # of processor time, to compare two answers that were parsed
SCALES = (1, 2, 3, 5, 12)  # of the points at which expressions are compared
DIGITS = 30  # of a value
TOLERANCE = mpmath.mpf("1e-20")  # relative difference of equal ratios

_POWER_T = re.compile(r"\^\s*(?:T|\{\s*T\s*\})")
# A letter with a subscript, primes or both: E_{1}, f', x_{max}'; or a command, which has no value
# of its own: \log_2, \sum_{i}.
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi "
    "pi rho sigma tau upsilon phi varphi chi psi omega ell "
    "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega"
)
_NAME = re.compile(
    rf"((?:\\(?:{'|'.join(_GREEK.split())})|(?P<command>\\[A-Za-z]+)|[A-Za-z]))"
    r"(\s?_\s?(?:\{(?:[^{}]|\{[^{}]*\})*\}|[A-Za-z0-9]))?"
    r"((?:\s?(?:'|\^\s?\\prime|\^\s?\{(?:\\prime|')+\}))*)"
)
_WORD = re.compile(r"\s*[A-Za-z]{4,}\s*")
_STEPS = (
    sympy.floor,
    sympy.ceiling,
    sympy.Mod,
    sympy.Abs,
    sympy.sign,
    sympy.Min,
    sympy.Max,
    sympy.Piecewise,
)
# Units are split off before (equality.py). math-verify's own list of units has c, d, m, t and other
# letters, which are mostly variables: k t is not k.
_NORMALIZATION = replace(LatexExtractionConfig().normalization_config, units=False, boxed="none")


def _numeral(text: str, *_: Any, **__: Any) -> Any:
    """Read 3, 3/2 and 1.5 and refuse everything else, in place of sympy's string parser."""
    if re.fullmatch(r"\s*[+-]?[0-9]+(?:/[0-9]+)?\s*", text):
        return sympy.Rational(text.strip())
    if re.fullmatch(r"\s*[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)\s*", text):
        return sympy.Float(text.strip())
    return _refuse()


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("answers are not evaluated as Python")


# sympy evaluates strings with eval(), and the LaTeX parser passes it numerals. No eval here.
sympy_parser.parse_expr = _numeral
sympy_parser.eval_expr = _refuse
for _logger in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_logger).setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", module="sympy")


class _OutOfTime(BaseException):  # sympy and math-verify catch every Exception
    pass


@contextmanager
def time_limit() -> Iterator[None]:
    """Leave the block after LIMIT_S of processor time; in another than the main thread, never."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> NoReturn:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        # Again later, in case that code caught it.
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S, LIMIT_S / 4)
        yield
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _OutOfTime:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        sympy.core.cache.clear_cache()  # objects whose properties were being computed
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@lru_cache(maxsize=256)
def parse_latex(text: str) -> Any:
    """Return what latex2sympy reads in the whole text, or None if it cannot read all of it.

    A chain of equations that it cannot read counts as its last part. The parser drops the
    transpose A^T, and with it the power 2^T; it keeps ^t. It drops primes and many subscripts, so
    letters with one become new names.
    """
    text = _NAME.sub(_new_name, _POWER_T.sub("^{t}", text))
    text = normalize_latex(text, _NORMALIZATION)
    for part in dict.fromkeys((text, get_last_eq(text))):
        try:
            return latex2sympy(
                part, is_real=not should_treat_as_complex(part), normalization_config=None
            )
        except Exception:
            continue
    return None


def _new_name(match: re.Match[str]) -> str:
    letter, command, subscript, primes = match.groups("")
    if command or not (subscript or primes):
        return match.group()
    subscript = re.sub(r"[\s{}]|\\(?:text|mathrm|rm|max|min)(?![A-Za-z])", "", subscript)
    num_primes = primes.count("'") + primes.count("prime")
    key = f"{letter}{subscript}/{num_primes}".lower()  # the parser ignores case
    return f"w_{{{int.from_bytes(blake2b(key.encode(), digest_size=4).digest())}}}"


def same_algebra(given: str, truth: str) -> bool | None:
    """Return whether two formulas are equal by their values or by math-verify.

    A word equals itself only: it is no product of its letters. None: the parser cannot read one.
    """
    if _WORD.fullmatch(given) or _WORD.fullmatch(truth):
        return given.strip() == truth.strip() or None
    one, other = parse_latex(given), parse_latex(truth)
    if one is None or other is None:
        return None
    with time_limit():
        one, other = _without_names(_with_symbols(one), _with_symbols(other))
        are_equations = isinstance(one, sympy.Eq) and isinstance(other, sympy.Eq)
        decided = _same_equation(one, other) if are_equations else same_value(one, other)
        if decided is not None:
            return decided
        return bool(verify([other], [one], timeout_seconds=None))
    return False


def _with_symbols(expression: Any) -> Any:
    """Return the expression with f(x) of unknown functions replaced by symbols."""
    if not isinstance(expression, sympy.Basic):
        return expression
    calls = expression.atoms(AppliedUndef)
    symbols = {call: sympy.Symbol(str(call), real=True) for call in calls}
    return expression.xreplace(symbols) if symbols else expression


def _without_names(one: Any, other: Any) -> tuple[Any, Any]:
    """Return the right sides where both are x = ..., or where only one of them is an equation.

    The caller has seen that what is left of the first one's sign is a name.
    """
    if isinstance(one, sympy.Eq) and isinstance(other, sympy.Eq):
        is_named = isinstance(one.lhs, sympy.Symbol) and one.lhs == other.lhs
        return (one.rhs, other.rhs) if is_named else (one, other)
    if isinstance(one, sympy.Eq):
        one = one.rhs
    if isinstance(other, sympy.Eq) and isinstance(other.lhs, sympy.Symbol):
        other = other.rhs
    return one, other


def _same_equation(one: Any, other: Any) -> bool | None:
    """Return True if the difference of the sides is the same up to a constant factor.

    An equation may have other forms with the same solutions, which values do not show: None. One
    without variables, 2+3=5, has the same sides as another, or is another one: math-verify takes
    it for any other such equation.
    """
    if not all(isinstance(side, sympy.Expr) for side in (*one.args, *other.args)):
        return None
    if not one.free_symbols | other.free_symbols:
        sides = same_value(one.lhs, other.lhs), same_value(one.rhs, other.rhs)
        return None if None in sides else all(sides)
    values, other_values = _values(one.lhs - one.rhs), _values(other.lhs - other.rhs)
    if values is None or other_values is None:
        return None
    with mpmath.workdps(DIGITS):
        pairs = zip(values, other_values, strict=True)
        ratios = [a / b for a, b in pairs if a is not None and b]
        is_constant = all(abs(ratio - ratios[0]) <= abs(ratio) * TOLERANCE for ratio in ratios)
    return True if len(ratios) > 1 and is_constant and ratios[0] != 0 else None


def same_value(one: Any, other: Any) -> bool | None:
    """Return whether two expressions have the same value at every point, or None if unknown.

    Unknown are decimals, which may be rounded, a single letter, what has no value, and functions
    with steps and corners that have the same values at these points.
    """
    for expression in (one, other):
        if not isinstance(expression, sympy.Expr) or isinstance(expression, sympy.Symbol):
            return None
        if expression.has(sympy.Float, sympy.UnevaluatedExpr):
            return None
    if one == other:
        return True
    if not one.free_symbols | other.free_symbols:
        # Of the difference, so that 100!+1 is not 100!+2.
        difference = _values(one - other, SCALES[:1])
        return None if difference is None or difference[0] is None else difference[0] == 0
    values, other_values = _values(one), _values(other)
    if values is None or other_values is None:
        return None
    every = zip(values, other_values, strict=True)
    pairs = [(a, b) for a, b in every if a is not None and b is not None]
    if any(abs(a - b) > TOLERANCE * max(abs(a), abs(b)) for a, b in pairs):
        return False
    has_steps = one.has(*_STEPS) or other.has(*_STEPS)
    return True if len(pairs) > 1 and not has_steps else None


def _values(expression: sympy.Expr, scales: Sequence[int] = SCALES) -> list[Any] | None:
    """Return the values at one point per scale, None where there is none; None if not a number.

    The value of a variable follows from its name, so that it is the same in all expressions.
    """
    has_variables = bool(expression.free_symbols)
    if has_variables and expression.has(sympy.Sum, sympy.Product):
        return None  # they may end at a variable, which is no whole number here
    values: list[Any] = []
    for scale in scales:
        numbers: dict[Any, Any] = {}
        for symbol in expression.free_symbols:
            value = random.Random(f"{symbol} {scale}").randint(-1000, 1000)
            numbers[symbol] = sympy.Rational((2 * value + 1) * scale, 2000)
        try:
            value = expression.evalf(DIGITS, subs=numbers, strict=has_variables)
            values.append(_as_number(value))
        except PrecisionExhausted:  # large terms cancel
            values.append(None)
        except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
            return None
    return values


def _as_number(value: Any) -> Any:
    """Return a value as mpmath's number, or None for infinity and what is undefined."""
    if value.has(sympy.nan, sympy.zoo, sympy.oo):
        return None
    # Where terms cancel to 0, evalf returns a tiny number of one bit.
    parts = [0 if getattr(part, "_prec", 0) == 1 else part for part in value.as_real_imag()]
    with mpmath.workdps(DIGITS):
        return mpmath.mpc(*map(mpmath.mpmathify, parts))
