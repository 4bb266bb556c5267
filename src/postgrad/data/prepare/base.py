"""The types of `postgrad data prepare`: a data set, its converter, its options, a dropped row."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from postgrad.data.encode.styles import Messages
from postgrad.data.rows.values import Row, RowError, checked_text
from postgrad.errors import ConfigError, did_you_mean


class Drop(Exception):
    """Raised to leave a row out on purpose; the text is the reason that is counted and shown."""


@dataclass(frozen=True)
class Draft:
    """One problem before its prompt is written.

    Attributes:
        question: the question without the instructions of a prompt style.
        truth: the answer that the verifier compares with; "" where a judge scores.
        demonstrations: responses to learn from.
        extra: more columns of extra_info.
        reward: more columns of reward_model, all of them text.
        columns: more columns of the file.
        system: a system message of the problem itself, used in place of the style's.
        dialogue: all messages, where the problem is more than one question.
        data_source: the row's own, where the data set has none.
    """

    question: str
    truth: str = ""
    demonstrations: tuple[str, ...] = ()
    extra: Row = field(default_factory=dict)
    reward: dict[str, str] = field(default_factory=dict)
    columns: Row = field(default_factory=dict)
    system: str = ""
    dialogue: Messages = ()
    data_source: str = ""


@dataclass(frozen=True)
class Option:
    """An option of one data set. A value has the type of the default."""

    default: str | int
    help: str
    choices: tuple[str, ...] = ()

    def read(self, name: str, value: str) -> str | int:
        """The value of `name=value`; raises ConfigError if it is not a valid one."""
        if isinstance(self.default, int):
            if not value.isdigit():
                raise ConfigError(f"{name}={value} is not a whole number from 0")
            return int(value)
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"{name}={value} is not one of its values; {did_you_mean(value, self.choices)}"
            )
        return value


@dataclass(frozen=True)
class Context:
    """What a converter may read besides the row.

    Attributes:
        options: the data set's options.
        split: the split that is prepared.
        index: number of the row, from 0, over all files.
        file: the row's file as the hub names it, e.g. main/train-00000-of-00001.parquet.
        count_tokens: counts the tokens of a text, if a tokenizer was given.
    """

    options: dict[str, Any]
    split: str
    index: int = 0
    file: str = ""
    count_tokens: Callable[[str], int] | None = None

    @property
    def stem(self) -> str:
        """The file name without folder and extension."""
        return self.file.rpartition("/")[2].split(".")[0]


Convert = Callable[[Row, Context], Draft]
# From (questions in order, group of each question, options, split) to the indices of the questions
# in the split.
SelectSplit = Callable[[list[str], list[str], dict[str, Any], str], set[int]]


@dataclass(frozen=True)
class DataSet:
    """One data set of the catalog.

    Attributes:
        help: one line of help.
        repo: its name on the hub; "" for local files only.
        splits: split -> patterns of its files on the hub; the first split is the default.
        convert: turns a row into a Draft; raises Drop with the reason, or RowError.
        data_source: selects the verifier; "" for the rows' own.
        local: patterns of the names that such files have on a local disk.
        style: the default prompt style.
        ability: the column `ability`.
        judged: `rule` for a verifier, `model` for a judge.
        options: the data set's own options.
        compares_replies: a row with the question and answer of another one, but with other replies,
            is no repetition.
        group: with `select_split`, the column of extra_info whose groups are split one by one.
        select_split: which problems belong to a split, where no file says so.
        note: printed after the data set was prepared.
        pair_by: columns of extra_info; with the option pairs=similar, each problem gets the
            question and truth of the next problem that is equal in them.
    """

    help: str
    repo: str
    splits: dict[str, tuple[str, ...]]
    convert: Convert
    data_source: str
    local: tuple[str, ...] = ()
    style: str = "own"
    ability: str = "math"
    judged: str = "rule"
    options: dict[str, Option] = field(default_factory=dict)
    group: str = ""
    select_split: SelectSplit | None = None
    note: str = ""
    pair_by: tuple[str, ...] = ()
    compares_replies: bool = False


def first_text(row: Row, names: Iterable[str]) -> str:
    """The text of the first of these columns that the row has; raises RowError if it is blank."""
    names = tuple(names)
    for name in names:
        if row.get(name) is not None:
            if not checked_text(row[name], name).strip():
                raise RowError(f"{name} is empty; fill it or remove the row")
            return row[name]
    columns = ", ".join(map(str, row)) or "none"
    raise RowError(f"none of the columns {', '.join(names)}; the row has {columns}")


def drop_outside_slice(context: Context, slices: dict[str, tuple[int, int]]) -> None:
    """Drops a row whose index is not in the slice [first, end) of its split."""
    first, end = slices[context.split]
    if not first <= context.index < end:
        raise Drop(f"not in the rows {first} to {end - 1}, which are the split {context.split}")


def select_columns(row: Row, names: Iterable[str]) -> Row:
    """The named columns that are not null."""
    return {name: row[name] for name in names if row.get(name) is not None}
