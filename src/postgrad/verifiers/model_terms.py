"""Reward models in `reward.verifier`: `model:PATH`, alone or as terms of a sum.

A model scores many responses at once and runs where the other models of a run are. So these terms
are taken out of the sum; the rules that remain run as before, and the results are added.
"""

from dataclasses import dataclass

from postgrad.errors import ConfigError
from postgrad.problem import Failure, Score
from postgrad.verifiers.combine import MODEL_PREFIX, Term, parse_sum

ROLE = "reward_model"


@dataclass(frozen=True)
class ModelTerm:
    """`weight` times the score of the reward model at `path`; `role` names it in a run."""

    weight: float
    path: str
    role: str


def model_terms(verifier: str) -> list[ModelTerm]:
    """Return the reward models of the setting, in order. Raises ConfigError."""
    if MODEL_PREFIX not in verifier:
        return []
    found: list[ModelTerm] = []
    for term in parse_sum(verifier):
        if not term.name.startswith(MODEL_PREFIX):
            continue
        path = term.name.removeprefix(MODEL_PREFIX)
        if not path or term.arguments or path.startswith(("http://", "https://")):
            raise ConfigError(
                f"reward.verifier={verifier}: {term.name} is not a reward model; write "
                "model:PATH with a folder or hub id of a sequence classifier with one label"
            )
        role = ROLE if not found else f"{ROLE}-{len(found) + 1}"
        found.append(ModelTerm(term.weight, path, role))
    return found


def rules_of(verifier: str) -> str:
    """Return the setting without its reward models; "" if nothing else is left."""
    if not model_terms(verifier):
        return verifier
    rules = [term for term in parse_sum(verifier) if not term.name.startswith(MODEL_PREFIX)]
    text = "".join(_write(term) for term in rules if term.name or term.weight)
    return text.removeprefix(" + ").lstrip() if any(term.name for term in rules) else ""


def _write(term: Term) -> str:
    sign = "-" if term.weight < 0 else "+"
    value = f"{abs(term.weight)!r}"
    return f" {sign} {value}*{term.label}" if term.name else f" {sign} {value}"


def add_score(rules: Score | Failure, term: ModelTerm, score: Score | Failure) -> Score | Failure:
    """Return the sum of what the rules gave and the weighted model score; the first Failure."""
    if isinstance(rules, Failure):
        return rules
    if isinstance(score, Failure):
        return score
    parts = {**rules.parts, term.role: score.value}
    return Score(rules.value + term.weight * score.value, parts)
