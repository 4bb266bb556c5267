"""The verifier port: `(response: str, problem: Problem) -> Score | Failure`, the built-in ones by name, and how one is chosen.

A verifier of the user's own is given as `package.module:function` or `path/to/file.py:function`. It may also return a
bool, a number, or a dict with `score`; what it raises becomes a Failure. A weighted sum of verifiers is written out (combine.py).
"""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from postgrad.errors import ConfigError, did_you_mean
from postgrad.problem import Failure, Problem, Score
from postgrad.user_code import load_object

Verifier = Callable[[str, Problem], Any]  # Score | Failure, or what as_score makes one of


@dataclass(frozen=True)
class Spec:
    """Where a verifier's function is. `inline`: linear in time and harmless, so it runs in this process; others run in the pool.

    `seconds`: it has time limits of its own, which add up to less than this; the pool's limit for it is not shorter.
    """

    path: str
    inline: bool = False
    seconds: float = 0.0


COMBINED = "sum of "  # before the path of a weighted sum


VERIFIERS: dict[str, Spec] = {
    "exact": Spec("postgrad.verifiers.answers:exact", inline=True),
    "numeric": Spec("postgrad.verifiers.answers:numeric", inline=True),
    "boxed": Spec("postgrad.verifiers.answers:boxed", inline=True),
    "gsm8k": Spec("postgrad.verifiers.answers:gsm8k", inline=True),
    "gsm8k_strict": Spec("postgrad.verifiers.answers:gsm8k_strict", inline=True),
    "gsm8k_flexible": Spec("postgrad.verifiers.answers:gsm8k_flexible", inline=True),
    "choice": Spec("postgrad.verifiers.answers:choice", inline=True),
    "search": Spec("postgrad.verifiers.answers:search", inline=True),
    "r1_zero": Spec("postgrad.verifiers.answers:r1_zero", inline=True),
    "format": Spec("postgrad.verifiers.form:tag_format", inline=True),
    "box_format": Spec("postgrad.verifiers.form:box_format", inline=True),
    "think_format": Spec("postgrad.verifiers.form:think_format", inline=True),
    "length": Spec("postgrad.verifiers.form:length", inline=True),
    "overlong": Spec("postgrad.verifiers.form:overlong", inline=True),
    "bold": Spec("postgrad.verifiers.form:bold", inline=True),
    "math": Spec("postgrad.verifiers.math:math"),
    "math_answer": Spec("postgrad.verifiers.math:math_answer"),
    "oat": Spec("postgrad.verifiers.math:oat"),
    "think_math": Spec("postgrad.verifiers.math:think_math"),
    "r1_zero_math": Spec("postgrad.verifiers.math:r1_zero_math"),
    "geometry3k": Spec("postgrad.verifiers.math:geometry3k"),
    "code": Spec("postgrad.verifiers.code:code", seconds=90.0),
}

# What `reward.verifier=auto` takes for a data source, first match first; names are compared in lower case.
SOURCES: tuple[tuple[str, str], ...] = (
    ("arithmetic/digits", "exact"),
    ("arithmetic/boxed", "boxed"),
    ("*gsm8k*", "gsm8k"),
    ("*mmlu*", "choice"),
    ("*gpqa*", "choice"),
    ("arc", "choice"),
    ("arc[-_]*", "choice"),
    ("*[/_]arc", "choice"),
    ("*[/_]arc[-_]*", "choice"),
    ("searchr1*", "search"),
    ("*geometry3k*", "geometry3k"),
    ("*[/_-]geo3k*", "geometry3k"),
    ("geo3k*", "geometry3k"),
    ("code", "code"),
    ("code[-_]*", "code"),
    ("*humaneval*", "code"),
    ("*mbpp*", "code"),
    ("*codecontests*", "code"),
    ("*code_contests*", "code"),
    ("*codeforces*", "code"),
    ("*livecodebench*", "code"),
    ("apps", "code"),
    ("*[/_]apps", "code"),
    ("taco", "code"),
    ("*[/_]taco", "code"),
    ("math", "math"),
    ("math[-_ ]*", "math"),
    ("competition_math*", "math"),
    ("*openmathreasoning*", "math"),
    ("omr[0-9]*", "math"),
    ("*math500*", "math"),
    ("*math-500*", "math"),
    ("*hendrycks_math*", "math"),
    ("lighteval/math*", "math"),
    ("*/math-lighteval", "math"),
    ("*deepmath*", "math"),
    ("*deepscaler*", "math"),
    ("*openr1-math*", "math"),
    ("*numina*", "math"),
    ("qwen_*", "math"),
    ("aime*", "math"),
    ("*[/_]aime*", "math"),
    ("amc*", "math"),
    ("*[/_]amc*", "math"),
    ("*olympiad*", "math"),
    ("*minerva*", "math"),
)


def choose(problem: Problem) -> str:
    """The verifier for a problem's data source. A problem without a source is taken for maths if it asks for a \\boxed answer.

    A maths prompt that asks for a last line "Answer: ..." and says nothing of a box (DAPO's) is judged by that line.

    Raises:
        ConfigError: the source is not in the table.
    """
    source = problem.data_source.strip().lower()
    prompt = "\n".join(str(message.get("content", "")) for message in problem.messages)
    if not source and "\\boxed" in prompt:
        return "math"
    for pattern, name in SOURCES:
        if fnmatchcase(source, pattern):
            return (
                "math_answer"
                if name == "math" and "Answer:" in prompt and "\\boxed" not in prompt
                else name
            )
    raise ConfigError(
        f"no verifier is known for data_source {problem.data_source!r} (problem {problem.uid}); "
        f"name one with reward.verifier=NAME ({', '.join(VERIFIERS)}, package.module:function or file.py:function)"
    )


def find_verifier(name: str) -> Spec:
    """Where the verifier of this name is; a user's own is loaded once, so that a mistake shows before the run starts.

    A sum needs the pool if one of its terms does, and has the time of all of them.

    Raises:
        ConfigError: there is no such verifier, module, file or function, or a sum that cannot be read.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    if is_sum(name):
        from postgrad.verifiers.combine import check_arguments, terms_of

        terms = [term for term in terms_of(name) if term.name]
        specs = [find_verifier(term.name) for term in terms]
        check_arguments(terms, specs)
        return Spec(
            COMBINED + name, all(spec.inline for spec in specs), sum(spec.seconds for spec in specs)
        )
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        hint = did_you_mean(name, VERIFIERS)
        raise ConfigError(
            f"reward.verifier={name} is not a verifier; {hint} (your own is given as package.module:function or file.py:function)"
        )
    if place.endswith(".py"):
        place = str(Path(place).expanduser().resolve())
    spec = Spec(f"{place}:{function}")
    load(spec.path)
    return spec


def is_sum(name: str) -> bool:
    """Whether a name is written as a sum: it has a weight, a sign between spaces, arguments, or the part of a verifier."""
    part_of = ("." in name and name.partition(".")[0] in VERIFIERS) or (
        "." in name.rpartition(":")[2] and ":" in name
    )
    return part_of or bool(re.search(r"\*|\s[+-]\s|\(|^\s*-", name))


@cache
def load(path: str) -> Verifier:
    """The function at `package.module:function` or `/path/to/file.py:function`.

    Raises:
        ConfigError: it cannot be loaded; the message says what is missing.
    """
    if path.startswith(COMBINED):
        from postgrad.verifiers.combine import combined

        return combined(path.removeprefix(COMBINED))
    return _checked(load_function(path, "verifier"), path)


def load_function(path: str, kind: str) -> Any:
    """A user's own function, called `kind` in error messages. Raises ConfigError."""
    return load_object(path, f"{kind} {path}", callable, "function")


def _checked(function: Any, path: str) -> Verifier:
    """The function, if it can be called as a verifier is; one with verl's arguments is given them by their names."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function without a readable signature: calling it will tell
        return function
    if signature.parameters.keys() >= {"data_source", "solution_str", "ground_truth"}:
        wants_info = "extra_info" in signature.parameters

        def judge(response: str, problem: Problem) -> Any:
            info = {"extra_info": problem.extra.get("extra_info") or {}} if wants_info else {}
            return function(
                data_source=problem.data_source,
                solution_str=response,
                ground_truth=problem.ground_truth,
                **info,
            )

        return judge
    try:
        signature.bind_partial(
            "response", "problem"
        )  # further ones are numbers that the setting gives, as in brief(limit=100)
    except TypeError as error:
        hint = "one response (text) and one problem, with problem.ground_truth and problem.extra"
        raise ConfigError(
            f"verifier {path}{signature} cannot be called as function(response, problem): it gets {hint}"
        ) from error
    return function


def run_verifier(function: Verifier, response: str, problem: Problem) -> Score | Failure:
    """Call a verifier and make its result a Score or a Failure, whatever it returns or raises. MemoryError passes through."""
    try:
        return as_score(function(response, problem))
    except MemoryError:
        raise
    except (
        BaseException
    ) as error:  # also SystemExit: a verifier must not end the process that judges
        if isinstance(error, KeyboardInterrupt):
            raise
        return Failure("error", one_line(error))


def as_score(result: Any) -> Score | Failure:
    """A verifier's return value as a Score: a bool, a number, or a dict whose `score` is the value and other numbers the parts.

    Anything else, and NaN or infinity anywhere, is Failure("invalid"). Entries of a dict that are not numbers are left out.
    """
    if isinstance(result, Failure):
        return result
    if isinstance(result, Score):
        value, parts = result.value, result.parts
    elif isinstance(result, dict):
        if "score" not in result:
            return Failure(
                "invalid",
                f"the verifier returned a dict without 'score'; it has {sorted(map(str, result))[:8]}",
            )
        value, parts = (
            result["score"],
            {k: v for k, v in result.items() if k != "score" and _as_float(v) is not None},
        )
    else:
        value, parts = result, {}
    score = _as_float(value)
    if score is None:
        return Failure("invalid", f"the verifier returned {type(value).__name__}, not a number")
    numbers = {str(name): _as_float(part) for name, part in parts.items()}
    for name, part in ({"score": score} | numbers).items():
        if part is None or not math.isfinite(part):
            return Failure("invalid", f"the verifier returned {part} for {name}")
    return Score(score, {name: part for name, part in numbers.items() if part is not None})


def _as_float(value: Any) -> float | None:
    """A bool, a number or a scalar of NumPy or torch as a float; None for anything else, text above all."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def one_line(error: BaseException) -> str:
    """An exception's type and first line, short enough for a log."""
    try:
        text = str(error).strip().split("\n", 1)[0]
    except Exception:  # an exception may fail to print itself
        text = ""
    return f"{type(error).__name__}: {text}"[:200].removesuffix(": ")
