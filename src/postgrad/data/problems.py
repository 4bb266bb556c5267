"""Loads the problems of a data source such as `data.train`."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from postgrad import phases
from postgrad.data.rows.files import data_files, exists, extension, read_rows, split_columns
from postgrad.data.rows.values import Row, RowError, rename_columns, type_name
from postgrad.data.uid import assign_uids
from postgrad.errors import ConfigError, Damaged, Missing, UserCode, WrongValue, first_line
from postgrad.problem import Problem
from postgrad.user_code import import_named, load_object, place_of

Report = Callable[[str], object]  # takes a line about what was read
ROWS_PER_COUNT = 10_000  # a long file shows how far it is
LOADER = re.compile(r"(.+\.py):([A-Za-z_]\w*)")  # file.py:load
# Sources that are no files, by the text before the first colon: functions of the whole text.
GENERATED = {
    "arithmetic": "postgrad.data.sources.arithmetic:arithmetic_source",
    "scenes": "postgrad.data.sources.scenes:scenes_source",
    "seeds": "postgrad.data.sources.generated:seeds_source",
    "reasoning_gym": "postgrad.data.sources.generated:reasoning_gym_source",
}


def load_problems(source: str, report: Report | None = None) -> list[Problem]:
    """Return all problems of a source, in file order, each with a unique and stable uid.

    Args:
        source: a .parquet, .jsonl, .json, .csv, .tsv or .arrow file, also .jsonl.gz, .json.gz,
            .csv.gz, .tsv.gz and .jsonl.zst; a folder of such files, read in order of their names;
            `file.py:load`, a function that returns rows or problems;
            `arithmetic:LEVEL[:STYLE[:SPLIT]]`; `scenes:KIND[:SPLIT]`; `seeds:N`;
            `reasoning_gym:NAME[:OPTION=VALUE]`;
            `hub:OWNER/NAME[:SPLIT[:COLUMN=COLUMN]]`; or several of these, separated by commas.
            `FILE:COLUMN=NEW_NAME` renames columns.
        report: takes one line per source: which columns were read, as what, and which were not.

    Raises:
        ConfigError: one line with the file, the row and what to do.

    Examples:
        >>> load_problems("arithmetic:2:digits")[0].data_source
        'arithmetic/digits'
    """
    return load_problems_with_locations(source, report)[0]


def load_problems_with_locations(
    source: str, report: Report | None = None
) -> tuple[list[Problem], list[str]]:
    """Return (problems, location of each), with locations such as "train.jsonl: line 3"."""
    located: list[tuple[str, Problem]] = []
    for part in _split_source(source):
        phases.begin(f"reading {part}")
        lines: dict[str, None] = {}  # the files of a folder are often alike
        located += _read_part(part, lambda line, lines=lines: lines.setdefault(line))
        for line in lines:
            (report or str)(f"{part}: {line}")
    return _identified(located), [location for location, _ in located]


def _identified(located: Sequence[tuple[str, Problem]]) -> list[Problem]:
    """Return problems with their uids and their locations."""
    problems = [replace(problem, read_from=location) for location, problem in located]
    return assign_uids(problems, [location for location, _ in located])


def _split_source(source: str) -> list[str]:
    if "," in source and exists(Path(source).expanduser()):
        return [source]  # the path itself holds a comma
    parts = [part.strip() for part in source.split(",")]
    if not all(parts):
        raise WrongValue(
            f"data source {source!r} has an empty part; "
            "give files, folders or arithmetic:LEVEL, separated by commas"
        )
    return parts


def _read_part(part: str, report: Report) -> Iterator[tuple[str, Problem]]:
    """Yield (location, problem) of one source."""
    kind, colon, _ = part.partition(":")
    if kind in GENERATED and (colon or kind == "arithmetic"):
        for i, problem in enumerate(import_named(GENERATED[kind])(part), 1):
            if kind == "arithmetic":
                # assign_uids names it with all others: two levels may hold the same problem.
                problem = replace(problem, uid="")
            yield f"{part}: row {i}", problem
        return
    if part.startswith("hub:"):
        from postgrad.data.sources.hub import hub_files

        name, files, columns = hub_files(part)
    else:
        path, columns = split_columns(part)
        if loader := LOADER.fullmatch(path):
            file = Path(loader[1])
            yield from _convert(path, file.stem, file.parent, _call_loader(path), columns, report)
            return
        name, files = "", data_files(Path(path).expanduser())
    for file in files:
        stem = name or file.name[: -len(extension(file))]
        yield from _convert(str(file), stem, file.parent, read_rows(file), columns, report)


def _call_loader(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (location, row or problem) of the user's function file.py:load."""
    load = load_object(path, f"data source {path}", callable, "function")
    try:
        for i, row in enumerate(load(), 1):
            if not isinstance(row, dict | Problem):
                raise UserCode(
                    f"{path}: row {i} is {type_name(row)}; yield dicts of columns, or Problems"
                )
            yield f"row {i}", row
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserCode(f"{path} failed: {reason}{place_of(error)}") from error


def _convert(
    label: str,
    stem: str,
    folder: Path | None,
    rows: Iterable[tuple[str, Row | Problem]],
    columns: Mapping[str, str],
    report: Report = str,
) -> Iterator[tuple[str, Problem]]:
    """Yield (location, problem) of each (location, row). The first row decides the shape."""
    from postgrad.data.rows.shapes import RowReader

    reader = RowReader(stem, folder)
    number = 0
    for number, (location, row) in enumerate(rows, 1):
        if number % ROWS_PER_COUNT == 0:
            phases.count(number, 0)
        try:
            if not isinstance(row, Problem):
                row = reader.read(rename_columns(row, columns) if columns else row)
        except RowError as error:
            raise Damaged(f"{label}: {location}: {error}") from error
        yield f"{label}: {location}", row
    if not number:
        raise Missing(f"{label}: no rows; give at least one problem")
    if line := reader.describe():
        report(line)


def problems_of_rows(rows: Sequence[Row], label: str, stem: str = "train") -> list[Problem]:
    """Return the problems of rows in memory, as if they were read from a file named `stem`.

    `label` starts error messages. Raises ConfigError.
    """
    located = ((f"row {i}", row) for i, row in enumerate(rows, 1))
    return _identified(list(_convert(label, stem, None, located, {})))
