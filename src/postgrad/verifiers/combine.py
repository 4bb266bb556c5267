"""Weighted sums of verifiers, written as one setting: `math + 0.1*format - 0.2*overlong(limit=4000, buffer=1000)`.

A term is a number, or `weight*verifier`, where the verifier is a built-in name or a user's own, may have numbers as arguments, and
`.part` takes one of its named parts instead of its value: `0.5*code.passed`. The sum's parts are the terms by name, unweighted, and
the parts of each term as `term.part`. If one term cannot be judged, the response is not judged: a sum with a hole is no score.
"""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from postgrad.errors import ConfigError, did_you_mean
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.verifier import VERIFIERS, Spec, Verifier, find_verifier, load, run_verifier

_SPLIT = re.compile(r"\s+([+-])\s+")
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+"
_TERM = re.compile(rf"(?:({_NUMBER})\s*\*\s*)?([^\s()*]+)\s*(?:\(([^()]*)\))?(?:\.(\w+))?")
_ARGUMENT = re.compile(rf"\s*(\w+)\s*=\s*(-?(?:{_NUMBER}))\s*")


@dataclass(frozen=True)
class Term:
    """`weight` times a verifier's value, or times one of its parts. A name of "" is the constant `weight`."""

    weight: float
    name: str = ""
    part: str = ""
    arguments: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        inner = ",".join(f"{name}={value:g}" for name, value in self.arguments.items())
        return self.name + (f"({inner})" if inner else "") + (f".{self.part}" if self.part else "")


def terms_of(text: str) -> list[Term]:
    """The terms of a sum, in order.

    Raises:
        ConfigError: it cannot be read; the message shows the piece and what is right.
    """
    sign, body = (-1.0, text.strip()[1:]) if text.strip().startswith("-") else (1.0, text)
    pieces = ["+" if sign > 0 else "-", *_SPLIT.split(body.strip())]
    terms = [
        _term(piece.strip(), 1.0 if plus == "+" else -1.0, text)
        for plus, piece in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    labels = [term.label for term in terms if term.name]
    twice = next((label for label in labels if labels.count(label) > 1), "")
    if twice:
        raise ConfigError(f"reward.verifier={text}: {twice} stands there twice; give it one weight")
    if not labels:
        raise ConfigError(
            f"reward.verifier={text}: no verifier in it; {did_you_mean(text, VERIFIERS)}"
        )
    return terms


def _term(piece: str, sign: float, text: str) -> Term:
    if re.fullmatch(_NUMBER, piece):
        return Term(sign * float(piece))
    found = _TERM.fullmatch(piece)
    if not found:
        raise ConfigError(
            f"reward.verifier={text}: {piece!r} is not weight*verifier; write e.g. math + 0.1*format"
        )
    weight, name, inner, part = found.groups()
    if not part and ":" not in name and "." in name:
        name, _, part = name.rpartition(".")
    if not part and ":" in name and "." in name.rpartition(":")[2]:
        name, _, part = name.rpartition(".")
    return Term(sign * float(weight or 1.0), name, part or "", _arguments(inner, text))


def _arguments(inner: str | None, text: str) -> dict[str, float]:
    arguments: dict[str, float] = {}
    for piece in (inner or "").split(",") if inner and inner.strip() else []:
        found = _ARGUMENT.fullmatch(piece)
        if not found:
            raise ConfigError(f"reward.verifier={text}: {piece.strip()!r} is not name=number")
        arguments[found.group(1)] = float(found.group(2))
    return arguments


def check_arguments(terms: Sequence[Term], specs: Sequence[Spec]) -> None:
    """Raise ConfigError for an argument that its verifier does not take."""
    for term, spec in zip(terms, specs, strict=True):
        if term.arguments:
            known = list(inspect.signature(load(spec.path)).parameters)[2:]
            for argument in term.arguments:
                if argument not in known:
                    raise ConfigError(
                        f"{term.name} has no argument {argument}; {did_you_mean(argument, known)}"
                    )


def combined(text: str) -> Verifier:
    """The verifier that a sum means."""
    return partial(_sum, [(term, _function(term)) for term in terms_of(text)])


def _function(term: Term) -> Verifier | None:
    if not term.name:
        return None
    function = load(find_verifier(term.name).path)
    return partial(function, **term.arguments) if term.arguments else function


def _sum(
    terms: list[tuple[Term, Verifier | None]], response: str, problem: Problem
) -> Score | Failure:
    total, parts = 0.0, dict[str, float]()
    for term, function in terms:
        if function is None:
            total += term.weight
            continue
        result = run_verifier(function, response, problem)
        if isinstance(result, Failure):
            return Failure(result.kind, f"{term.label}: {result.reason}")
        if term.part and term.part not in result.parts:
            return Failure(
                "invalid",
                f"{term.name} has no part {term.part}; {did_you_mean(term.part, result.parts)}",
            )
        value = result.parts[term.part] if term.part else result.value
        total += term.weight * value
        parts[term.label] = value
        if not term.part:
            parts |= {f"{term.label}.{name}": part for name, part in result.parts.items()}
    return Score(total, parts)
