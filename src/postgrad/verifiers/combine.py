"""Weighted sums of verifiers in one setting: `math + 0.1*format - 0.2*overlong(limit=4000)`.

A term is a number or `weight*verifier`. The verifier is a built-in name or a path and may have
numbers as arguments. `.part` takes one of its named parts instead of its value: `0.5*code.passed`.
The parts of the sum are the unweighted terms by name, and the parts of each term as `term.part`.
If one term is a Failure, the sum is that Failure.
"""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from postgrad.errors import ConfigError, did_you_mean
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.port import Verifier, run_verifier
from postgrad.verifiers.table import VERIFIERS

LARGEST_WEIGHT = 1e6
MODEL_PREFIX = "model:"  # of a term that is a reward model; see model_terms.py
_SIGN = re.compile(r"\s+([+-])\s+")
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+"
_TERM = re.compile(rf"(?:({_NUMBER})\s*\*\s*)?([^\s()*]+)\s*(?:\(([^()]*)\))?(?:\.(\w+))?")
_ARGUMENT = re.compile(rf"\s*(\w+)\s*=\s*(-?(?:{_NUMBER}))\s*")


@dataclass(frozen=True)
class Term:
    """`weight` times a verifier's value or times one of its parts; without a name, a constant."""

    weight: float
    name: str = ""
    part: str = ""
    arguments: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The term without its weight, as it is named in the parts of the sum."""
        label = self.name
        if self.arguments:
            pairs = [f"{name}={value:g}" for name, value in self.arguments.items()]
            label += f"({','.join(pairs)})"
        if self.part:
            label += f".{self.part}"
        return label


def parse_sum(text: str) -> list[Term]:
    """Return the terms of a sum, in order.

    Raises:
        ConfigError: the text is malformed, names a term twice or has no verifier.
    """
    body = text.strip()
    first_sign = "+"
    if body.startswith("-"):
        first_sign = "-"
        body = body[1:].strip()
    pieces = [first_sign, *_SIGN.split(body)]  # sign, term, sign, term, ...
    terms = [
        _parse_term(piece.strip(), 1.0 if sign == "+" else -1.0, text)
        for sign, piece in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    labels = [term.label for term in terms if term.name]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(
                f"reward.verifier={text}: {label} is there twice; write it once, with one weight"
            )
    if not labels:
        raise ConfigError(
            f"reward.verifier={text}: it has no verifier; {did_you_mean(text, VERIFIERS)}"
        )
    return terms


def _parse_term(piece: str, sign: float, text: str) -> Term:
    if re.fullmatch(_NUMBER, piece):
        return Term(sign * float(piece))
    match = _TERM.fullmatch(piece)
    if not match:
        raise ConfigError(
            f"reward.verifier={text}: {piece!r} is not weight*verifier; "
            "write for example math + 0.1*format"
        )
    weight, name, arguments, part = match.groups()
    if float(weight or 1.0) > LARGEST_WEIGHT:
        raise ConfigError(
            f"reward.verifier={text}: the weight {weight} is too large; use at most 1000000"
        )
    if not part:
        name, part = _split_part(name)
    return Term(sign * float(weight or 1.0), name, part, _parse_arguments(arguments, text))


def _split_part(name: str) -> tuple[str, str]:
    """Split code.passed or file.py:function.part into the verifier and the part, if it has one."""
    function = name.rpartition(":")[2]
    if "." not in function or name.startswith(MODEL_PREFIX):
        return name, ""
    name, _, part = name.rpartition(".")
    return name, part


def _parse_arguments(arguments: str | None, text: str) -> dict[str, float]:
    if not arguments or not arguments.strip():
        return {}
    values: dict[str, float] = {}
    for piece in arguments.split(","):
        match = _ARGUMENT.fullmatch(piece)
        if not match:
            raise ConfigError(
                f"reward.verifier={text}: {piece.strip()!r} is not name=number; "
                "write for example length(limit=100)"
            )
        values[match.group(1)] = float(match.group(2))
    return values


def check_arguments(term: Term, verifier: Verifier) -> None:
    """Raise ConfigError for an argument that the term's verifier does not take."""
    known = list(inspect.signature(verifier).parameters)[2:]
    for argument in term.arguments:
        if argument not in known:
            raise ConfigError(
                f"reward.verifier: {term.name} has no argument {argument}; "
                f"{did_you_mean(argument, known)}"
            )


def score_sum(
    terms: Sequence[tuple[Term, Verifier | None]], response: str, problem: Problem
) -> Score | Failure:
    """Return the weighted sum of the terms' scores, or the first Failure.

    Args:
        terms: each term with its verifier; None for a constant.
    """
    total = 0.0
    parts: dict[str, float] = {}
    for term, verifier in terms:
        if verifier is None:
            total += term.weight
            continue
        value = add_term(term, run_verifier(verifier, response, problem), parts)
        if isinstance(value, Failure):
            return value
        total += value
    return Score(total, parts)


def add_term(term: Term, score: Score | Failure, parts: dict[str, float]) -> float | Failure:
    """Return the weighted value of a term, or a Failure; add its unweighted values to `parts`."""
    if isinstance(score, Failure):
        return Failure(score.kind, f"{term.label}: {score.reason}")
    if not term.part:
        value = score.value
        parts[term.label] = value
        parts |= {f"{term.label}.{name}": part for name, part in score.parts.items()}
    elif term.part in score.parts:
        value = score.parts[term.part]
        parts[term.label] = value
    else:
        hint = did_you_mean(term.part, score.parts)
        return Failure("invalid", f"{term.name} has no part {term.part}; {hint}")
    return term.weight * value
