"""Turns of ShareGPT's conversations as messages of a chat."""

import json
from typing import Any

from postgrad.data.rows import Row, RowError, type_name

ROLES = {  # other names are roles already
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def sharegpt_messages(turns: Any, name: str) -> list[Any]:
    """The messages of a conversation in the column `name`.

    Its turns are {from, value}, messages, Capybara's {input, output}, or texts of the user and the
    assistant in turn, as in LIMA.

    Raises:
        RowError: the value is no list of one of them.
    """
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise RowError(f"{name} must be a list of turns {{from, value}}, not {type_name(turns)}")
    messages: list[Any] = []
    for turn in turns:
        if turn.keys() == {"input", "output"}:
            messages.append({"role": "user", "content": turn["input"]})
            messages.append({"role": "assistant", "content": turn["output"]})
        else:
            messages.append(sharegpt_message(turn))
    return messages


def sharegpt_message(turn: Row) -> Row:
    """The message of a turn {from, value}; a turn without `from` is a message already."""
    if "from" not in turn:
        return turn
    speaker = turn["from"]
    message = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if speaker == "function_call":
        calls = _calls_of(turn)
        return {"role": "assistant", "content": None, "tool_calls": calls, **message}
    role = ROLES.get(speaker, speaker)
    return {"role": role, "content": turn.get("value"), **message}


def _calls_of(turn: Row) -> list[Any]:
    """The calls of a turn from `function_call`: JSON text of one {name, arguments}, or of several.

    Raises:
        RowError: the value is no such text.
    """
    value = turn.get("value")
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        calls = None
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise RowError(
            "the value of a turn from function_call, and xLAM's answers, must be JSON text "
            f"{{name, arguments}}, not {str(value)[:50]!r}"
        )
    return [{"type": "function", "function": call} for call in calls]
