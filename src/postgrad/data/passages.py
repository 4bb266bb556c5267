"""What a question is about, as the text before it: passages as texts, lists and objects."""

import json
import re
from typing import Any

from postgrad.data.rows import Row, RowError, checked_text, text_of

# SQuAD, BoolQ, RACE, ASDiv, MuSR, ZebraLogic, CoQA, MuSiQue and others call their passages so.
PASSAGE_COLUMNS = (
    *("context", "passage", "article", "body", "narrative", "puzzle", "story", "document"),
    *("paragraph", "table", "contexts", "passages", "documents", "paragraphs", "ctxs"),
)
ORDER = {column: i for i, column in enumerate(PASSAGE_COLUMNS)}
TEXT_FIELDS = ("text", "paragraph_text", "passage_text", "content", "body", "sentences")
MAY_BE_NAMES = ("document", "table")  # columns that may hold the name of what they are called
NAME = re.compile(r"[\w.:/#-]+", re.ASCII)


def question_of(row: Row, name: str) -> str:
    """The text of a question, after the passages that it is about if the row has some.

    Raises:
        RowError: the question is no text, or a passage has a form that is not read.
    """
    question = text_of(row, name)
    columns = [column for column in row if str(column).lower() in ORDER]  # SVAMP's is called Body
    passages: list[str] = []
    for column in sorted(columns, key=lambda column: ORDER[str(column).lower()]):
        passage = _passage_text(row[column], column)
        if passage and passage not in question and passage not in passages:
            passages.append(passage)
    return "\n\n".join([*passages, question])


def _passage_text(value: Any, column: str) -> str:
    """The text of a column with one passage or several; "" if it has none."""
    if isinstance(value, str):
        parsed = _parse_json(value)
        blocks = None if parsed is None else _blocks(parsed)
        if blocks is not None:
            return "\n\n".join(blocks)
        text = checked_text(value, column).strip()
        return "" if column in MAY_BE_NAMES and NAME.fullmatch(text) else text
    if not isinstance(value, list | dict) or not value:
        return ""
    blocks = _blocks(value)
    if blocks is None:
        raise RowError(
            f"{column} is {'an object' if isinstance(value, dict) else 'a list'} that is not read "
            "as passages, so it would not be in the prompt; write it as a text, or leave it out "
            f"(FILE:{column}=unused)"
        )
    return "\n\n".join(checked_text(block, column) for block in blocks)


def _parse_json(text: str) -> Any:
    """The list or object that a text holds as JSON (2WikiMultihopQA's context), or None."""
    if text.lstrip()[:2] not in ("[[", "[{", '["', '{"'):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _blocks(value: Any) -> list[str] | None:
    """One text per passage, its title in the first line; None for values of other forms.

    Read are HotpotQA's {title: [...], sentences: [[...]]}, PubMedQA's {contexts: [...]}, and lists
    of texts, of [title, sentences] and of {title, text}.
    """
    if isinstance(value, dict):
        titles, texts = value.get("title"), value.get("sentences")
        if isinstance(titles, list) and isinstance(texts, list) and len(titles) == len(texts):
            value = [list(pair) for pair in zip(titles, texts, strict=True)]
        else:
            value = value.get("contexts")
    if not isinstance(value, list):
        return None
    blocks: list[str] = []
    for item in value:
        block = _block(item)
        if block is None:
            return None
        blocks.append(block)
    return [block for block in blocks if block]


def _block(item: Any) -> str | None:
    if isinstance(item, str):
        return item.strip()
    if isinstance(item, list) and len(item) == 2:
        title, text = item
        if not isinstance(text, list):  # a pair of texts may be two cells of a table
            return None
    elif isinstance(item, dict) and "role" not in item:  # a message has a speaker
        title = item.get("title")
        text = next((item[name] for name in TEXT_FIELDS if item.get(name)), None)
    else:
        return None
    if isinstance(text, list) and all(isinstance(sentence, str) for sentence in text):
        text = " ".join(sentence.strip() for sentence in text)
    if not isinstance(text, str) or not isinstance(title, str | None):
        return None
    return "\n".join(filter(None, ((title or "").strip(), text.strip())))
