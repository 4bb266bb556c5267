"""Several named data sets in one setting: `a.jsonl,b.parquet` or `math=a.jsonl,code=b.jsonl`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postgrad.data.rows.files import exists, extension, split_columns
from postgrad.errors import Conflict, WrongValue
from postgrad.problem import Problem, problem_label

SET_NAME = re.compile(r"[A-Za-z0-9_.-]+")
NAMED = re.compile(rf"({SET_NAME.pattern})=(.+)", re.DOTALL)
# File names that say a split but not a data set: the set is named FOLDER-FILE.
SPLIT_NAMES = ("train", "test", "valid", "validation", "val", "dev", "data", "problems")


def split_sets(source: str) -> dict[str, str]:
    """Name -> source of each set. A set without a name is named after its file.

    The set of gsm8k/test.jsonl is called gsm8k-test.

    Raises:
        ConfigError: a part is empty, or two sets have the same name.
    """
    if exists(Path(source).expanduser()):
        return {_default_name(source): source}
    sets: dict[str, str] = {}
    for part in source.split(","):
        part = part.strip()
        if not part:
            raise WrongValue(
                f"data source {source!r} has an empty part; "
                "give files, folders or arithmetic:LEVEL, separated by commas"
            )
        name, set_source = _split_name(part)
        if name in sets:
            raise Conflict(
                f"two data sets are called {name}; "
                f"name them yourself: NAME1={sets[name]},NAME2={set_source}",
                at=name,
            )
        sets[name] = set_source
    return sets


def _split_name(part: str) -> tuple[str, str]:
    """(name, source) of `NAME=SOURCE` or `SOURCE`."""
    match = NAMED.fullmatch(part)
    if match and not exists(Path(part).expanduser()):
        return match[1], match[2]
    return _default_name(part), part


def _default_name(part: str) -> str:
    if part.split(":")[0] == "arithmetic":
        return part.replace(":", "-")
    path = Path(split_columns(part)[0]).expanduser()
    stem = path.name[: -len(extension(path))] if extension(path) else path.name
    parent = path.absolute().parent.name
    name = f"{parent}-{stem}" if stem.lower() in SPLIT_NAMES and parent else stem
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "data"


def find_test_set_evidence(source: str, problems: Sequence[Problem]) -> str:
    """Why this looks like a test set, as one clause; "" if nothing says so.

    Evidence is a row's own `split` (also in `extra_info`), the split of an arithmetic source, or
    `test` in the file name.
    """
    for problem in problems:
        split = _split_of(problem)
        if isinstance(split, str) and split.strip().lower() == "test":
            return f"the split of {problem_label(problem)} is test"
    source_parts = source.split(":")
    if source_parts[0] == "arithmetic":
        return f"{source} is the split test" if source_parts[3:4] == ["test"] else ""
    file_name = Path(source).name
    if "test" in re.split(r"[^a-z0-9]+", file_name.lower()):
        return f"the file name {file_name} contains test"
    return ""


def _split_of(problem: Problem) -> Any:
    info = problem.extra.get("extra_info")
    info_split = info.get("split") if isinstance(info, dict) else None
    return problem.extra.get("split") or info_split
