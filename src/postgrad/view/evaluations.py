"""Results of `postgrad eval` and of the entropy analysis: summaries, responses, comparisons."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postgrad.config.stored import value_at
from postgrad.data.rollout_folder import PICTURES
from postgrad.evaluation.compare import compare_set
from postgrad.evaluation.folder import set_names
from postgrad.evaluation.pivot import as_csv, as_markdown, make_pivot, sets_of
from postgrad.view.cache import Cache, file_stamp
from postgrad.view.folder import Folder, NotFound
from postgrad.view.reader import Unreadable, parse_json, read_json, read_lines

MAX_TEXT = 200_000  # characters of one text
MAX_QUESTION = 1200  # characters
MAX_RESPONSES = 64  # to one problem
SNIPPET = 240  # characters of a question in lists
PAGE = 50  # problems per request
MAX_CACHED = 6
# The score from which a response counts as correct, if neither its line nor the summary says so.
DEFAULT_PASS_SCORE = 1.0

# Classes of responses by (format correct, answer correct).
CLASSES = ("11", "10", "01", "00")
PAIR_FILTERS: dict[str, Callable[[float, float], bool]] = {
    "all": lambda a, b: True,
    "a": lambda a, b: a > b,
    "b": lambda a, b: b > a,
    "both": lambda a, b: a == b == 1,
    "neither": lambda a, b: a == b == 0,
}


@dataclass
class EvaluatedProblem:
    """What lists show about the responses to one problem; the lines themselves stay in the file.

    Attributes:
        uid: the problem's uid.
        question: the question.
        offsets: byte offset of each response's line in the file.
        correct: whether each response is correct.
        failures: number of responses that could not be scored.
        truncated: number of responses that reached the length limit.
        length: tokens of all responses together.
        classes: the classes of its responses, if the verifier scores format and answer.
    """

    uid: str
    question: str
    offsets: list[int] = field(default_factory=list)
    correct: list[bool] = field(default_factory=list)
    failures: int = 0
    truncated: int = 0
    length: int = 0
    classes: set[str] = field(default_factory=set)

    @property
    def accuracy(self) -> float:
        """Share of correct responses."""
        return sum(self.correct) / len(self.correct)


def _has_class(name: str) -> Callable[[EvaluatedProblem], bool]:
    return lambda problem: name in problem.classes


FILTERS: dict[str, Callable[[EvaluatedProblem], bool]] = {
    "all": lambda problem: True,
    "correct": lambda problem: problem.accuracy == 1,
    "mixed": lambda problem: 0 < problem.accuracy < 1,
    "wrong": lambda problem: problem.accuracy == 0,
    "failed": lambda problem: problem.failures > 0,
    "truncated": lambda problem: problem.truncated > 0,
    **{name: _has_class(name) for name in CLASSES},
}


class Evaluations:
    """All evaluation folders below the root."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._sets: Cache[Path, dict[str, EvaluatedProblem]] = Cache(MAX_CACHED)

    def all(self) -> dict[str, Any]:
        """Every evaluation with its summary, its data sets and the run that it belongs to."""
        contents = self.folder.contents()
        evaluations: list[dict[str, Any]] = []
        for name in contents.evaluations:
            summary, problem = self._object(f"{name}/summary.json")
            sets = self.sets(name)
            if not (sets or problem or isinstance((summary or {}).get("sets"), dict)):
                continue
            evaluations.append(
                {
                    "name": name,
                    "run": _owning_run(name, contents.runs),
                    "summary": summary or {},
                    "sets": sets,
                    "finished": summary is not None,
                    "problem": problem,
                }
            )
        return {"evaluations": evaluations}

    def _object(self, name: str) -> tuple[dict[str, Any] | None, str]:
        """Return (the object in a JSON file or None, why it cannot be read or "")."""
        try:
            return read_json(self.folder.resolve(name)), ""
        except (NotFound, OSError):
            return None, ""
        except Unreadable as error:
            return None, f"{error.file} cannot be read: {error.why}"

    def pivot(self, metric: str) -> dict[str, Any]:
        """All finished evaluations as a table of models by sets, also as Markdown and CSV.

        A summary that lacks the metric's fields is left out.
        """
        summaries: list[dict[str, Any]] = []
        for one in self.all()["evaluations"]:
            with suppress(KeyError, TypeError, AttributeError):  # another program's summary.json
                make_pivot([one["summary"]], metric)
                summaries.append(one["summary"] | {"folder": one["name"]})
        table = make_pivot(summaries, metric)
        sets = sets_of(table)
        return {
            "sets": sets,
            "rows": [
                {"model": model, "values": [values.get(name) for name in sets]}
                for model, values in table.items()
            ],
            "markdown": as_markdown(table, metric),
            "csv": as_csv(table),
        }

    def sets(self, name: str) -> list[str]:
        """Return the data sets of an evaluation."""
        try:
            return set_names(self.folder.resolve(name))
        except NotFound:
            return []

    def file(self, name: str, set_name: str) -> Path:
        """Return the file of one data set; raise NotFound."""
        if name not in self.folder.contents().evaluations or set_name not in self.sets(name):
            raise NotFound(name)
        return self.folder.resolve(f"{name}/{set_name}.jsonl")

    def index(self, name: str, set_name: str) -> dict[str, EvaluatedProblem]:
        """Return the problems of a data set by uid; read again only if the file has changed."""
        file = self.file(name, set_name)
        summary = self._object(f"{name}/summary.json")[0] or {}
        return self._sets.get(
            file, lambda: read_index(file, _pass_score(summary)), file_stamp(file)
        )

    def responses(
        self, name: str, set_name: str, filter_name: str, query: str, start: int
    ) -> dict[str, Any]:
        """Return the problems of one evaluation that pass a filter and contain the query."""
        problems = self.index(name, set_name).values()
        passes = FILTERS.get(filter_name, FILTERS["all"])
        passing = [problem for problem in problems if passes(problem) and _matches(problem, query)]
        return {
            "total": len(passing),
            "counts": {key: sum(map(test, problems)) for key, test in FILTERS.items()},
            "problems": [_list_entry(problem) for problem in passing[start : start + PAGE]],
        }

    def pairs(
        self, a: str, b: str, set_name: str, filter_name: str, query: str, start: int
    ) -> dict[str, Any]:
        """Return the problems that both evaluations answered, with a comparison of the two."""
        index_a = self.index(a, set_name)
        index_b = self.index(b, set_name)
        shared = [(p, index_b[uid]) for uid, p in index_a.items() if uid in index_b]
        passes = PAIR_FILTERS.get(filter_name, PAIR_FILTERS["all"])
        passing: list[tuple[EvaluatedProblem, EvaluatedProblem]] = []
        for p, q in shared:
            if passes(p.accuracy, q.accuracy) and _matches(p, query):
                passing.append((p, q))
        comparison = None
        if shared:
            correct_a = {p.uid: p.correct for p, _ in shared}
            correct_b = {q.uid: q.correct for _, q in shared}
            comparison = compare_set(correct_a, correct_b)
        counts = {
            key: sum(test(p.accuracy, q.accuracy) for p, q in shared)
            for key, test in PAIR_FILTERS.items()
        }
        page = passing[start : start + PAGE]
        return {
            "total": len(passing),
            "shared": len(shared),
            "samples": max((len(p.correct) for pair in shared for p in pair), default=1),
            "comparison": comparison,
            "counts": counts,
            "problems": [{**_list_entry(p), "other": _list_entry(q)} for p, q in page],
        }

    def response(self, name: str, set_name: str, uid: str) -> dict[str, Any]:
        """All responses to one problem, without their token ids."""
        problem = self.index(name, set_name).get(uid)
        if problem is None:
            raise NotFound(uid)
        responses: list[dict[str, Any]] = []
        file = self.file(name, set_name)
        for offset in problem.offsets[:MAX_RESPONSES]:
            responses.append(_shorten(parse_json(next(read_lines(file, offset)), file)))
        contents = {"uid": uid, "question": problem.question, "responses": responses}
        return contents | {"pictures": self._picture_folder(name)}

    def _picture_folder(self, name: str) -> str:
        """Return the folder of an evaluation's pictures: a validation's are in its run's."""
        if (self.folder.resolve(name) / PICTURES).is_dir():
            return name
        return _owning_run(name, self.folder.contents().runs) or name

    def entropies(self) -> dict[str, Any]:
        """Every entropy analysis below the root, with the run that it belongs to."""
        contents = self.folder.contents()
        entropies: list[dict[str, Any]] = []
        for name in contents.entropies:
            data, problem = self._object(name)
            if data is not None or problem:
                run = _owning_run(name, contents.runs)
                entropies.append({"name": name, "run": run, "data": data, "problem": problem})
        return {"entropies": entropies}


def _owning_run(name: str, runs: Sequence[str]) -> str:
    """Return the innermost run whose folder holds this name, or ""."""
    owners = [run for run in runs if run == "." or name == run or name.startswith(f"{run}/")]
    return max(owners, key=len, default="")


def read_index(file: Path, pass_score: float) -> dict[str, EvaluatedProblem]:
    """Return the problems of a file by uid; a response is correct from `pass_score` on."""
    problems: dict[str, EvaluatedProblem] = {}
    offset = 0
    for raw in read_lines(file):
        try:
            line = parse_json(raw, file)
        except ValueError:  # counted as a response that cannot be shown
            line = None
        if isinstance(line, dict):
            uid = str(line.get("uid", offset))
            problem = problems.setdefault(uid, EvaluatedProblem(uid, question_of(line)))
            _add_response(problem, line, offset, pass_score)
        offset += len(raw)
    return problems


def _add_response(
    problem: EvaluatedProblem, line: dict[str, Any], offset: int, pass_score: float
) -> None:
    score = line.get("score")
    correct = line.get("right")
    if not isinstance(correct, bool):
        correct = isinstance(score, int | float) and pass_score <= score < math.inf
    problem.offsets.append(offset)
    problem.correct.append(correct)
    problem.failures += bool(line.get("failure"))
    problem.truncated += line.get("finish") == "length"
    length = line.get("length")
    problem.length += int(length) if isinstance(length, int | float) else 0
    parts = line.get("parts")
    if isinstance(parts, dict) and isinstance(parts.get("format"), int | float):
        answer = parts.get("answer", correct)
        has_answer = isinstance(answer, int | float) and answer > 0
        problem.classes.add(f"{int(parts['format'] > 0)}{int(has_answer)}")


def question_of(line: dict[str, Any]) -> str:
    """Return the question: a text, or the last of several messages."""
    prompt = line.get("question") or line.get("prompt") or line.get("messages") or ""
    if isinstance(prompt, list):
        last = prompt[-1]
        prompt = last.get("content", "") if isinstance(last, dict) else ""
    return str(prompt)[-MAX_QUESTION:]


def _pass_score(summary: dict[str, Any]) -> float:
    value = value_at(summary, "settings.reward.pass_score")
    return float(value) if isinstance(value, int | float) else DEFAULT_PASS_SCORE


def _matches(problem: EvaluatedProblem, query: str) -> bool:
    query = query.lower()
    return query in problem.question.lower() or query in problem.uid.lower()


def _list_entry(problem: EvaluatedProblem) -> dict[str, Any]:
    return {
        "uid": problem.uid,
        "question": problem.question[-SNIPPET:],
        "correct": sum(problem.correct),
        "responses": len(problem.correct),
        "failures": problem.failures,
        "truncated": problem.truncated,
        "length": round(problem.length / len(problem.correct), 1),
    }


def _shorten(line: dict[str, Any]) -> dict[str, Any]:
    """One response without its token ids, long texts shortened."""
    shortened: dict[str, Any] = {}
    for key, value in line.items():
        if isinstance(value, list) and value and isinstance(value[0], int | float):
            continue
        shortened[key] = value[:MAX_TEXT] if isinstance(value, str) else value
    return shortened
