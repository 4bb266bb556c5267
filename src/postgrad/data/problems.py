"""Loads the problems of a data source such as `data.train`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from postgrad.data.readers import data_files, exists, extension, read_rows, split_columns
from postgrad.data.rows import Row, RowError, rename_columns
from postgrad.data.uid import assign_uids
from postgrad.errors import ConfigError
from postgrad.problem import Problem
from postgrad.user_code import import_named

# Sources that are no files, by the text before the first colon: functions of the whole text.
GENERATED = {
    "arithmetic": "postgrad.data.arithmetic:arithmetic_source",
    "seeds": "postgrad.data.generated:seeds_source",
    "reasoning_gym": "postgrad.data.generated:reasoning_gym_source",
}


def load_problems(source: str) -> list[Problem]:
    """All problems of a source, in file order, each with a unique and stable uid.

    Args:
        source: a .parquet, .jsonl, .json, .csv, .tsv or .arrow file, also .jsonl.gz, .json.gz,
            .csv.gz, .tsv.gz and .jsonl.zst; a folder of such files, read in order of their names;
            `arithmetic:LEVEL[:STYLE[:SPLIT]]`; `seeds:N`; `reasoning_gym:NAME[:OPTION=VALUE]`;
            `hub:OWNER/NAME[:SPLIT[:COLUMN=COLUMN]]`; or several of these, separated by commas.
            `FILE:COLUMN=NEW_NAME` renames columns.

    Raises:
        ConfigError: one line with the file, the row and what to do.

    Examples:
        >>> load_problems("arithmetic:2:digits")[0].data_source
        'arithmetic/digits'
    """
    return load_problems_with_locations(source)[0]


def load_problems_with_locations(source: str) -> tuple[list[Problem], list[str]]:
    """(problems, location of each), with locations such as "train.jsonl: line 3"."""
    problems: list[Problem] = []
    locations: list[str] = []
    for part in _split_source(source):
        for location, problem in _read_part(part):
            problems.append(problem)
            locations.append(location)
    located = [
        replace(problem, read_from=location)
        for problem, location in zip(problems, locations, strict=True)
    ]
    return assign_uids(located, locations), locations


def _split_source(source: str) -> list[str]:
    if "," in source and exists(Path(source).expanduser()):
        return [source]  # the path itself holds a comma
    parts = [part.strip() for part in source.split(",")]
    if not all(parts):
        raise ConfigError(
            f"data source {source!r} has an empty part; "
            "give files, folders or arithmetic:LEVEL, separated by commas"
        )
    return parts


def _read_part(part: str) -> Iterator[tuple[str, Problem]]:
    kind, colon, _ = part.partition(":")
    if kind in GENERATED and (colon or kind == "arithmetic"):
        for i, problem in enumerate(import_named(GENERATED[kind])(part), 1):
            if kind == "arithmetic":
                # assign_uids names it with all others: two levels may hold the same problem.
                problem = replace(problem, uid="")
            yield f"{part}: row {i}", problem
        return
    if part.startswith("hub:"):
        yield from _read_hub(part)
        return
    name, columns = split_columns(part)
    for file in data_files(Path(name).expanduser()):
        yield from _read_file(file, columns)


def _read_hub(part: str) -> Iterator[tuple[str, Problem]]:
    """The rows of a data set of the hub, with renamed columns."""
    from postgrad.data.hub_source import hub_files

    name, files, columns = hub_files(part)
    for file in files:
        yield from _read_file(file, columns, name)


def _read_file(
    path: Path, columns: Mapping[str, str] | None = None, data_source: str = ""
) -> Iterator[tuple[str, Problem]]:
    """The problems of a file.

    Args:
        path: the file.
        columns: new names of columns by their old ones.
        data_source: of rows that name none; default: the file's name.
    """
    stem = data_source or path.name[: -len(extension(path))]
    is_empty = True
    for located in _convert(str(path), stem, read_rows(path), columns):
        is_empty = False
        yield located
    if is_empty:
        raise ConfigError(f"{path}: no rows; give a file with at least one problem")


def _convert(
    label: str,
    stem: str,
    rows: Iterable[tuple[str, Row]],
    columns: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, Problem]]:
    """(location, problem) of each (location, row). The first row decides the schema."""
    from postgrad.data.message_trees import join_trees
    from postgrad.data.schemas import normalize_row, recognize

    schema = None
    for location, row in join_trees(rows, label):
        try:
            if columns:
                row = rename_columns(row, columns)
            row = normalize_row(row)
            schema = schema or recognize(row)
            yield f"{label}: {location}", replace(schema.read(row, stem), row=row)
        except RowError as error:
            raise ConfigError(f"{label}: {location}: {error}") from error


def problems_of_rows(rows: Sequence[Row], label: str, stem: str = "train") -> list[Problem]:
    """The problems of rows in memory, as if they were read from a file named `stem`.

    `label` starts error messages. Raises ConfigError.
    """
    located = ((f"row {i}", row) for i, row in enumerate(rows, 1))
    read = list(_convert(label, stem, located))
    problems = [replace(problem, read_from=location) for location, problem in read]
    return assign_uids(problems, [location for location, _ in read])
