"""The expression in `reward.verifier`: a weighted sum of terms.

    math + 0.1*format - 0.2*overlong(limit=4000) + 0.5*model:PATH + 0.1*llm_judge

A term is a number or `weight*name`. The name is a built-in verifier or a path, with numbers as
arguments; a reward model as `model:PATH`; or `llm_judge`. `.part` takes one of a term's named parts
instead of its value: `0.5*code.passed`. The parts of the sum are the unweighted terms by label, and
the parts of each term as `label.part`. From Python, terms may also be functions and objects.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from postgrad.errors import Conflict, Missing, WrongValue, did_you_mean
from postgrad.problem import Failure, Score
from postgrad.user_code import PythonObject
from postgrad.verifiers.table import VERIFIERS

LARGEST_WEIGHT = 1e6
MODEL_PREFIX = "model:"
LLM_JUDGE = "llm_judge"
ROLE = "reward_model"  # of the first reward model; further ones are reward_model-2, ...
_SIGN = re.compile(r"\s+([+-])\s+")
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+"
_TERM = re.compile(rf"(?:({_NUMBER})\s*\*\s*)?([^\s()*]+)\s*(?:\(([^()]*)\))?(?:\.(\w+))?")
_ARGUMENT = re.compile(rf"\s*(\w+)\s*=\s*(-?(?:{_NUMBER}))\s*")


@dataclass(frozen=True)
class Term:
    """`weight` times a score or one of its parts; without a name, a constant.

    Attributes:
        name: a verifier, a path, `llm_judge` or `model:PATH`; of a `function` its name.
        role: the name of a reward model among the models of a run.
        function: a reward that is a Python object.
    """

    weight: float
    name: str = ""
    part: str = ""
    arguments: dict[str, float] = field(default_factory=dict)
    role: str = ""
    function: Any = None

    @property
    def rule(self) -> str:
        """The verifier with its arguments, as loading.find_verifier() reads it."""
        pairs = [f"{name}={value:g}" for name, value in self.arguments.items()]
        return f"{self.name}({','.join(pairs)})" if pairs else self.name

    @property
    def label(self) -> str:
        """The name of the term in the parts of the sum."""
        return self.role or self.rule + (f".{self.part}" if self.part else "")

    @property
    def is_rule(self) -> bool:
        """Whether a verifier gives the score, not a model or a Python object."""
        is_other = self.function is not None or self.role or self.name == LLM_JUDGE
        return bool(self.name) and not is_other

    @property
    def model_path(self) -> str:
        """The folder or hub id of a reward model."""
        return self.name.removeprefix(MODEL_PREFIX)


@dataclass(frozen=True)
class Reward:
    """The terms of a reward. If it is no sum, the score of its only term counts as it is."""

    terms: tuple[Term, ...]
    is_sum: bool

    @property
    def models(self) -> list[Term]:
        """The reward models, in order."""
        return [term for term in self.terms if term.role]

    @property
    def asks_judge(self) -> bool:
        """Whether `llm_judge` is a term."""
        return any(term.name == LLM_JUDGE for term in self.terms)

    @property
    def rules(self) -> list[Term]:
        """The terms that are verifiers: built-in ones and paths."""
        return [term for term in self.terms if term.is_rule]


def parse_reward(verifier: str) -> Reward:
    """Return the terms of `reward.verifier`.

    Raises:
        ConfigError: the text is malformed, names a term twice or has no verifier.
    """
    if isinstance(verifier, PythonObject):
        terms = list(verifier.value)
        reward_is_sum = len(terms) > 1 or terms[0].weight != 1.0
    else:
        reward_is_sum = is_sum(verifier) or verifier.startswith(MODEL_PREFIX)
        terms = _parse_sum(verifier) if reward_is_sum else [Term(1.0, verifier)]
    if not any(term.name for term in terms):
        raise Missing(
            f"reward.verifier={verifier}: it has no verifier; {did_you_mean(verifier, VERIFIERS)}"
        )
    labels = [term.label for term in terms if term.name]
    for label in labels:
        if labels.count(label) > 1:
            raise Conflict(
                f"reward.verifier={verifier}: {label} is there twice; write it once, "
                "with one weight"
            )
    judges = [term for term in terms if term.name == LLM_JUDGE]
    if len(judges) > 1 or any(term.arguments for term in judges):
        raise WrongValue(
            f"reward.verifier={verifier}: llm_judge is one term without arguments; write for "
            "example math + 0.1*llm_judge, and set its model and scale by reward.judge"
        )
    return Reward(tuple(_with_roles(terms, verifier)), reward_is_sum)


def asks_judge(verifier: str) -> bool:
    """Return whether `llm_judge` is the setting or a term of it. Raises ConfigError."""
    return parse_reward(verifier).asks_judge


def is_sum(text: str) -> bool:
    """Return whether a text is a sum: it has a weight, a sign, arguments or a part."""
    if re.search(r"\*|\s[+-]\s|\(|^\s*-", text):
        return True
    if "." not in text or text.startswith(MODEL_PREFIX):
        return False
    function = text.rpartition(":")[2]
    return text.partition(".")[0] in VERIFIERS or (":" in text and "." in function)


def scaled(weight: float, text: str) -> list[Term]:
    """Return the terms of a text with their weights multiplied. Raises ConfigError."""
    terms = parse_reward(text).terms
    return [replace(term, weight=weight * term.weight, role="") for term in terms]


def sum_text(terms: Sequence[Term]) -> str:
    """Return the text of a sum of terms, none of which is a Python object."""
    text = ""
    for term in terms:
        value = f"{abs(term.weight):.12g}"
        sign = "-" if term.weight < 0 else "+"
        text += f" {sign} {value}*{term.label}" if term.name else f" {sign} {value}"
    return text.removeprefix(" + ").lstrip()


def split_rule(rule: str) -> tuple[str, dict[str, float]]:
    """Return the name and the arguments of a verifier such as `length(limit=100)`."""
    name, bracket, arguments = rule.partition("(")
    return (name, _parse_arguments(arguments.rstrip(") "), rule)) if bracket else (rule, {})


def term_value(term: Term, score: Score) -> float | Failure:
    """Return the score's value, or the part of it that the term names."""
    if not term.part:
        return score.value
    if term.part in score.parts:
        return score.parts[term.part]
    hint = did_you_mean(term.part, score.parts)
    return Failure("invalid", f"{term.name} has no part {term.part}; {hint}")


def add_term(term: Term, score: Score | Failure, parts: dict[str, float]) -> float | Failure:
    """Return the weighted value of a term, or a Failure; add its unweighted values to `parts`."""
    if isinstance(score, Failure):
        return Failure(score.kind, f"{term.label}: {score.reason}")
    value = term_value(term, score)
    if isinstance(value, Failure):
        return value
    parts[term.label] = value
    if not term.part:
        parts |= {f"{term.label}.{name}": part for name, part in score.parts.items()}
    return term.weight * value


def _parse_sum(text: str) -> list[Term]:
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
    return terms


def _parse_term(piece: str, sign: float, text: str) -> Term:
    if re.fullmatch(_NUMBER, piece):
        return Term(sign * float(piece))
    match = _TERM.fullmatch(piece)
    if not match:
        raise WrongValue(
            f"reward.verifier={text}: {piece!r} is not weight*verifier; "
            "write for example math + 0.1*format"
        )
    weight, name, arguments, part = match.groups()
    if float(weight or 1.0) > LARGEST_WEIGHT:
        raise WrongValue(
            f"reward.verifier={text}: the weight {weight} is too large; use at most 1000000"
        )
    if not part:
        name, part = _split_part(name)
    return Term(sign * float(weight or 1.0), name, part, _parse_arguments(arguments or "", text))


def _split_part(name: str) -> tuple[str, str]:
    """Split code.passed or file.py:function.part into the verifier and the part, if it has one."""
    function = name.rpartition(":")[2]
    if "." not in function or name.startswith(MODEL_PREFIX):
        return name, ""
    name, _, part = name.rpartition(".")
    return name, part


def _parse_arguments(arguments: str, text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for piece in arguments.split(",") if arguments.strip() else ():
        match = _ARGUMENT.fullmatch(piece)
        if not match:
            raise WrongValue(
                f"reward.verifier={text}: {piece.strip()!r} is not name=number; "
                "write for example length(limit=100)"
            )
        values[match.group(1)] = float(match.group(2))
    return values


def _with_roles(terms: Sequence[Term], verifier: str) -> list[Term]:
    """Return the terms; those of reward models have their roles."""
    complete: list[Term] = []
    num_models = 0
    for term in terms:
        role = ""
        if term.function is None and term.name.startswith(MODEL_PREFIX):
            path = term.model_path
            if not path or term.arguments or path.startswith(("http://", "https://")):
                raise WrongValue(
                    f"reward.verifier={verifier}: {term.name} is not a reward model; write "
                    "model:PATH with a folder or hub id of a sequence classifier with one label"
                )
            num_models += 1
            role = ROLE if num_models == 1 else f"{ROLE}-{num_models}"
        complete.append(replace(term, role=role))
    return complete
