"""Questions with options: each layout they come in, read into one form, and the two ways they are asked."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.data.rows import Row, RowError, checked_text, kind_of, text_of

LETTERS = "ABCDEFGHIJ"
GPQA_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


@dataclass(frozen=True)
class Choices:
    """A question, its options in order, the index of the right one, and what it is about."""

    question: str
    options: tuple[str, ...]
    right: int
    subject: str = ""

    @property
    def letter(self) -> str:
        return LETTERS[self.right]


def read_choices(row: Row, stem: str = "") -> Choices:
    """A row of ARC, MMLU (the hub's or a csv file's), MMLU-Pro or GPQA. `stem` is the file's name, which may tell the subject.

    Raises:
        RowError: a column is missing, or the answer names no option.
    """
    if "Correct Answer" in row:
        return _gpqa(row)
    question = text_of(row, "question").strip()
    if "answerKey" in row:
        texts, labels = _arc_options(row["choices"])
        return _make(
            question, texts, _index_of(text_of(row, "answerKey").strip(), labels, "answerKey")
        )
    if "options" in row:
        options = _list(row["options"], "options")
        return _make(
            question, options, _index(row["answer"], len(options)), str(row.get("category") or "")
        )
    if "choices" in row:
        options = _list(row["choices"], "choices")
        return _make(
            question,
            options,
            _index(row["answer"], len(options)),
            str(row.get("subject") or _subject(stem)),
        )
    options = [text_of(row, letter) for letter in "ABCD"]
    letter = text_of(row, "answer").strip()
    if letter not in tuple("ABCD"):
        raise RowError(f"answer must be A, B, C or D, not {letter!r}")
    return _make(question, options, "ABCD".index(letter), str(row.get("subject") or _subject(stem)))


def sentence_prompt(item: Choices) -> str:
    """The question of the MMLU evaluation: names the subject, lists the options, asks for one sentence with the letter."""
    about = f" about {item.subject.replace('_', ' ')}" if item.subject else ""
    return (
        f"Answer the following multiple choice question{about}. Respond with one sentence of the form "
        '"The correct answer is _", filling the blank with the letter of the correct answer.\n\n'
        f"Question: {item.question}\n{lettered(item.options, '.')}Answer:"
    )


def plain_prompt(item: Choices) -> str:
    """The question, a blank line, one option a line."""
    return f"{item.question}\n\n{lettered(item.options, ')')}"


def lettered(options: Sequence[str], mark: str) -> str:
    """One option a line, with its letter: `A. ...` or `A) ...`."""
    return "".join(
        f"{letter}{mark} {option}\n" for letter, option in zip(LETTERS, options, strict=False)
    )


def draw(key: str, count: int) -> int:
    """A number below `count` that follows from the text alone: the same in every process and row order."""
    return (
        int.from_bytes(
            hashlib.blake2b(key.encode(), digest_size=8, person=b"choices").digest(), "big"
        )
        % count
    )


def _make(question: str, options: Sequence[str], right: int, subject: str = "") -> Choices:
    if not 2 <= len(options) <= len(LETTERS):
        raise RowError(f"a question needs 2 to {len(LETTERS)} options, this one has {len(options)}")
    return Choices(question, tuple(options), right, subject)


def _subject(stem: str) -> str:
    subject = stem.removeprefix("mmlu_")
    for split in ("_test", "_val", "_dev"):
        subject = subject.removesuffix(split)
    return subject


def _list(value: Any, name: str) -> list[str]:
    if not isinstance(value, list):
        raise RowError(f"{name} must be a list of options, not {kind_of(value)}")
    return [checked_text(option, f"{name}[{i}]") for i, option in enumerate(value)]


def _index(answer: Any, count: int) -> int:
    """An answer given as an index from 0 or as a letter."""
    if isinstance(answer, str) and len(answer.strip()) == 1 and answer.strip() in LETTERS:
        answer = LETTERS.index(answer.strip())
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < count:
        raise RowError(
            f"answer must be an index from 0 or a letter of the {count} options, not {answer!r}"
        )
    return answer


def _arc_options(choices: Any) -> tuple[list[str], list[str]]:
    """ARC's {text: [...], label: [...]}, or a list of {text, label}."""
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        choices = {name: [choice.get(name) for choice in choices] for name in ("text", "label")}
    if not isinstance(choices, dict) or not {"text", "label"} <= choices.keys():
        raise RowError(f"choices must be an object with text and label, not {kind_of(choices)}")
    texts, labels = _list(choices["text"], "choices.text"), _list(choices["label"], "choices.label")
    if len(texts) != len(labels):
        raise RowError(f"choices has {len(texts)} texts and {len(labels)} labels")
    return texts, labels


def _index_of(label: str, labels: list[str], name: str) -> int:
    if label not in labels:
        raise RowError(f"{name} is {label!r}, the options are {', '.join(labels)}")
    return labels.index(label)


def _gpqa(row: Row) -> Choices:
    """GPQA lists the right answer first, so the options are put in an order that follows from the question."""
    question = text_of(row, "Question").strip()
    options = [text_of(row, name).strip() for name in ("Correct Answer", *GPQA_WRONG)]
    order = sorted(
        range(4),
        key=lambda i: hashlib.blake2b(
            f"{question}\0{i}".encode(), digest_size=8, person=b"gpqa"
        ).digest(),
    )
    return _make(
        question, [options[i] for i in order], order.index(0), str(row.get("Subdomain") or "")
    )
