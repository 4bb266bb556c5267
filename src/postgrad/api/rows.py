"""Data in memory: lists of dicts, frames, pyarrow tables, datasets.Dataset; paths and hub ids."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from postgrad.data.problems import problems_of_rows
from postgrad.data.rows.files import exists
from postgrad.errors import Missing, WrongValue
from postgrad.pictures import Picture, PictureError, read_picture
from postgrad.problem import Problem

Row = dict[str, Any]
TRAIN = ("train",)  # splits of a hub data set, the first one that exists
HELD_OUT = ("validation", "test")
PICTURES = ("image", "images")
EXTENSIONS = ("parquet", "jsonl", "json", "csv", "arrow", "gz", "zst")


def as_source(data: Any, label: str = "data", splits: Sequence[str] = TRAIN) -> str | list[Row]:
    """Return data as the text of a data source, or as rows if it is in memory.

    `label` is the argument's name, for error messages. A hub id without a split means the first of
    `splits` that the data set has. Raises ConfigError.
    """
    if not isinstance(data, str | Path):
        return as_rows(data, label)
    text = str(data)
    if not _is_hub_id(text):
        return text
    from postgrad.data.sources.hub import hub_source

    return hub_source(text, splits)


def as_rows(data: Any, label: str = "data") -> list[Row]:
    """Return data in memory as rows that JSON can hold. Raises ConfigError."""
    if isinstance(data, Mapping):
        keys = ", ".join(map(str, list(data)[:5]))
        hint = f'one split of it such as {label}=splits["train"]'
        if any(name in data for name in ("prompt", "question", "messages", "text")):  # columns
            hint = f"{label}=datasets.Dataset.from_dict(columns)"
        raise WrongValue(
            f"{label} is a {type(data).__name__} with the keys {keys}; give a list of rows, "
            f"or {hint}",
            at=label,
        )
    if hasattr(data, "to_dicts"):  # polars
        items: Iterable[Any] = data.to_dicts()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        items = data.to_dict("records")
    elif hasattr(data, "to_pylist"):  # pyarrow
        items = data.to_pylist()
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes):
        items = data
    else:
        raise WrongValue(
            f"{label} is {type(data).__name__}; give a list of dicts, a pandas or polars frame, "
            "a pyarrow table, a datasets.Dataset, a file or a hub id",
            at=label,
        )
    rows = [_as_row(item, i, label) for i, item in enumerate(items, 1)]
    if not rows:
        raise Missing(f"{label} has no rows; give at least one problem", at=label)
    return rows


def as_problems(data: Any, label: str = "data") -> list[Problem]:
    """Return data in memory or in files as problems. Raises ConfigError."""
    from postgrad.data.problems import load_problems

    source = as_source(data, label)
    return load_problems(source) if isinstance(source, str) else problems_of_rows(source, label)


def to_jsonl(rows: Sequence[Row]) -> str:
    """Return rows as the text of a .jsonl file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _as_row(item: Any, number: int, label: str) -> Row:
    if isinstance(item, Problem):
        return _row_of_problem(item)
    if not isinstance(item, Mapping):
        raise WrongValue(
            f"{label}: row {number} is {type(item).__name__}, not a dict; write for example "
            '{"prompt": "2+2=", "ground_truth": "4"}'
        )
    row = {str(name): _as_json(value, number, str(name), label) for name, value in item.items()}
    # Paths are relative to where the program runs, and a run reads its data from another folder.
    return {name: _absolute(value) if name in PICTURES else value for name, value in row.items()}


def _absolute(value: Any) -> Any:
    """Return a path, or a list of paths, as absolute ones; URLs and other values as they are."""
    if isinstance(value, list):
        return [_absolute(one) for one in value]
    is_path = isinstance(value, str) and not re.match(r"\w+:", value)
    return str(Path(value).absolute()) if is_path and value else value


def _row_of_problem(problem: Problem) -> Row:
    """Return the row that is read as this problem."""
    row: Row = {**problem.extra, "uid": problem.uid, "data_source": problem.data_source}
    conversation = problem.conversation
    if conversation is None:
        row["prompt"] = list(problem.messages)
    elif conversation.text:
        row["text"] = conversation.text
    elif conversation.num_prompt:
        row["prompt"] = list(problem.messages)
        row["completion"] = list(conversation.messages[conversation.num_prompt :])
    else:
        row["messages"] = list(conversation.messages)
    if problem.images:
        row["images"] = [picture.data_url() for picture in problem.images]
    if tools := conversation.tools if conversation else problem.tools:
        row["tools"] = list(tools)
    if conversation is None and problem.demonstrations:
        row["target"] = list(problem.demonstrations)
    if "reward_model" in row:  # verl's column has the ground truth
        row["reward_model"] = {"ground_truth": problem.ground_truth, **row["reward_model"]}
    elif problem.ground_truth:
        row["ground_truth"] = problem.ground_truth
    return row


def _as_json(value: Any, number: int, column: str, label: str) -> Any:
    """Return a value as JSON has it; a missing number of a frame becomes null."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _as_json(one, number, column, label) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one, number, column, label) for one in value]
    if isinstance(value, bytes | Picture) or type(value).__module__.startswith("PIL."):
        try:
            return read_picture(value).data_url()
        except PictureError as error:
            raise WrongValue(f"{label}: row {number}: the column {column}: {error}") from error
    if hasattr(value, "tolist"):  # NumPy
        return _as_json(value.tolist(), number, column, label)
    raise WrongValue(
        f"{label}: row {number}: the column {column} holds a {type(value).__name__}, which a data "
        "file cannot hold; convert it to text or numbers, or leave the column out"
    )


def _is_hub_id(text: str) -> bool:
    """Whether a text is `owner/name[:...]` of the hub, and not a path."""
    from postgrad.data.sources.hub import is_hub_id

    repository = text.partition(":")[0]
    owner, _, name = repository.partition("/")
    has_extension = "." in name and name.rpartition(".")[2] in EXTENSIONS
    is_local = exists(Path(text).expanduser()) or exists(Path(owner)) or owner in (".", "..", "~")
    return is_hub_id(repository) and not has_extension and not is_local
