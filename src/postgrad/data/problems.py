"""From the text of `data.train` to a list of problems."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from postgrad.data.arithmetic import arithmetic_source
from postgrad.data.readers import exists, extension, read_rows
from postgrad.data.rows import RowError
from postgrad.data.schemas import recognize
from postgrad.data.uid import assign_uids
from postgrad.errors import ConfigError
from postgrad.problem import Problem


def load_problems(source: str) -> list[Problem]:
    """All problems of a source, in file order, each with a uid that is unique and stable.

    Args:
        source: a .parquet, .jsonl, .jsonl.gz, .json or .csv file; a folder of such files, taken by name;
            `arithmetic:LEVEL[:STYLE[:SPLIT]]`; or several of these with commas between.

    Raises:
        ConfigError: in one line with the file, the row and what to do.

    Examples:
        >>> load_problems("arithmetic:2:digits")[0].data_source
        'arithmetic/digits'
    """
    return load_problems_with_locations(source)[0]


def load_problems_with_locations(source: str) -> tuple[list[Problem], list[str]]:
    """As load_problems, with where each was read: ("file: row 3")."""
    problems: list[Problem] = []
    places: list[str] = []
    for part in _parts(source):
        for place, problem in _read(part):
            problems.append(problem)
            places.append(place)
    return assign_uids(problems, places), places


def _parts(source: str) -> list[str]:
    if "," in source and exists(Path(source).expanduser()):
        return [source]  # a path may hold a comma itself
    parts = [part.strip() for part in source.split(",")]
    if not all(parts):
        raise ConfigError(
            f"data source {source!r} has an empty part; give files, folders or arithmetic:LEVEL with commas between"
        )
    return parts


def _read(part: str) -> Iterator[tuple[str, Problem]]:
    if part == "arithmetic" or part.startswith("arithmetic:"):
        for i, problem in enumerate(arithmetic_source(part), 1):
            yield (
                f"{part}: row {i}",
                replace(problem, uid=""),
            )  # named with all others: two levels may hold the same problem
        return
    path = Path(part).expanduser()
    if not (exists(path) and path.is_dir()):
        yield from _read_file(path)
        return
    files = sorted(
        p for p in path.iterdir() if p.is_file() and extension(p) and not p.name.startswith(".")
    )
    if not files:
        raise ConfigError(
            f"{path}: a folder without data files; give a file, or a folder of .parquet, .jsonl, .json or .csv files"
        )
    for file in files:
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[tuple[str, Problem]]:
    schema = None
    stem = path.name[: -len(extension(path))]
    for place, row in read_rows(path):
        try:
            schema = schema or recognize(row)
            yield f"{path}: {place}", schema.convert(row, stem)
        except RowError as error:
            raise ConfigError(f"{path}: {place}: {error}") from error
    if schema is None:
        raise ConfigError(f"{path}: no rows; give a file with at least one problem")
