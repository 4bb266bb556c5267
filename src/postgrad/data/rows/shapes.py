"""The shapes of rows, and the choice of one by the names of a file's columns."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from postgrad.data.rows import fields
from postgrad.data.rows.choices import LETTERED_COLUMNS, LETTERS, SECOND_ANSWERS
from postgrad.data.rows.columns import ALIASES, CONTEXT, canonical_names, is_media
from postgrad.data.rows.messages import parse_nested
from postgrad.data.rows.pictures import place_pictures, without_data
from postgrad.data.rows.values import Row, RowError, data_source_of, is_missing, uid_of
from postgrad.problem import Problem

COMMON = frozenset(("uid", "data_source"))
CHAT = frozenset(("system", "tools", "images"))  # columns of all shapes but plain texts
INSTRUCTION = ["instruction", "input"]  # Alpaca's input is what the instruction is about


@dataclass(frozen=True)
class Shape:
    """One layout of columns.

    Attributes:
        name: for people.
        needs: columns that each row has, under this name or an alias.
        may_have: further columns that are read.
        read: from (row with these names, file name without extension) to the fields of a Problem.
        data_source: of rows that name none; None: the name of the file.
        truth: the column that holds the ground truth, if a row has one.
    """

    name: str
    needs: frozenset[str]
    may_have: frozenset[str]
    read: Callable[[Row, str], dict[str, Any]]
    data_source: str | None = None
    truth: str = "ground_truth"

    @property
    def reads(self) -> frozenset[str]:
        """All columns that are read."""
        return self.needs | self.may_have | COMMON

    def fits(self, columns: tuple[str, ...]) -> bool:
        """Return whether rows with these columns have what the shape needs."""
        return all(
            name in columns or any(alias in columns for alias in ALIASES.get(name, ()))
            for name in self.needs
        )


@dataclass(frozen=True)
class Reading:
    """How rows with certain columns are read.

    Attributes:
        renames: the name in the shape of each column that is read.
        unread: columns that are not read.
        stops: those of them that no row may have.
    """

    renames: dict[str, str]
    unread: tuple[str, ...]
    stops: tuple[str, ...]


def _shape(
    name: str, needs: str, may_have: str, read: Callable[[Row, str], dict[str, Any]], **more: Any
) -> Shape:
    may_have_too = CHAT.union(may_have.split())
    return Shape(name, frozenset(needs.split()), may_have_too, read, **more)


def _choice(options: str, answer: str, data_source: str, more: str = "") -> Shape:
    """Return the shape of multiple-choice questions with these columns of options."""
    may_have = " ".join((more, "subject category", *SECOND_ANSWERS))
    needs = f"question {options} {answer}"
    return _shape("choice", needs, may_have, fields.choice, data_source=data_source, truth=answer)


VERL = _shape(
    "verl",
    "prompt reward_model",
    "target completion extra_info",
    fields.verl,
    data_source="",
    truth="reward_model",
)
TEXT = Shape("text", frozenset(("text",)), frozenset(), fields.text)
# The first that fits is used, so those with more columns come first.
SHAPES = (
    VERL,
    _shape("pair", "chosen rejected", "prompt input ground_truth", fields.pair),
    _choice("A B C D", "answer", "mmlu", " ".join(LETTERS[4:])),
    _choice(
        " ".join(LETTERED_COLUMNS),
        "answer",
        "mmlu",
        " ".join(f"option_{letter}" for letter in LETTERS[4:].lower()),
    ),
    _choice("choices", "answer", "mmlu"),
    _choice("options", "answer", "mmlu_pro"),
    _choice("choices", "answerKey", "arc_c"),
    _shape("messages", "messages", "ground_truth", fields.messages),
    _shape(
        "completion", "prompt completion", "input ground_truth label kto_tag", fields.completion
    ),
    _shape("problem", "prompt", "input ground_truth target", fields.problem),
    TEXT,
)


@lru_cache(maxsize=1024)  # every row of a file has the same columns
def find_shape(columns: tuple[str, ...]) -> Shape:
    """Return the shape of rows with these columns. Raises RowError if no shape fits."""
    shape = next((shape for shape in SHAPES if shape.fits(columns)), None)
    if shape is None:
        raise RowError(_no_shape(columns))
    others = [column for column in columns if column in canonical_names()]
    if shape is TEXT and others:
        raise RowError(
            f"the whole text would be trained on, without {others[0]}; rename text "
            f"(FILE:text=prompt), or leave the other out (FILE:{others[0]}=unused)"
        )
    return shape


def _no_shape(columns: tuple[str, ...]) -> str:
    """Return the nearest name to a column that no shape has, or what the shapes need."""
    seen = f"no known shape has the columns {', '.join(columns) or 'none'}"
    known = canonical_names().union(*(shape.needs for shape in SHAPES))
    for column in columns:
        similar = difflib.get_close_matches(column.strip().lower(), known, n=1, cutoff=0.8)
        if similar and similar[0] not in columns:
            name = similar[0]
            return f"{seen}; did you mean {name} instead of {column!r}? (FILE:{column}={name})"
    needs = {shape.name: ", ".join(sorted(shape.needs)) for shape in SHAPES}
    listed = "; ".join(f"{columns} ({name})" for name, columns in needs.items())
    return f"{seen}; rename them (FILE:OLD=NEW) to one of: {listed}; or write file.py:load"


@lru_cache(maxsize=1024)
def how_to_read(shape: Shape, columns: tuple[str, ...]) -> Reading:
    """Return how rows of a shape with these columns are read.

    Raises RowError if a column is missing, or if two columns may be the same one.
    """
    renames = {name: name for name in columns if name in shape.reads}
    for name in sorted(shape.reads - set(columns)):
        found = [
            alias
            for alias in ALIASES.get(name, ())
            if alias in columns and alias not in shape.needs
        ]
        if name == "prompt" and found == INSTRUCTION:
            found = found[:1]
        if len(found) > 1:
            raise RowError(
                f"{' and '.join(found)} may both be the {name}; rename one of them "
                f"(FILE:{found[0]}={name}), or leave the other out (FILE:{found[1]}=unused)"
            )
        if found:
            renames[found[0]] = name
        elif name in shape.needs:
            names = " or ".join((name, *ALIASES.get(name, ())))
            raise RowError(
                f"no column {names}, which the first row has; give every row the same columns"
            )
    renames = {name: renames[name] for name in columns if name in renames}
    unread = tuple(name for name in columns if name not in renames)
    stops = tuple(name for name in unread if name.lower() in CONTEXT or is_media(name))
    return Reading(renames, unread, stops)


@dataclass
class RowReader:
    """Reads the rows of one file; the first row decides the shape.

    Attributes:
        stem: the file's name without extension.
        folder: the folder of relative paths of pictures; None: where the program runs.
        shape: the shape, once it is known.
    """

    stem: str
    folder: Path | None = None
    shape: Shape | None = None
    _seen: set[tuple[str, ...]] = field(default_factory=set)

    def read(self, row: Row) -> Problem:
        """Return the problem of a row, with the row in `row`; its column of pictures has Pictures.

        Raises:
            RowError: the row does not fit, or a column of context would not be shown to the model.
        """
        row = parse_nested(row)
        columns = tuple(map(str, row))
        self.shape = shape = self.shape or find_shape(columns)
        reading = how_to_read(shape, columns)
        self._seen.add(columns)
        for name in reading.stops:
            _check_unread(name, row[name], shape)
        named = {reading.renames[name]: row[name] for name in columns if name in reading.renames}
        try:
            read = shape.read(named, self.stem)
            if "images" in named or _has_parts(read):
                read = place_pictures(read, named.get("images"), self.folder)
        except RowError as error:
            raise RowError(_with_column_names(str(error), reading.renames)) from error
        if pictures := read.get("images"):
            row = without_data(row, reading.renames, pictures)
        extra = {name: row[name] for name in reading.unread} | read.pop("extra", {})
        default = self.stem if shape.data_source is None else shape.data_source
        source = data_source_of(named, read.pop("data_source", default))
        truth = read.pop("ground_truth", "")
        return Problem(
            uid=uid_of(named), ground_truth=truth, data_source=source, extra=extra, row=row, **read
        )

    def describe(self) -> str:
        """Return one line: which columns were read, as what, and which were not."""
        if self.shape is None:
            return ""
        read: dict[str, None] = {}
        unread: dict[str, None] = {}
        for columns in sorted(self._seen, key=len, reverse=True):
            reading = how_to_read(self.shape, columns)
            for name, known in reading.renames.items():
                read[name if name == known else f"{name} as {known}"] = None
            unread |= dict.fromkeys(reading.unread)
        others = f"; not shown to the model: {', '.join(unread)}" if unread else ""
        return f"{self.shape.name} rows: reads {', '.join(read)}{others}"


def _has_parts(fields: dict[str, Any]) -> bool:
    """Return whether a message of a row has parts, which it keeps only if one is a picture."""
    conversation = fields.get("conversation")
    messages = conversation.messages if conversation else ()
    return any(isinstance(m["content"], list) for m in (*fields["messages"], *messages))


def read_row(row: Row, stem: str, folder: Path | None = None) -> Problem:
    """Return the problem of one row, whose own columns decide its shape. Raises RowError."""
    return RowReader(stem, folder).read(row)


def truth_column(row: Row) -> str:
    """Return the column of a row that holds the ground truth; "ground_truth" if none is known."""
    try:
        shape = find_shape(tuple(row))
        renames = how_to_read(shape, tuple(row)).renames
    except RowError:
        return "ground_truth"
    return next((name for name, known in renames.items() if known == shape.truth), "ground_truth")


def _with_column_names(message: str, renames: dict[str, str]) -> str:
    """Return a message about a column of a shape with its name in the file."""
    for name, known in renames.items():
        if name != known and re.search(rf"\b{known}\b", message):
            return f"{message} ({known} is the column {name})"
    return message


def _check_unread(name: str, value: Any, shape: Shape) -> None:
    """Raise RowError for a column that the model should see, unless it is empty in this row."""
    if is_missing(value) or value in ([], {}):
        return
    if is_media(name):
        if not value:
            return
        raise RowError(
            f"column {name}: pictures are read from a column images (FILE:{name}=images), video "
            f"and audio are not read; leave the column out if the text is enough "
            f"(FILE:{name}=unused)"
        )
    raise RowError(
        f"unread_column: {name} is not read beside the columns of the shape {shape.name}, so the "
        f"model would not see it; merge it into the prompt (file.py:load), rename it "
        f"(FILE:{name}=NEW), or leave it out (FILE:{name}=unused)"
    )
