"""Alpaca's columns `instruction`, `input` and `history` as messages."""

from typing import Any

from postgrad.data.rows import Row, RowError, checked_text, text_of, type_name, user_turn
from postgrad.problem import Message

# Columns of the messages; all but the instruction are optional. Dolly's `context` is `input`.
INSTRUCTION_COLUMNS = ("instruction", "input", "context", "history")


def read_instruction_messages(row: Row) -> tuple[Message, ...]:
    """The turns of `history`, then the instruction with `input` or `context` after it.

    Raises:
        RowError: a column is no text, or `history` is no list of pairs.
    """
    content = text_of(row, "instruction")
    for context in ("input", "context"):
        if row.get(context) or row.get(context) == 0:  # a number is refused, also this one
            content = f"{content}\n\n{text_of(row, context)}"
    return (*_read_history(row.get("history")), *user_turn(content))


def is_history(value: Any) -> bool:
    """Whether a value is a list of pairs of texts, as LLaMA-Factory and ms-swift write turns."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in value)
    )


def _read_history(value: Any) -> tuple[Message, ...]:
    """LLaMA-Factory's `history`: the turns before the instruction, as [question, answer]."""
    if not value:
        return ()
    if not isinstance(value, list):
        raise RowError(f"history must be a list of [question, answer], not {type_name(value)}")
    messages: list[Message] = []
    for i, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"history[{i}] must be [question, answer]; write two texts")
        for j, role in enumerate(("user", "assistant")):
            text = checked_text(pair[j], f"history[{i}][{j}]")
            if not text.strip():
                raise RowError(f"history[{i}][{j}] is empty; fill it or remove the row")
            messages.append({"role": role, "content": text})
    return tuple(messages)
