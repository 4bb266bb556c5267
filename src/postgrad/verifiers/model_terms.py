"""Models in `reward.verifier`: `model:PATH` and `llm_judge`, alone or as terms of a sum.

A model scores many responses at once and runs where the other models of a run are. So these terms
are taken out of the sum; the rules that remain run as before, and the results are added.
"""

from dataclasses import dataclass

from postgrad.errors import ConfigError
from postgrad.problem import Failure, Score
from postgrad.user_code import PythonObject
from postgrad.verifiers.combine import MODEL_PREFIX, Term, add_term, parse_sum

ROLE = "reward_model"
LLM_JUDGE = "llm_judge"


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


def judge_term(verifier: str) -> Term | None:
    """Return the term `llm_judge` of a sum; None if there is none. Raises ConfigError."""
    if LLM_JUDGE not in verifier or verifier == LLM_JUDGE or isinstance(verifier, PythonObject):
        return None
    terms = [term for term in parse_sum(verifier) if term.name == LLM_JUDGE]
    if len(terms) > 1 or any(term.arguments for term in terms):
        raise ConfigError(
            f"reward.verifier={verifier}: llm_judge is one term without arguments; write for "
            "example math + 0.1*llm_judge, and set its model and scale by reward.judge"
        )
    return terms[0] if terms else None


def asks_judge(verifier: str) -> bool:
    """Return whether `llm_judge` is the setting or a term of it. Raises ConfigError."""
    return verifier == LLM_JUDGE or judge_term(verifier) is not None


def rules_of(verifier: str) -> tuple[str, float]:
    """Return the setting without its models, and the constant that remains.

    The text is "" if no verifier is left; otherwise it contains the constant, which is 0 here.
    """
    if not model_terms(verifier) and judge_term(verifier) is None:
        return verifier, 0.0
    rules = [term for term in parse_sum(verifier) if not _is_model(term)]
    if not any(term.name for term in rules):
        return "", sum(term.weight for term in rules)
    text = "".join(_write(term) for term in rules if term.name or term.weight)
    return text.removeprefix(" + ").lstrip(), 0.0


def _is_model(term: Term) -> bool:
    return term.name == LLM_JUDGE or term.name.startswith(MODEL_PREFIX)


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


def add_judge_score(rules: Score | Failure, term: Term, score: Score | Failure) -> Score | Failure:
    """Return the sum of what the rules gave and the judge's weighted score; the first Failure."""
    if isinstance(rules, Failure):
        return rules
    parts = dict(rules.parts)
    value = add_term(term, score, parts)
    return value if isinstance(value, Failure) else Score(rules.value + value, parts)
