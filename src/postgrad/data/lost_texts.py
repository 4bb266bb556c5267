"""Refuses rows whose text would be missing where it is read: blank prompts and replies, programs.

Each of them would otherwise be trained on without a word.
"""

from collections.abc import Iterator
from typing import Any

from postgrad.data.messages import is_trained, reasoning_field
from postgrad.data.rows import Row, RowError
from postgrad.problem import Message, Problem

PLACEHOLDER = "-"  # OpenCodeReasoning has it for questions that other data sets have


def check_texts(row: Row, problem: Problem) -> None:
    """Raises RowError if the row has a text that the problem lacks, or none where one is needed."""
    _check_prompt(problem)
    _check_replies(problem)
    _check_code(row, problem)


def _check_prompt(problem: Problem) -> None:
    asked = [message for message in problem.messages if message["role"] != "system"]
    texts = [_text(message) for message in asked]
    has_reply = bool(problem.demonstrations or problem.conversation or "chosen" in problem.extra)
    has_text = any(texts) or any("tool_calls" in message for message in asked)
    if asked and has_reply and not has_text:  # environments write the text of other prompts
        raise RowError(
            "the prompt is empty: its messages have no text; fill them or remove the row"
        )
    if texts == [PLACEHOLDER]:
        raise RowError(
            f"the prompt is {PLACEHOLDER!r}, a placeholder for a text that the file does not have; "
            "write the text, or remove the row"
        )


def _check_replies(problem: Problem) -> None:
    """Raises RowError for an empty message that SFT would train on: it teaches to end at once."""
    conversation = problem.conversation
    messages = conversation.messages if conversation else ()
    start = conversation.num_prompt if conversation else 0
    for i, message in enumerate(messages[start:], start):
        has_more = "tool_calls" in message or reasoning_field([message])
        if is_trained(message) and not _text(message) and not has_more:
            raise RowError(
                f"message {i + 1} of {len(messages)} is an empty reply of the assistant; fill it, "
                "give it the weight 0, or remove the row"
            )


def _check_code(row: Row, problem: Problem) -> None:
    """Raises RowError for a program that input and output belong to, as in CRUXEval."""
    code = row.get("code")
    if not isinstance(code, str) or not code.strip() or not {"input", "output"} <= row.keys():
        return
    texts = [*_responses(problem), *map(_text, problem.messages)]
    if not any(code.strip() in text for text in texts):
        raise RowError(
            "code would not be in the prompt; write it into input, or leave it out "
            "(FILE:code=unused)"
        )


def _responses(problem: Problem) -> Iterator[str]:
    """The texts of the responses that the row gives."""
    yield from problem.demonstrations
    conversation = problem.conversation
    for message in conversation.messages if conversation else ():
        if message["role"] == "assistant":
            yield _text(message)


def _text(message: Message) -> str:
    content: Any = message.get("content")
    return content.strip() if isinstance(content, str) else ""
