"""Multiple-choice questions: reads the layouts of ARC, MMLU, MMLU-Pro and GPQA into one form.

Also writes the two prompts in which Postgrad asks such a question.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.data.rows.values import Row, RowError, checked_text, text_of, type_name

LETTERS = "ABCDEFGHIJ"
LETTERED_COLUMNS = ("option_a", "option_b", "option_c", "option_d")  # Global-MMLU's
# Columns that name the answer once more: SuperGPQA's, MedQA's and MMLU-Pro's.
SECOND_ANSWERS = ("answer_letter", "answer_idx", "answer_index")
GPQA_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


@dataclass(frozen=True)
class Choices:
    """A question with its options in order, the index of the correct option, and its subject."""

    question: str
    options: tuple[str, ...]
    correct: int
    subject: str = ""

    @property
    def letter(self) -> str:
        """The letter of the correct option."""
        return LETTERS[self.correct]


def read_choices(row: Row, stem: str = "") -> Choices:
    """Reads a row of ARC, MMLU (from the hub or a csv file), MMLU-Pro or GPQA.

    Args:
        row: the columns by name.
        stem: the file name without its extension; some files are named after the subject.

    Raises:
        RowError: a column is missing, or the answer is not one of the options.
    """
    if "Correct Answer" in row:
        return _read_gpqa(row)
    question = text_of(row, "question").strip()
    if "answerKey" in row:
        return _read_arc(row, question)
    if "options" in row:
        options = _read_options(row["options"], "options")
        return _make_choices(
            question, options, _answer_index(row, options), str(row.get("category") or "")
        )
    subject = str(row.get("subject") or _subject_of_file(stem))
    if "choices" in row:
        options = _read_options(row["choices"], "choices")
        return _make_choices(question, options, _answer_index(row, options), subject)
    options = _read_lettered(row)
    return _make_choices(question, options, _answer_index(row, options), subject)


def _read_lettered(row: Row) -> list[str]:
    """The options in columns of their own: A to D and on, or option_a to option_d and on."""
    form = "option_{}" if LETTERED_COLUMNS[0] in row else "{}"
    letters = LETTERS.lower() if LETTERED_COLUMNS[0] in row else LETTERS
    names = [form.format(letter) for letter in letters]
    count = 4
    for i, name in enumerate(names[4:], 5):
        if row.get(name) not in (None, ""):
            count = i
    return [text_of(row, name) for name in names[:count]]


def sentence_prompt(item: Choices) -> str:
    """The prompt of the MMLU evaluation: subject, options, and a request for one sentence."""
    about = f" about {item.subject.replace('_', ' ')}" if item.subject else ""
    return (
        f"Answer the following multiple choice question{about}. "
        "Respond with one sentence of the form "
        '"The correct answer is _", filling the blank with the letter of the correct answer.\n\n'
        f"Question: {item.question}\n{lettered(item.options, '.')}Answer:"
    )


def plain_prompt(item: Choices) -> str:
    """The question, a blank line, and one option per line."""
    return f"{item.question}\n\n{lettered(item.options, ')')}"


def lettered(options: Sequence[str], mark: str) -> str:
    """One option per line, with its letter and `mark`: `A. ...` or `A) ...`."""
    pairs = zip(LETTERS, options, strict=False)
    return "".join(f"{letter}{mark} {option}\n" for letter, option in pairs)


def hash_below(key: str, count: int) -> int:
    """A number from 0 to count - 1 that depends on `key` only, not on the process or row order."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"choices").digest()
    return int.from_bytes(digest, "big") % count


def _make_choices(
    question: str, options: Sequence[str], correct: int, subject: str = ""
) -> Choices:
    if not 2 <= len(options) <= len(LETTERS):
        raise RowError(f"a question needs 2 to {len(LETTERS)} options, this one has {len(options)}")
    return Choices(question, tuple(options), correct, subject)


def _subject_of_file(stem: str) -> str:
    """The subject in the name of one of MMLU's csv files: mmlu_nutrition or nutrition_test."""
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
    """The index of the answer, which a second column may name, too.

    Raises:
        RowError: the two name different options, or the answer is no option.
    """
    answer = row["answer"]
    for name in SECOND_ANSWERS:
        value = row.get(name)
        if value in (None, "") or value != value:  # pandas writes NaN for an empty cell
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        index = _option_index(value, options, name)
        letter = answer.strip() if isinstance(answer, str) else answer
        if answer != options[index] and letter not in (LETTERS[index], index):
            raise RowError(f"answer and {name} name different options; correct one of them")
        return index
    return _option_index(answer, options)


def _option_index(answer: Any, options: Sequence[str], name: str = "answer") -> int:
    """The index of an answer that is an index from 0, a letter, or the text of one option."""
    count = len(options)
    letter = answer.strip() if isinstance(answer, str) else ""
    is_text = isinstance(answer, str) and list(options).count(answer) == 1
    if letter in tuple(LETTERS):
        index = LETTERS.index(letter)
        if is_text and name == "answer" and options[index] != answer:
            raise RowError(
                f"answer {answer!r} is the letter of one option and the text of another; "
                "write its index from 0"
            )
    elif is_text:
        index = list(options).index(answer)
    else:
        index = answer
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        raise RowError(
            f"{name} must be an index from 0, a letter or the text of one of the {count} options, "
            f"not {answer!r}"
        )
    return index


def _read_arc(row: Row, question: str) -> Choices:
    texts, labels = _read_arc_options(row["choices"])
    label = text_of(row, "answerKey").strip()
    if label not in labels:
        raise RowError(f"answerKey is {label!r}, the options are {', '.join(labels)}")
    return _make_choices(question, texts, labels.index(label))


def _read_arc_options(choices: Any) -> tuple[list[str], list[str]]:
    """(texts, labels) from {text: [...], label: [...]} or from a list of {text, label}."""
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        choices = {name: [choice.get(name) for choice in choices] for name in ("text", "label")}
    if not isinstance(choices, dict) or not {"text", "label"} <= choices.keys():
        raise RowError(f"choices must be an object with text and label, not {type_name(choices)}")
    texts = _read_options(choices["text"], "choices.text")
    labels = _read_options(choices["label"], "choices.label")
    if len(texts) != len(labels):
        raise RowError(f"choices has {len(texts)} texts and {len(labels)} labels")
    return texts, labels


def _read_gpqa(row: Row) -> Choices:
    """GPQA lists the correct answer first, so a hash of the question decides the options' order."""
    question = text_of(row, "Question").strip()
    options = [text_of(row, name).strip() for name in ("Correct Answer", *GPQA_WRONG)]

    def sort_key(i: int) -> bytes:
        text = f"{question}\0{i}".encode()
        return hashlib.blake2b(text, digest_size=8, person=b"gpqa").digest()

    order = sorted(range(4), key=sort_key)
    shuffled = [options[i] for i in order]
    return _make_choices(question, shuffled, order.index(0), str(row.get("Subdomain") or ""))
