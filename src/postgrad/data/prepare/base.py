"""The types of `postgrad data prepare`: a data set, its options, a problem before it is written."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postgrad.data.encode.styles import Messages
from postgrad.data.rows.values import Row
from postgrad.errors import UnknownName, WrongValue, did_you_mean
from postgrad.pictures import Picture


class Drop(Exception):
    """Raised to leave a row out on purpose; the text is the reason that is counted and shown."""


@dataclass(frozen=True)
class PreparedRow:
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
        images: the pictures, one for each `<image>` in the question or the dialogue.
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
    images: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Option:
    """An option of one data set. A value has the type of the default."""

    default: str | int
    help: str
    choices: tuple[str, ...] = ()

    def read(self, name: str, value: str) -> str | int:
        """Return the value of `name=value`; raise ConfigError if it is not a valid one."""
        if isinstance(self.default, int):
            if not value.isdigit():
                raise WrongValue(f"{name}={value} is not a whole number from 0")
            return int(value)
        if self.choices and value not in self.choices:
            raise UnknownName(
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
        folder: the folder of relative paths of pictures.
    """

    options: dict[str, Any]
    split: str
    index: int = 0
    file: str = ""
    count_tokens: Callable[[str], int] | None = None
    folder: Path | None = None

    @property
    def stem(self) -> str:
        """The file name without folder and extension."""
        return self.file.rpartition("/")[2].split(".")[0]


Convert = Callable[[Row, Context], PreparedRow]
SelectSplit = Callable[[list[str], list[str], dict[str, Any], str], set[int]]


@dataclass(frozen=True)
class DataSet:
    """One data set of sets.yaml, where each field is explained."""

    help: str
    splits: dict[str, tuple[str, ...]]
    convert: Convert
    repo: str = ""
    data_source: str = ""
    local: tuple[str, ...] = ()
    style: str = "own"
    ability: str = "math"
    judged: str = "rule"
    options: dict[str, Option] = field(default_factory=dict)
    slices: dict[str, tuple[int, int]] = field(default_factory=dict)
    select_split: SelectSplit | None = None
    group: str = ""
    pair_by: tuple[str, ...] = ()
    compares_replies: bool = False
    note: str = ""
