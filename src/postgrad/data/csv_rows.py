"""Reads tables of text: csv with commas, semicolons (Excel in many countries) or tabs."""

import csv
import io
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from postgrad.errors import ConfigError

# Columns that hold lists or objects in the known schemas. In a csv file they are JSON.
NESTED_COLUMNS = (
    *("prompt", "reward_model", "extra_info", "target", "messages", "conversations", "tools"),
    *("completion", "chosen", "rejected", "choices", "options", "responses", "finishes", "lengths"),
    "history",
)
# MMLU's csv files have no header. A first line of six fields that ends in a letter is one of them.
MMLU_COLUMNS = ("question", "A", "B", "C", "D", "answer")
MAX_CSV_FIELD = 1 << 27  # bytes; a worked solution may exceed the csv module's 128 KiB
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
SNIFFED_RECORDS = 20  # that must have the fields of the header
EXCEL_HINT = ["sep=", ""]  # a first line `sep=;`, which tells Excel the delimiter


def read_csv_text(path: Path, text: str, default: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (location, row) of a table.

    Args:
        path: for error messages.
        text: the table, with a header.
        default: the delimiter of a table with one column, and where several are possible.

    Raises:
        ConfigError: a row has another number of fields than the header, or a quote is not closed.
    """
    csv.field_size_limit(MAX_CSV_FIELD)
    delimiter = find_delimiter(text, default)
    quoting = csv.QUOTE_NONE if _has_plain_quotes(text, delimiter) else csv.QUOTE_MINIMAL
    records = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True
    )
    columns: list[str] | None = None
    number = 0
    num_unnamed = 0
    try:
        for record in records:
            is_blank = not record or (len(record) > 1 and not any(map(str.strip, record)))
            if is_blank or (columns is None and record == EXCEL_HINT):
                continue
            if columns is None:
                num_unnamed = _num_unnamed(record)
            record = _without_unnamed(record, num_unnamed)
            if columns is None:
                if not _is_mmlu_record(record):
                    columns = record
                    check_columns(path, columns)
                    continue
                columns = list(MMLU_COLUMNS)
            number += 1
            if len(record) != len(columns):
                raise ConfigError(
                    f"{path}: row {number} (line {records.line_num}) has {len(record)} fields, not "
                    f"{len(columns)}; quote fields that hold {DELIMITERS[delimiter]} or line breaks"
                )
            row = dict(zip(columns, record, strict=True))
            yield f"row {number}", {name: _csv_value(name, text) for name, text in row.items()}
    except csv.Error as error:
        raise ConfigError(
            f"{path}: line {records.line_num}: not csv ({error}); check its quotes"
        ) from error


def _num_unnamed(header: list[str]) -> int:
    """How many columns at the end of a header have no name: Excel writes `;;` for cleared ones."""
    names = [name.strip() for name in header]
    return len(names) - max((i for i, name in enumerate(names, 1) if name), default=0)


def _without_unnamed(record: list[str], count: int) -> list[str]:
    """The record without its last fields, those of columns without a name, if they are empty."""
    if count and not any(field.strip() for field in record[-count:]):
        return record[:-count]
    return record


def find_delimiter(text: str, default: str) -> str:
    """The delimiter that splits the header outside of its quotes.

    If several do, it is the one that gives the first rows as many fields as the header, and the
    most of them, the default one before the others.
    """
    possible: list[str] = []
    for delimiter in (default, *DELIMITERS):
        if _num_fields(text, delimiter, 1)[:1] > [1] and delimiter not in possible:
            possible.append(delimiter)
    widths = {one: set(_num_fields(text, one, SNIFFED_RECORDS)) for one in possible}
    fitting = [one for one in possible if len(widths[one]) == 1]
    if fitting:
        return max(fitting, key=lambda one: max(widths[one]))
    return possible[0] if possible else default


def _has_plain_quotes(text: str, delimiter: str) -> bool:
    """Whether quotes of a table with tabs are part of its texts, as many programs write them.

    Then each line is a row as wide as the header, and a reader of quotes would join some of them.
    """
    if delimiter != "\t" or '"' not in text:
        return False
    lines = _num_fields(text, delimiter, None, csv.QUOTE_NONE)
    return len(set(lines)) == 1 and len(lines) > len(_num_fields(text, delimiter, None))


def _num_fields(
    text: str, delimiter: str, count: int | None, quoting: Literal[0, 3] = csv.QUOTE_MINIMAL
) -> list[int]:
    """The number of fields of each of the first `count` records; [] if they are not csv."""
    records = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting)
    try:
        return [len(record) for record in islice(filter(None, records), count)]
    except csv.Error:
        return []


def check_columns(path: Path, names: list[str]) -> None:
    """Raises ConfigError if two columns have one name: a row would keep the last one only."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: two columns are called {name!r}; rename one of them")


def _csv_value(column: str, text: str) -> Any:
    """The value of a csv field: nested columns hold JSON, as `postgrad data export` writes them."""
    if column not in NESTED_COLUMNS:
        return text
    if text == "":
        return None
    if text[0] not in "[{":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_mmlu_record(record: list[str]) -> bool:
    return len(record) == len(MMLU_COLUMNS) and record[-1].strip() in ("A", "B", "C", "D")
