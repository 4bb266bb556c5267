"""`data check`: does the verifier know a right answer from a wrong one? Asked of the gold answers, before any training.

Also counts problems that repeat, and questions that a training set shares with a test set.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from postgrad.data.styles import question_of
from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.scorer import Scorer

CHUNK = 256  # problems judged between two signs of progress

# How a right answer is said to each verifier; {} is the gold answer. Others, also your own, hear it in a box.
SAID = {
    "exact": "{}",
    "numeric": "The answer is {}.",
    "gsm8k": "#### {}",
    "gsm8k_strict": "#### {}",
    "gsm8k_flexible": "The answer is {}.",
    "choice": "The answer is ({}).",
    "search": "<answer>{}</answer>",
    "math_answer": "Answer: {}",
    "think_math": "</think>\n\\boxed{{{}}}",
    "r1_zero": "</think> <answer>{}</answer>",
    "r1_zero_math": "</think> <answer>{}</answer>",
}
FORM_ONLY = (
    "format",
    "box_format",
    "think_format",
    "length",
    "overlong",
    "bold",
)  # judge how, not what
BOXED = "\\boxed{{{}}}"
_NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,6})?")
_OPPOSITES = {"yes": "No", "no": "Yes", "true": "False", "false": "True"}


@dataclass(frozen=True)
class Row:
    """A problem and why it is listed."""

    place: str
    uid: str
    reason: str


@dataclass
class Findings:
    """What `check` found. A verifier that is wrong on golds or near misses cannot be trained on; the rest is for a person to judge."""

    problems: int = 0
    checked: int = 0
    near: int = 0  # near misses that were judged
    wrong: list[Row] = field(default_factory=list)
    accepted: list[Row] = field(default_factory=list)  # near misses that scored
    wrong_demonstrations: list[Row] = field(default_factory=list)
    repeated: list[Row] = field(default_factory=list)
    shared: list[Row] = field(default_factory=list)
    unchecked: dict[str, int] = field(default_factory=dict)  # why -> how many


def gold_response(verifier: str, problem: Problem) -> str:
    """The gold answer as a model would say it to this verifier; a program is said by its solution."""
    if verifier.startswith("code") and problem.demonstrations:
        return problem.demonstrations[0]
    return SAID.get(verifier, BOXED).format(problem.ground_truth)


def near_miss(verifier: str, problem: Problem) -> str | None:
    """An answer that is surely wrong and looks right: the number plus one, the next option, No for Yes; None for other truths."""
    truth = problem.ground_truth.strip()
    if verifier == "choice" and len(truth) == 1:
        other = "A" if truth != "A" else "B"
        wrong = other if truth.isalpha() else ("1" if truth != "1" else "2")
    elif _NUMBER.fullmatch(truth):
        wrong = str(Decimal(truth) + 1)
    else:
        wrong = _OPPOSITES.get(truth.strip("\\{}").removeprefix("text{").lower(), "")
    return SAID.get(verifier, BOXED).format(wrong) if wrong else None


def check(
    problems: Sequence[Problem],
    places: Sequence[str],
    scorer: Scorer,
    against: Iterable[Problem] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> Findings:
    """Hold problems against their verifier, each other and a test set.

    Args:
        problems: the data to check.
        places: where each was read ("train.jsonl: row 3").
        scorer: of the verifier that training would use.
        against: the test set.
        progress: told of every so many problems that were judged.
    """
    findings = Findings(problems=len(problems))
    _score_golds(problems, places, scorer, findings, progress)
    _find_repeats(problems, places, findings)
    test = {question_key(problem): problem.uid for problem in against}
    for problem, place in zip(problems, places, strict=True):
        if (other := test.get(question_key(problem))) is not None:
            findings.shared.append(
                Row(place, problem.uid, f"its question is also that of {other} in the test set")
            )
    return findings


def _score_golds(
    problems: Sequence[Problem],
    places: Sequence[str],
    scorer: Scorer,
    findings: Findings,
    progress: Callable[[int], None],
) -> None:
    for start in range(0, len(problems), CHUNK):
        asked: list[
            tuple[Problem, str, str, list[Row], bool]
        ] = []  # problem, place, response, its list, whether it must score
        chunk = list(
            zip(problems[start : start + CHUNK], places[start : start + CHUNK], strict=True)
        )
        for problem, place in chunk:
            name = _verifier(problem, scorer, findings)
            if name is None:
                continue
            findings.checked += 1
            asked.append((problem, place, gold_response(name, problem), findings.wrong, True))
            if not name.startswith("code"):
                asked.extend(
                    (problem, place, text, findings.wrong_demonstrations, True)
                    for text in problem.demonstrations
                )
                if (miss := near_miss(name, problem)) is not None:
                    asked.append((problem, place, miss, findings.accepted, False))
                    findings.near += 1
        scores = scorer.score(
            [problem for problem, *_ in asked], [response for _, _, response, _, _ in asked]
        )
        for (problem, place, response, listed, must), score in zip(asked, scores, strict=True):
            if (isinstance(score, Score) and score.value > 0) != must:
                listed.append(Row(place, problem.uid, _why(problem, response, score)))
        progress(len(chunk))


def _verifier(problem: Problem, scorer: Scorer, findings: Findings) -> str | None:
    """The problem's verifier, or None, counted, where nothing can be checked."""
    why = ""
    if (problem.extra.get("reward_model") or {}).get("style") == "model":
        why = f"{problem.data_source}: a judge decides"
    elif not problem.ground_truth:
        why = f"{problem.data_source}: no ground truth"
    else:
        try:
            name = scorer.name_for(problem)
            if name not in FORM_ONLY:
                return name
            why = f"{problem.data_source}: {name} judges the form, not the answer"
        except ConfigError:
            why = f"{problem.data_source}: no verifier is known for it; name one with verifier=NAME"
    findings.unchecked[why] = findings.unchecked.get(why, 0) + 1
    return None


def _why(problem: Problem, response: str, score: Score | Failure) -> str:
    said = " ".join(response.split())
    shown = said if len(said) <= 60 else f"...{said[-57:]}"
    if isinstance(score, Failure):
        return f"{score.kind}: {score.reason}"
    return f"the gold answer is {problem.ground_truth[:60]!r}, and {shown!r} scores {score.value:g}"


def _find_repeats(problems: Sequence[Problem], places: Sequence[str], findings: Findings) -> None:
    seen: dict[str, tuple[str, str]] = {}
    for problem, place in zip(problems, places, strict=True):
        key = question_key(problem)
        if key in seen:
            first, truth = seen[key]
            other = (
                ""
                if truth == problem.ground_truth
                else f", with another answer: {truth[:40]!r}, here {problem.ground_truth[:40]!r}"
            )
            findings.repeated.append(Row(place, problem.uid, f"asks the same as {first}{other}"))
        else:
            seen[key] = place, problem.ground_truth


def question_key(problem: Problem) -> str:
    """The question without prompt style, letter case, spacing and punctuation at its ends: what must not be in train and test."""
    try:
        text = question_of(problem.messages)
    except ConfigError:
        text = "\n".join(
            message["content"] for message in problem.messages if message["role"] != "system"
        )
    overrides = re.sub(r"\s+", "", unicodedata.normalize("NFKC", text).casefold())
    return overrides.strip(".?!:")
