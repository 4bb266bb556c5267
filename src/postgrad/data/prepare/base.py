"""What a data set of the table is made of: where it lies, how a row becomes a problem, what is dropped and why."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from postgrad.data.rows import Row, RowError, checked_text
from postgrad.data.styles import Messages
from postgrad.errors import ConfigError, did_you_mean


class Drop(Exception):
    """This row is left out on purpose; the text is the reason that is counted and shown."""


@dataclass(frozen=True)
class Draft:
    """One problem before its prompt is written.

    Attributes:
        question: what is asked, without instructions of a prompt style.
        truth: what the verifier compares with; empty where a judge decides.
        demonstrations: responses to learn from.
        extra: more columns of extra_info.
        reward: more columns of reward_model; texts.
        columns: more columns of the file.
        system: a system turn that belongs to the problem, in place of the style's.
        dialogue: all turns, where the problem is more than one question.
        data_source: the row's own, where the set has none.
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
    """A setting of one data set. The default's type is the value's."""

    default: str | int
    help: str
    choices: tuple[str, ...] = ()

    def read(self, name: str, value: str) -> str | int:
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
    """What a converter may know beside the row: the set's options, the split, the row's number from 0 and its file."""

    options: dict[str, Any]
    split: str
    index: int = 0
    file: str = ""  # as the hub names it, e.g. main/train-00000-of-00001.parquet
    count_tokens: Callable[[str], int] | None = None

    @property
    def stem(self) -> str:
        return self.file.rpartition("/")[2].split(".")[0]


Convert = Callable[[Row, Context], Draft]
# From (the questions in order, the group of each, the options, the split) to the numbers of those that belong to the split.
Divide = Callable[[list[str], list[str], dict[str, Any], str], set[int]]


@dataclass(frozen=True)
class DataSet:
    """One entry of the table.

    Attributes:
        help: one line for people.
        repo: its name on the hub; empty: local files only.
        splits: split -> patterns of its files on the hub; the first split is the default.
        convert: a row as a Draft; raises Drop with the reason, or RowError.
        data_source: what chooses the verifier; empty: the rows' own.
        local: patterns of names that such files have elsewhere.
        style: the prompt style unless another is asked for.
        judged: `rule` for a verifier, `model` for a judge.
        options: settings of its own.
        group: with `divide`, the column of extra_info whose values are divided one by one.
        divide: which problems belong to a split, where no file says so.
        note: what everybody should know who uses it.
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
    divide: Divide | None = None
    note: str = ""


def first_text(row: Row, names: Iterable[str]) -> str:
    """The first of these columns that the row has; it must be a text and not blank."""
    names = tuple(names)
    for name in names:
        if row.get(name) is not None:
            if not checked_text(row[name], name).strip():
                raise RowError(f"{name} is empty; fill it or remove the row")
            return row[name]
    raise RowError(
        f"none of the columns {', '.join(names)}; it has {', '.join(map(str, row)) or 'none'}"
    )


def sliced(context: Context, slices: dict[str, tuple[int, int]]) -> None:
    """Drop a row whose number is not in its split's slice of the file's order."""
    first, end = slices[context.split]
    if not first <= context.index < end:
        raise Drop(f"outside the rows {first} to {end - 1} that are the split {context.split}")
