"""`postgrad data check`: does the verifier accept the gold answers and reject near misses?

Also finds duplicate questions, and questions that are both in a training set and a test set.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from postgrad import phases
from postgrad.data.encode.styles import question_of
from postgrad.errors import ConfigError
from postgrad.pictures import text_of_content
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.expression import asks_judge
from postgrad.verifiers.grading.answers import truth_of
from postgrad.verifiers.grading.numbers import number
from postgrad.verifiers.scorer import Scorer

# A response with a right answer in the form each verifier expects; {} is the gold answer.
RESPONSE_FORMATS = {
    "exact": "{}",
    "numeric": "The answer is {}.",
    "gsm8k": "#### {}",
    "gsm8k_strict": "#### {}",
    "gsm8k_flexible": "The answer is {}.",
    "choice": "The answer is ({}).",
    "search": "<answer>{}</answer>",
    "reasoning_gym": "<answer>{}</answer>",
    "math_answer": "Answer: {}",
    "think_math": "</think>\n\\boxed{{{}}}",
    "r1_zero": "</think> <answer>{}</answer>",
    "r1_zero_math": "</think> <answer>{}</answer>",
}
DEFAULT_FORMAT = "\\boxed{{{}}}"  # also for the user's own verifiers
# Verifiers that score the format of a response, not its answer.
FORMAT_ONLY = (
    "format",
    "box_format",
    "think_format",
    "length",
    "overlong",
    "bold",
    "environment",
)
MAX_SHOWN = 60  # characters of a response in a reason
_DECIMAL = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,6})?")
_OPPOSITES = {"yes": "No", "no": "Yes", "true": "False", "false": "True"}


@dataclass(frozen=True)
class Finding:
    """One problem with something wrong: where it was read, and why it is listed."""

    location: str
    uid: str
    reason: str


@dataclass
class DataReport:
    """The findings of `check_data`.

    Do not train with a verifier that rejects gold answers or accepts near misses. The other
    findings need a person's decision.
    """

    num_problems: int = 0
    num_checked: int = 0
    num_near_misses: int = 0
    rejected_golds: list[Finding] = field(default_factory=list)
    accepted_near_misses: list[Finding] = field(default_factory=list)
    rejected_demonstrations: list[Finding] = field(default_factory=list)
    duplicates: list[Finding] = field(default_factory=list)
    in_test_set: list[Finding] = field(default_factory=list)
    unchecked: dict[str, int] = field(default_factory=dict)  # reason -> number of problems
    num_unknown: int = 0  # problems that no verifier is known for
    checked: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what the verifier makes of the truths


@dataclass(frozen=True)
class _Trial:
    """A response to score, and the list its problem goes to if the score is not as expected."""

    problem: Problem
    location: str
    response: str
    should_score: bool
    findings: list[Finding]


def gold_response(verifier: str, problem: Problem) -> str:
    """Return a response with the gold answer in the form this verifier expects.

    For code verifiers it is the problem's first demonstration.
    """
    if verifier.startswith("code"):
        return problem.demonstrations[0]
    return RESPONSE_FORMATS.get(verifier, DEFAULT_FORMAT).format(problem.ground_truth)


def near_miss(verifier: str, problem: Problem) -> str | None:
    """Return a response that is certainly wrong but similar to the gold answer, or None.

    A number is increased by one, an option or a yes/no answer is replaced by another one. The
    answer of a worked solution follows its last #### or is in its last box.
    """
    wrong = _wrong_answer(verifier, truth_of(problem))
    if not wrong:
        return None
    return RESPONSE_FORMATS.get(verifier, DEFAULT_FORMAT).format(wrong)


def _wrong_answer(verifier: str, truth: str) -> str:
    if verifier == "choice" and len(truth) == 1:
        options = "AB" if truth.isalpha() else "12"
        return options[1] if truth == options[0] else options[0]
    if _DECIMAL.fullmatch(truth):
        return str(Decimal(truth) + 1)
    if (value := number(truth)) is not None:
        return str(value + 1)
    return _OPPOSITES.get(truth.strip("\\{}").removeprefix("text{").lower(), "")


def check_data(
    problems: Sequence[Problem],
    locations: Sequence[str],
    scorer: Scorer,
    test_set: Iterable[Problem] = (),
) -> DataReport:
    """Check problems against their verifier, each other and a test set.

    Args:
        problems: the data to check.
        locations: where each problem was read, such as "train.jsonl: row 3".
        scorer: the scorer with the verifier that training would use.
        test_set: problems that must not be in the data.
    """
    report = DataReport(num_problems=len(problems))
    phases.begin("scoring gold answers")
    _check_verifier(problems, locations, scorer, report)
    report.notes = scorer.json_notes(report.checked)
    _find_duplicates(problems, locations, report)
    test_uids = {question_key(problem): problem.uid for problem in test_set}
    for problem, location in zip(problems, locations, strict=True):
        test_uid = test_uids.get(question_key(problem))
        if test_uid is not None:
            reason = f"its question is also that of {test_uid} in the test set"
            report.in_test_set.append(Finding(location, problem.uid, reason))
    return report


def _check_verifier(
    problems: Sequence[Problem], locations: Sequence[str], scorer: Scorer, report: DataReport
) -> None:
    """Scores gold answers, demonstrations and near misses; adds the findings to the report."""
    trials: list[_Trial] = []
    for problem, location in zip(problems, locations, strict=True):
        verifier = _verifier_name(problem, scorer, report)
        if verifier is not None:
            trials += _make_trials(problem, location, verifier, report)
    if not trials:
        return
    scores = scorer.score([trial.problem for trial in trials], [trial.response for trial in trials])
    for trial, score in zip(trials, scores, strict=True):
        has_scored = isinstance(score, Score) and score.value > 0
        if has_scored != trial.should_score:
            reason = _describe(trial.problem, trial.response, score)
            trial.findings.append(Finding(trial.location, trial.problem.uid, reason))


def _make_trials(
    problem: Problem, location: str, verifier: str, report: DataReport
) -> list[_Trial]:
    report.num_checked += 1
    report.checked.append(problem)
    gold = gold_response(verifier, problem)
    trials = [_Trial(problem, location, gold, True, report.rejected_golds)]
    if verifier.startswith("code"):
        return trials
    for text in problem.demonstrations:
        trials.append(_Trial(problem, location, text, True, report.rejected_demonstrations))
    wrong = near_miss(verifier, problem)
    if wrong is not None:
        report.num_near_misses += 1
        trials.append(_Trial(problem, location, wrong, False, report.accepted_near_misses))
    return trials


def _verifier_name(problem: Problem, scorer: Scorer, report: DataReport) -> str | None:
    """Return the problem's verifier; None, counted in `unchecked`, if it cannot be checked."""
    name = None
    if (
        asks_judge(scorer.verifier)
        or (problem.extra.get("reward_model") or {}).get("style") == "model"
    ):
        reason = "a judge decides"
    elif not problem.ground_truth:
        reason = "no ground truth"
    else:
        try:
            name = scorer.name_for(problem)
        except ConfigError:
            reason = "no known verifier; give one with verifier=NAME"
            report.num_unknown += 1
        else:
            reason = f"{name} scores the format, not the answer"
            if name.startswith("code") and not problem.demonstrations:
                name, reason = None, "no solution that its tests could run"
    if name is not None and name not in FORMAT_ONLY:
        return name
    key = f"{problem.data_source}: {reason}"
    report.unchecked[key] = report.unchecked.get(key, 0) + 1
    return None


def _describe(problem: Problem, response: str, score: Score | Failure) -> str:
    if isinstance(score, Failure):
        return f"{score.kind}: {score.reason}"
    text = " ".join(response.split())
    if len(text) > MAX_SHOWN:
        text = f"...{text[3 - MAX_SHOWN :]}"
    gold = problem.ground_truth[:MAX_SHOWN]
    return f"the gold answer is {gold!r}, and {text!r} scores {score.value:g}"


def _find_duplicates(
    problems: Sequence[Problem], locations: Sequence[str], report: DataReport
) -> None:
    first_of: dict[str, tuple[str, str]] = {}  # question -> location and ground truth
    for problem, location in zip(problems, locations, strict=True):
        key = question_key(problem)
        if key not in first_of:
            first_of[key] = (location, problem.ground_truth)
            continue
        first, truth = first_of[key]
        reason = f"same question as {first}"
        if truth != problem.ground_truth:
            reason += f", with another answer: {truth[:40]!r}, here {problem.ground_truth[:40]!r}"
        report.duplicates.append(Finding(location, problem.uid, reason))


def question_key(problem: Problem) -> str:
    """Return the question in a form that is equal for questions that must count as the same.

    Prompt style, letter case, whitespace and final punctuation are removed.
    """
    try:
        text = text_of_content(question_of(problem.messages))
    except ConfigError:
        asked = [message for message in problem.messages if message["role"] != "system"]
        text = "\n".join(text_of_content(message["content"]) for message in asked)
    folded = unicodedata.normalize("NFKC", text).casefold()
    keys = "".join(picture.key for picture in problem.prompt_images)
    return keys + re.sub(r"\s+", "", folded).strip(".?!:")
