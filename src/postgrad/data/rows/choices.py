"""Multiple-choice questions: reads the layouts of ARC, MMLU, MMLU-Pro and MedQA into one form.

Also writes the two prompts in which Postgrad asks such a question.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.data.rows.values import Row, RowError, checked_text, is_missing, text_of, type_name

LETTERS = "ABCDEFGHIJ"
LETTERED_COLUMNS = ("option_a", "option_b", "option_c", "option_d")  # Global-MMLU's
# Columns that name the answer once more: SuperGPQA's, MedQA's and MMLU-Pro's.
SECOND_ANSWERS = ("answer_letter", "answer_idx", "answer_index")


@dataclass(frozen=True)
class Choices:
    """A question with its options in order, the index of the correct option, and its subject.

    Raises RowError for a number of options that has no letters.
    """

    question: str
    options: tuple[str, ...]
    correct: int
    subject: str = ""

    def __post_init__(self) -> None:
        count = len(self.options)
        if not 2 <= count <= len(LETTERS):
            raise RowError(f"a question needs 2 to {len(LETTERS)} options, this one has {count}")

    @property
    def letter(self) -> str:
        """The letter of the correct option."""
        return LETTERS[self.correct]


def read_choices(row: Row, stem: str = "") -> Choices:
    """Return the question of a row of ARC, MMLU (from the hub or a csv file), MMLU-Pro or MedQA.

    Args:
        row: the columns by name.
        stem: the file name without its extension; some files are named after the subject.

    Raises:
        RowError: a column is missing, or the answer is not one of the options.
    """
    question = text_of(row, "question").strip()
    if "answerKey" in row:
        return _read_arc(row, question)
    if "options" in row:
        options, subject = _read_options(row["options"], "options"), row.get("category")
    elif "choices" in row:
        options, subject = _read_options(row["choices"], "choices"), row.get("subject")
    else:
        options, subject = _read_lettered(row), row.get("subject")
    if not subject and "options" not in row:
        subject = _subject_of_file(stem)
    return Choices(question, tuple(options), _answer_index(row, options), str(subject or ""))


def _read_lettered(row: Row) -> list[str]:
    """Return the options in columns: A to D and on, or option_a to option_d and on."""
    names = list(LETTERS)
    if LETTERED_COLUMNS[0] in row:
        names = [f"option_{letter}" for letter in LETTERS.lower()]
    filled = [i for i, name in enumerate(names, 1) if row.get(name) not in (None, "")]
    return [text_of(row, name) for name in names[: max([4, *filled])]]


def sentence_prompt(item: Choices) -> str:
    """Return the prompt of the MMLU evaluation: it asks for one sentence with the letter."""
    about = f" about {item.subject.replace('_', ' ')}" if item.subject else ""
    return (
        f"Answer the following multiple choice question{about}. "
        "Respond with one sentence of the form "
        '"The correct answer is _", filling the blank with the letter of the correct answer.\n\n'
        f"Question: {item.question}\n{lettered(item.options, '.')}Answer:"
    )


def plain_prompt(item: Choices) -> str:
    """Return the question, a blank line, and one option per line."""
    return f"{item.question}\n\n{lettered(item.options, ')')}"


def lettered(options: Sequence[str], mark: str) -> str:
    """Return one option per line, with its letter and `mark`: `A. ...` or `A) ...`."""
    pairs = zip(LETTERS, options, strict=False)
    return "".join(f"{letter}{mark} {option}\n" for letter, option in pairs)


def _subject_of_file(stem: str) -> str:
    """Return the subject in the name of an MMLU file: mmlu_nutrition or nutrition_test."""
    subject = stem.removeprefix("mmlu_")
    for split in ("_test", "_val", "_dev"):
        subject = subject.removesuffix(split)
    return "" if subject == stem else subject


def _read_options(value: Any, name: str) -> list[str]:
    if isinstance(value, dict):  # MedQA's options by their letters; parquet adds null ones
        letters = [letter for letter, option in value.items() if option is not None]
        if letters != list(LETTERS[: len(letters)]):
            raise RowError(f"{name} must be a list of options, or an object with A, B, ...")
        value = [value[letter] for letter in letters]
    if not isinstance(value, list):
        raise RowError(f"{name} must be a list of options, not {type_name(value)}")
    return [checked_text(option, f"{name}[{i}]") for i, option in enumerate(value)]


def _answer_index(row: Row, options: Sequence[str]) -> int:
    """Return the index of the one option that all columns of the answer name.

    Raises RowError if a column names no option, or if they leave none or several.
    """
    possible = set(range(len(options)))
    for name in ("answer", *SECOND_ANSWERS):
        if name != "answer" and is_missing(row.get(name)):
            continue
        named = _named_options(row.get(name), options)
        if not named:
            raise RowError(
                f"{name} must be an index from 0, a letter or the text of one of the "
                f"{len(options)} options, not {row.get(name)!r}"
            )
        if not possible & named:
            raise RowError(f"answer and {name} name different options; correct one of them")
        possible &= named
    if len(possible) > 1:
        raise RowError(f"answer {row['answer']!r} names several options; write an index from 0")
    return possible.pop()


def _named_options(answer: Any, options: Sequence[str]) -> set[int]:
    """Return the options that an answer may name: by an index from 0, a letter or the text."""
    indices = range(len(options))
    if isinstance(answer, str):
        letter = answer.strip()
        return {i for i in indices if options[i] == answer or LETTERS[i : i + 1] == letter}
    is_index = isinstance(answer, int | float) and not isinstance(answer, bool)
    return {i for i in indices if is_index and i == answer}


def _read_arc(row: Row, question: str) -> Choices:
    """Return a question whose choices are {text: [...], label: [...]} or a list of such pairs."""
    choices = row["choices"]
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        choices = {name: [choice.get(name) for choice in choices] for name in ("text", "label")}
    if not isinstance(choices, dict) or not {"text", "label"} <= choices.keys():
        raise RowError(f"choices must be an object with text and label, not {type_name(choices)}")
    texts = _read_options(choices["text"], "choices.text")
    labels = _read_options(choices["label"], "choices.label")
    label = text_of(row, "answerKey").strip()
    if len(texts) != len(labels) or label not in labels:
        raise RowError(f"answerKey is {label!r}, the {len(texts)} options are {', '.join(labels)}")
    return Choices(question, tuple(texts), labels.index(label))
