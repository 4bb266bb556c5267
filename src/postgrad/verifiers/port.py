"""The verifier port: a function `(response: str, problem: Problem) -> Score | Failure`.

A user's verifier may also return a bool, a number, or a dict with `score` or `reward`. What it
raises becomes a Failure.
"""

import math
from collections.abc import Callable
from typing import Any

from postgrad.problem import Failure, Problem, Score
from postgrad.user_code import place_of

Verifier = Callable[[str, Problem], Any]  # returns a Score, a Failure, or a value for as_score


def run_verifier(verifier: Verifier, response: str, problem: Problem) -> Score | Failure:
    """Call a verifier and return a Score or a Failure, whatever it returns or raises.

    MemoryError and KeyboardInterrupt pass through. SystemExit does not: a verifier must not end
    the process that runs it.
    """
    try:
        return as_score(verifier(response, problem))
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        return Failure("error", one_line(error) + place_of(error))


def as_score(result: Any) -> Score | Failure:
    """Return a verifier's return value as a Score.

    Accepted are a Score, a Failure, a bool, a number, and a dict whose `score` (or `reward`, as in
    CS336) is the value and whose other numbers are the parts. Everything else, and NaN or infinity
    anywhere, is Failure("invalid").
    """
    if isinstance(result, Failure):
        return result
    value = result
    parts: dict[Any, Any] = {}
    if isinstance(result, Score):
        value = result.value
        parts = result.parts
    elif isinstance(result, dict):
        key = "score" if "score" in result else "reward"
        if key not in result:
            keys = sorted(map(str, result))[:8]
            return Failure(
                "invalid", f"the verifier returned a dict without 'score'; its keys are {keys}"
            )
        value = result[key]
        for name, part in result.items():
            if name != key and _as_float(part) is not None:
                parts[name] = part
    score = _as_float(value)
    if score is None:
        kind = "None" if value is None else type(value).__name__
        return Failure("invalid", f"the verifier returned {kind}, not a number")
    numbers = {str(name): _as_float(part) for name, part in parts.items()}
    for name, number in ({"score": score} | numbers).items():
        if number is None or not math.isfinite(number):
            return Failure("invalid", f"the verifier returned {number} for {name}")
    return Score(score, {name: part for name, part in numbers.items() if part is not None})


def _as_float(value: Any) -> float | None:
    """Return a bool, a number or a scalar of NumPy or torch as a float; None for other values."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message, at most 200 characters."""
    try:
        message = str(error).strip().split("\n", 1)[0]
    except Exception:  # __str__ of an exception may raise
        message = ""
    return f"{type(error).__name__}: {message}"[:200].removesuffix(": ")
