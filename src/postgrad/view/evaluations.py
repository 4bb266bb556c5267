"""Results of `postgrad eval` and of the entropy analysis: summaries, responses, two models side by side."""

import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postgrad.evaluation.compare import compare_set
from postgrad.evaluation.folder import set_names
from postgrad.view.folder import Folder, NotFound

MOST_SUMMARY = 1 << 24
MOST_TEXT = 200_000
SNIPPET = 240
PAGE = 50
KEPT = 6
RIGHT = 1.0  # a score from which a response counts as right, where neither its line nor the summary says

CLASSES = {
    "11": "form and answer right",
    "10": "form right, answer wrong",
    "01": "answer right, form wrong",
    "00": "neither",
}
KEEP: dict[str, Callable[[float, float], bool]] = {
    "all": lambda a, b: True,
    "a": lambda a, b: a > b,
    "b": lambda a, b: b > a,
    "both": lambda a, b: a == b == 1,
    "neither": lambda a, b: a == b == 0,
}


@dataclass
class Problem:
    """What the lists need of one problem's responses; the lines themselves stay in the file."""

    uid: str
    question: str
    offsets: list[int] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    failures: int = 0
    truncated: int = 0
    rights: list[bool] = field(default_factory=list)
    length: int = 0
    classes: set[str] = field(default_factory=set)

    @property
    def share(self) -> float:
        return sum(self.rights) / len(self.rights)


class Evaluations:
    """All evaluation folders below the root."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._sets: dict[Path, tuple[tuple[int, int], dict[str, Problem]]] = {}
        self._lock = threading.Lock()

    def all(self) -> dict[str, Any]:
        """Every evaluation with its summary, its sets and the run it belongs to."""
        found = self.folder.found()
        out: list[dict[str, Any]] = []
        for name in found.evaluations:
            summary = read_json(self.folder, f"{name}/summary.json")
            sets = self.sets(name)
            if not sets and not isinstance((summary or {}).get("sets"), dict):
                continue
            owner = max(
                (
                    run
                    for run in found.runs
                    if run == "." or name == run or name.startswith(f"{run}/")
                ),
                key=len,
                default="",
            )
            out.append(
                {
                    "name": name,
                    "run": owner,
                    "summary": summary or {},
                    "sets": sets,
                    "done": summary is not None,
                }
            )
        return {"evaluations": out}

    def sets(self, name: str) -> list[str]:
        try:
            return set_names(self.folder.inside(name))
        except NotFound:
            return []

    def file(self, name: str, set_name: str) -> Path:
        if name not in self.folder.found().evaluations or set_name not in self.sets(name):
            raise NotFound(name)
        return self.folder.inside(f"{name}/{set_name}.jsonl")

    def index(self, name: str, set_name: str) -> dict[str, Problem]:
        """The problems of a set by uid; read once, again when the file has changed."""
        file = self.file(name, set_name)
        stamp = (file.stat().st_mtime_ns, file.stat().st_size)
        summary = read_json(self.folder, f"{name}/summary.json") or {}
        with self._lock:
            kept = self._sets.pop(file, None)
            if kept is None or kept[0] != stamp:
                kept = (stamp, read_index(file, _pass_score(summary)))
            while len(self._sets) >= KEPT:
                self._sets.pop(next(iter(self._sets)))
            self._sets[file] = kept
        return kept[1]

    def responses(
        self, name: str, set_name: str, keep: str, search: str, start: int
    ) -> dict[str, Any]:
        """Problems of one evaluation: all, right (every response), mixed, wrong, failed, truncated, or with a response of a class."""
        tests: dict[str, Callable[[Problem], bool]] = {
            "all": lambda p: True,
            "right": lambda p: p.share == 1,
            "mixed": lambda p: 0 < p.share < 1,
            "wrong": lambda p: p.share == 0,
            "failed": lambda p: p.failures > 0,
            "truncated": lambda p: p.truncated > 0,
            **{key: (lambda p, key=key: key in p.classes) for key in CLASSES},
        }
        problems = self.index(name, set_name).values()
        passing = [p for p in problems if tests.get(keep, tests["all"])(p) and _has(p, search)]
        return {
            "total": len(passing),
            "counts": {key: sum(map(test, problems)) for key, test in tests.items()},
            "problems": [_line(p) for p in passing[start : start + PAGE]],
        }

    def pairs(
        self, a: str, b: str, set_name: str, keep: str, search: str, start: int
    ) -> dict[str, Any]:
        """Problems that both evaluations answered."""
        first, second = self.index(a, set_name), self.index(b, set_name)
        both = [(p, second[uid]) for uid, p in first.items() if uid in second]
        passing = [
            (p, q)
            for p, q in both
            if KEEP.get(keep, KEEP["all"])(p.share, q.share) and _has(p, search)
        ]
        return {
            "total": len(passing),
            "shared": len(both),
            "samples": max((len(p.rights) for pair in both for p in pair), default=1),
            "comparison": compare_set(
                {p.uid: p.rights for p, _ in both}, {q.uid: q.rights for _, q in both}
            )
            if both
            else None,
            "counts": {
                key: sum(test(p.share, q.share) for p, q in both) for key, test in KEEP.items()
            },
            "problems": [{**_line(p), "other": _line(q)} for p, q in passing[start : start + PAGE]],
        }

    def response(self, name: str, set_name: str, uid: str) -> dict[str, Any]:
        """All responses to one problem, as they were written."""
        problem = self.index(name, set_name).get(uid)
        if problem is None:
            raise NotFound(uid)
        out: list[dict[str, Any]] = []
        with self.file(name, set_name).open("rb") as opened:
            for offset in problem.offsets[:64]:
                opened.seek(offset)
                out.append(_cut(json.loads(opened.readline())))
        return {"uid": uid, "question": problem.question, "responses": out}

    def entropies(self) -> dict[str, Any]:
        """Every entropy analysis below the root, with the run it belongs to."""
        found = self.folder.found()
        out: list[dict[str, Any]] = []
        for name in found.entropies:
            data = read_json(self.folder, name)
            if data is not None:
                owner = max(
                    (run for run in found.runs if name.startswith(f"{run}/")), key=len, default=""
                )
                out.append({"name": name, "run": owner, "data": data})
        return {"entropies": out}


def read_index(file: Path, pass_score: float) -> dict[str, Problem]:
    out: dict[str, Problem] = {}
    with file.open("rb") as opened:
        offset = 0
        for raw in opened:
            try:
                line = json.loads(raw)
            except ValueError:
                line = None
            if isinstance(line, dict):
                uid = str(line.get("uid", offset))
                problem = out.setdefault(uid, Problem(uid, question_of(line)))
                score = line.get("score")
                score = (
                    float(score)
                    if isinstance(score, int | float) and math.isfinite(score)
                    else None
                )
                problem.offsets.append(offset)
                problem.scores.append(score)
                right = line.get("right")
                problem.rights.append(
                    right if isinstance(right, bool) else score is not None and score >= pass_score
                )
                parts = line.get("parts")
                if isinstance(parts, dict) and isinstance(parts.get("format"), int | float):
                    answer = parts.get("answer", problem.rights[-1])
                    problem.classes.add(
                        f"{int(parts['format'] > 0)}{int(isinstance(answer, int | float) and answer > 0)}"
                    )
                problem.failures += bool(line.get("failure"))
                problem.truncated += line.get("finish") == "length"
                problem.length += (
                    int(line["length"]) if isinstance(line.get("length"), int | float) else 0
                )
            offset += len(raw)
    return out


def question_of(line: dict[str, Any]) -> str:
    """What was asked: a text, or the last of some messages."""
    prompt = line.get("question") or line.get("prompt") or line.get("messages") or ""
    if isinstance(prompt, list):
        prompt = prompt[-1].get("content", "") if prompt and isinstance(prompt[-1], dict) else ""
    return str(prompt)[-1200:]


def read_json(folder: Folder, name: str) -> dict[str, Any] | None:
    """An object from a file, or None when it is not there, too large or not one."""
    try:
        file = folder.inside(name)
        if file.stat().st_size > MOST_SUMMARY:
            return None
        loaded = json.loads(file.read_bytes())
    except (NotFound, OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


def _pass_score(summary: dict[str, Any]) -> float:
    found = summary
    for key in ("settings", "reward", "pass_score"):
        found = found.get(key) if isinstance(found, dict) else None
    return float(found) if isinstance(found, int | float) else RIGHT


def _has(problem: Problem, search: str) -> bool:
    return (
        not search
        or search.lower() in problem.question.lower()
        or search.lower() in problem.uid.lower()
    )


def _line(problem: Problem) -> dict[str, Any]:
    return {
        "uid": problem.uid,
        "question": problem.question[-SNIPPET:],
        "right": sum(problem.rights),
        "responses": len(problem.scores),
        "failures": problem.failures,
        "truncated": problem.truncated,
        "length": round(problem.length / len(problem.scores), 1),
    }


def _cut(line: dict[str, Any]) -> dict[str, Any]:
    """One response without its token ids; texts cut to what a page can hold."""
    kept = {
        key: value
        for key, value in line.items()
        if not (isinstance(value, list) and value and isinstance(value[0], int | float))
    }
    return {
        key: value[:MOST_TEXT] if isinstance(value, str) else value for key, value in kept.items()
    }
