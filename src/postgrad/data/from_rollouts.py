"""Rollouts of a run as conversations to imitate: rejection sampling for SFT.

Each row is {"messages": [...], "uid": "UID/STEP/INDEX", "reward": number}. Messages of tools and
environments are those that the policy saw. The prompt is the problem's own, with what an
environment added.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from postgrad.config.stored import read_stored_config
from postgrad.data.problems import load_problems
from postgrad.data.rollout_folder import rollout_files
from postgrad.data.rows.pictures import split_places
from postgrad.errors import (
    ConfigError,
    Damaged,
    Missing,
    UnknownName,
    Unreadable,
    Unsupported,
    WrongValue,
    did_you_mean,
    first_line,
)
from postgrad.pictures import image_parts, text_of_content
from postgrad.problem import Message, Problem

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": ge,
    "<=": le,
    "!=": ne,
    "==": eq,
    "=": eq,
    ">": gt,
    "<": lt,
}
CONDITION = re.compile(r"\s*([\w/.]+)\s*(>=|<=|!=|==|=|>|<)\s*(\S+?)\s*")
LENGTH = "length"  # tokens of the response
STEP = "step"
REQUIRED = frozenset({"uid", "index", "reward", "source", "response", "question", "text"})


@dataclass(frozen=True)
class Condition:
    """A comparison of a column with a number or a text."""

    column: str
    operator: str
    value: float | str

    def holds(self, row: dict[str, Any]) -> bool:
        """Whether a row fulfills it; a row without the value does not. Raises ConfigError."""
        if self.column not in row:
            known = [name for name, value in row.items() if isinstance(value, int | float | str)]
            raise UnknownName(
                f"where: the rollouts have no column {self.column}; "
                f"{did_you_mean(self.column, known)}"
            )
        value = row[self.column]
        if value is None or isinstance(value, str) != isinstance(self.value, str):
            return False
        return OPERATORS[self.operator](value, self.value)


def parse_where(text: str) -> list[Condition]:
    """Return the conditions of `reward>0.9 and finish=stop`; all must hold. Raises ConfigError."""
    conditions: list[Condition] = []
    for part in re.split(r"\s+and\s+", text.strip()) if text.strip() else []:
        match = CONDITION.fullmatch(part)
        if match is None:
            raise WrongValue(
                f"where={text!r}: {part!r} is no condition; type for example "
                "where='reward>0.9 and finish=stop'"
            )
        try:
            value: float | str = float(match[3])
        except ValueError:
            value = match[3].strip("'\"")
        conditions.append(Condition(match[1], match[2], value))
    return conditions


def select_rollouts(
    run: Path,
    conditions: Sequence[Condition],
    per_problem: int = 0,
    on_note: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """Rows for SFT: the policy's trajectories that fulfill all conditions, in order of steps.

    Args:
        run: the folder of the run.
        conditions: on the columns of the rollouts, `step` and `length` (tokens).
        per_problem: most rows per problem, the first ones; 0: all.
        on_note: called with a line if the run's training data cannot be read.

    Raises:
        ConfigError: the folder has no rollouts, a file cannot be read, or a column does not exist.
    """
    files = rollout_files(run / "rollouts")
    if not files:
        raise Missing(f"{run} has no rollouts; give the folder of a run that sampled responses")
    agent = read_stored_config(run).get("agent")
    is_of_agents = isinstance(agent, dict) and bool(agent.get("command"))
    problems = _problems_of(run, on_note)
    counts: Counter[str] = Counter()
    seen: set[tuple[str, str, tuple[str, ...]]] = set()
    for step, file in files.items():
        for row in _read_rows(file):
            row |= {STEP: step, LENGTH: len(row["response"])}
            if row["source"] != "policy" or row.get("failure"):
                continue
            if not all(condition.holds(row) for condition in conditions):
                continue
            if is_of_agents and row.get("images"):
                raise Unsupported(
                    f"{file}: a program sent the pictures of row {row['index']}, and rollouts do "
                    "not say to which of its messages they belong; use a run without pictures"
                )
            uid = row["uid"]
            text = row.get("messages") or row["text"]
            trajectory = (uid, text, tuple(row.get("images") or ()))
            is_full = per_problem and counts[uid] >= per_problem
            if is_full or trajectory in seen:
                continue
            counts[uid] += 1
            seen.add(trajectory)
            yield {
                "messages": _messages(row, problems.get(uid)),
                "uid": f"{uid}/{step}/{row['index']}",
                "reward": row["reward"],
            } | _pictures(run, row)


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of rollouts. Raises ConfigError."""
    try:
        table = parquet.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise Unreadable(f"{file} cannot be read: {first_line(error)}; remove it") from error
    missing = REQUIRED.difference(table.column_names)
    if missing:
        raise Damaged(f"{file} has no column {min(missing)}; it is no file of rollouts")
    return table.to_pylist()


def _pictures(run: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Return the column `images` of a row with pictures: their files in the run's folder."""
    files: list[str] = []
    for key in row.get("images") or ():
        found = sorted((run / "pictures").glob(f"{key}.*"))
        if not found:
            raise Missing(f"{run}/pictures has no picture {key} of the rollouts; restore it")
        files.append(str(found[0].absolute()))
    return {"images": files} if files else {}


def _messages(row: dict[str, Any], problem: Problem | None) -> list[Message]:
    """Return the whole conversation: the prompt, then the turns."""
    prompt = list(problem.messages) if problem else []
    asked = prompt.pop()["content"] if prompt and prompt[-1]["role"] == "user" else ""
    turns = [{"role": "assistant", "content": row["text"]}]
    if row.get("messages"):
        turns = json.loads(row["messages"])
    num_pictures = len(row.get("images") or ()) - len(image_parts([*prompt, *turns]))
    content = _content_of_question(row["question"], asked, num_pictures)
    return [*prompt, {"role": "user", "content": content}, *turns]


def _content_of_question(question: str, asked: Any, num_pictures: int) -> Any:
    """Return the question, with parts {type: image} for its pictures.

    Args:
        question: what the problem asks and what an environment adds to it, as a text with `<image>`
            for each picture. Others may be a part of the texts.
        asked: the content of the problem's last message.
        num_pictures: how many pictures the question has.
    """
    if num_pictures <= 0:
        return question
    known = asked
    if isinstance(asked, str):
        known = [{"type": "text", "text": f"{asked}\n\n"}] if asked else []
    if not question.startswith(text_of_content(known)):  # the data were changed after the run
        known = []
    added = question.removeprefix(text_of_content(known))
    if num_pictures > len(image_parts([{"content": known}])):
        return [*known, *split_places(added)]
    return [*known, {"type": "text", "text": added}] if added else known


def _problems_of(run: Path, on_note: Callable[[str], None]) -> dict[str, Problem]:
    """Return the run's training problems by uid.

    Empty, with a note, if they cannot be read any more.
    """
    data = read_stored_config(run).get("data")
    source = data.get("train") if isinstance(data, dict) else None
    try:
        return {one.uid: one for one in load_problems(str(source))}
    except ConfigError as error:
        on_note(
            f"the training data of {run} cannot be read ({error}); "
            "prompts have their last message only"
        )
        return {}
